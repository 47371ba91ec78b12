"""The engine against a client that is not ours: raw frames, right and wrong."""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nanocore.protocol.messages import PROTOCOL_VERSION, Op
from nanocore.protocol.sockets.client_socket import ClientSocket
from tests.end_to_end.forked import Engine, engine
from tests.protocol_files.__main__ import DOCUMENT
from tests.tiny_models import VOCAB_SIZE

Body = dict[str, Any]


class RawClient:
    """Speaks the protocol with plain dicts, as a client in another language would."""

    def __init__(self, endpoint: str) -> None:
        self._socket = ClientSocket(endpoint)

    async def send(self, op: int, body: Body | bytes) -> None:
        data = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
        await self.send_frames([bytes([op]), data])

    async def send_frames(self, frames: list[bytes]) -> None:
        await self._socket.send(frames)

    async def receive(self) -> tuple[int, Body]:
        """The next message that is not a PING."""
        while True:
            op, body = await self._socket.receive()
            if op[0] != Op.PING:
                return op[0], msgspec.msgpack.decode(body)

    async def hello(self, minor: int = 0) -> Body:
        await self.send(Op.HELLO, {"protocol": [1, minor]})
        op, body = await self.receive()
        assert op == Op.WELCOME
        return body

    async def still_serves(self) -> None:
        """A whole request on this session."""
        _, tokens = await self.complete(submit("probe", max_tokens=2))
        assert len(tokens) == 8

    async def complete(self, request: Body) -> tuple[int, bytes]:
        """(seed, tokens) of a request that runs to its length."""
        await self.send(Op.SUBMIT, request)
        op, accepted = await self.receive()
        assert (op, accepted["request_id"]) == (Op.ACCEPTED, request["request_id"])
        tokens = b""
        while True:
            op, output = await self.receive()
            assert op == Op.OUTPUT
            tokens += output.get("tokens", b"")
            reasons = [e["finish_reason"] for e in output.get("events", []) if "finish_reason" in e]
            if reasons:
                assert reasons == ["length"]
                return accepted["seed"], tokens

    def close(self) -> None:
        self._socket.close()


def submit(
    request_id: str = "r", prompt: bytes = struct.pack("<2i", 1, 2), **sampling: Any
) -> Body:
    return {
        "request_id": request_id,
        "prompt_token_ids": prompt,
        "sampling": {"temperature": 0.0, "ignore_eos": True, "max_tokens": 4, **sampling},
    }


@pytest.fixture(scope="module")
def running(tiny_model: Path) -> Iterator[Engine]:
    with engine(tiny_model) as started:
        yield started


def talk(running: Engine, script: Callable[[RawClient], Awaitable[None]]) -> None:
    """Run a script against the engine; afterwards the engine must serve a new client."""

    async def main() -> None:
        client = RawClient(running.endpoint)
        try:
            await script(client)
        finally:
            client.close()
        fresh = RawClient(running.endpoint)
        try:
            await fresh.hello()
            await fresh.still_serves()
        finally:
            fresh.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_whole_chat_in_raw_frames(running: Engine) -> None:
    async def script(client: RawClient) -> None:
        welcome = await client.hello()
        assert welcome["protocol"] == [1, 0]
        assert welcome["model"]["vocab_size"] == VOCAB_SIZE
        assert len(welcome["engine_instance"]) == 32
        assert welcome["limits"]["max_frame_bytes"] == 2**24
        await client.still_serves()

    talk(running, script)


def test_nothing_counts_before_hello_or_after_bye(running: Engine) -> None:
    async def script(client: RawClient) -> None:
        await client.send(Op.SUBMIT, submit())
        op, error = await client.receive()
        assert (op, error["code"]) == (Op.ERROR, "no_session")
        await client.hello()
        await client.still_serves()
        await client.send(Op.BYE, {})
        await client.send(Op.SUBMIT, submit())
        op, error = await client.receive()
        assert (op, error["code"]) == (Op.ERROR, "no_session")

    talk(running, script)


def test_another_major_version_is_refused_with_those_that_are_not(running: Engine) -> None:
    async def script(client: RawClient) -> None:
        await client.send(Op.HELLO, {"protocol": [2, 0]})
        op, refused = await client.receive()
        assert (op, refused["supported"]) == (Op.REFUSED, [list(PROTOCOL_VERSION)])
        await client.hello()

    talk(running, script)


def test_a_newer_minor_version_is_served_in_ours(running: Engine) -> None:
    async def script(client: RawClient) -> None:
        major, minor = PROTOCOL_VERSION
        await client.send(Op.HELLO, {"protocol": [major, minor + 1]})
        op, welcome = await client.receive()
        assert (op, welcome["protocol"]) == (Op.WELCOME, [major, minor])

    talk(running, script)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (submit(temperature=float("nan")), ["temperature=nan", "$.sampling"]),
        (submit(temperature=-1.0), ["temperature=-1.0"]),
        (submit(temprature=1.0), ["temprature"]),
        (submit(max_tokens=0), ["max_tokens=0"]),
        (submit(max_tokens=1.5), ["$.sampling.max_tokens"]),
        (submit(seed=2**53), ["seed"]),
        (submit(top_p=0.0), ["top_p=0.0"]),
        (submit() | {"stop": ["x"]}, ["stop"]),
        (submit() | {"priority": 3}, ["priority=3"]),
        (submit() | {"cache_salt": ""}, ["cache_salt"]),
        (submit(request_id=""), ["request_id"]),
        (submit(request_id="x" * 257), ["request_id", "257"]),
        (submit(prompt=b"\1\0\0"), ["3 bytes"]),
        (submit(prompt=b""), ["0 bytes"]),
        (submit(prompt=struct.pack("<i", VOCAB_SIZE)), [str(VOCAB_SIZE)]),
        (submit(stop_token_ids=[0] * 129), ["129"]),
        ({"request_id": "r"}, ["prompt_token_ids"]),
    ],
)
def test_a_bad_submit_is_answered_by_name(running: Engine, body: Body, words: list[str]) -> None:
    async def script(client: RawClient) -> None:
        await client.hello()
        await client.send(Op.SUBMIT, body)
        op, error = await client.receive()
        assert (op, error["code"]) == (Op.ERROR, "invalid_request")
        assert error["request_id"] == body["request_id"]
        for word in words:
            assert word in error["message"]
        await client.still_serves()

    talk(running, script)


def test_too_long_is_an_error_of_its_own(running: Engine) -> None:
    async def script(client: RawClient) -> None:
        await client.hello()
        await client.send(Op.SUBMIT, submit(max_tokens=5000))
        op, error = await client.receive()
        assert (op, error["code"]) == (Op.ERROR, "context_length_exceeded")
        await client.still_serves()

    talk(running, script)


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([b"\x10"], "protocol_error"),
        ([b"\x10", b"\xc1"], "protocol_error"),
        ([b"\x10", b"\x91" * 100_000], "protocol_error"),
        ([b"\x10", b"\xdf\xff\xff\xff\xff"], "protocol_error"),
        ([b"\x10", b"{}", b""], "protocol_error"),
        ([b"", b""], "protocol_error"),
        ([b"GET / HTTP/1.1", b""], "protocol_error"),
        ([b"\x45", b"\x80"], "unknown_op"),
        ([bytes([Op.WELCOME]), b"\x80"], "unknown_op"),
        ([bytes([Op.CONTROL]), msgspec.msgpack.encode({"call_id": 1})], "protocol_error"),
        ([bytes([Op.HELLO]), msgspec.msgpack.encode({"protocol": [1, 0]})], "protocol_error"),
    ],
)  # fmt: skip
def test_bytes_that_are_no_message_are_data(
    running: Engine, frames: list[bytes], code: str
) -> None:
    async def script(client: RawClient) -> None:
        await client.hello()
        await client.send_frames(frames)
        op, error = await client.receive()
        if frames[1:] == [b"\x91" * 100_000] or frames[1:] == [b"\xdf\xff\xff\xff\xff"]:
            assert error["code"] in ("protocol_error", "invalid_request")
        else:
            assert (op, error["code"]) == (Op.ERROR, code)
        await client.still_serves()

    talk(running, script)


def test_ping_is_answered_with_its_nonce_and_the_step_counter(running: Engine) -> None:
    async def script(client: RawClient) -> None:
        await client.hello()
        await client.still_serves()
        await client.send(Op.PING, {"nonce": 77})
        op, pong = await client.receive()
        assert (op, pong["nonce"]) == (Op.PONG, 77)
        assert pong["num_steps"] >= 2

    talk(running, script)


def test_the_engine_counts_protocol_errors(running: Engine) -> None:
    async def script(client: RawClient) -> None:
        await client.hello()

        async def stats() -> Body:
            await client.send(Op.CONTROL, {"call_id": 5, "operation": "stats"})
            op, reply = await client.receive()
            assert (op, reply["call_id"]) == (Op.REPLY, 5)
            return reply["stats"]

        before = await stats()
        await client.send_frames([b"\xff", b""])
        await client.receive()
        after = await stats()
        assert after["num_protocol_errors"] == before["num_protocol_errors"] + 1
        assert after["num_clients"] >= 1

    talk(running, script)


def test_a_request_goes_on_from_its_seed_and_the_tokens_received(running: Engine) -> None:
    """What PROTOCOL.md tells clients to do when an engine has died, in the way of before 1.9."""
    prompt, num_tokens = struct.pack("<4i", 5, 6, 7, 8), 24

    async def script(client: RawClient) -> None:
        await client.hello()
        seed, tokens = await client.complete(
            submit("whole", prompt, max_tokens=num_tokens, temperature=1.0)
        )
        for num_received in (1, 10, num_tokens - 1):
            received = tokens[: 4 * num_received]
            _, rest = await client.complete(
                submit(
                    f"after {num_received}",
                    prompt + received,
                    max_tokens=num_tokens - num_received,
                    temperature=1.0,
                    seed=seed,
                )
            )
            assert received + rest == tokens
        _, other = await client.complete(
            submit("other", prompt, max_tokens=num_tokens, temperature=1.0, seed=seed + 1)
        )
        assert other != tokens

    talk(running, script)


def test_a_sample_goes_on_from_its_seed_and_the_tokens_received(running: Engine) -> None:
    """What PROTOCOL.md tells clients to do when an engine has died, as its program does it."""
    scope: dict[str, Any] = {}
    [source] = re.findall(r"```python\n(def go_on.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    exec(source, scope)
    whole = submit("whole", struct.pack("<4i", 5, 6, 7, 8), max_tokens=24, presence_penalty=1.0,
                   temperature=1.0, prompt_logprobs=0)  # fmt: skip

    async def script(client: RawClient) -> None:
        await client.hello()
        seed, tokens = await client.complete(whole)
        for num_received in (0, 1, 10, 24):
            received = tokens[: 4 * num_received]
            rest = scope["go_on"](whole, seed - 2, 2, received)
            _, others = await client.complete(rest | {"request_id": f"after {num_received}"})
            assert received + others == tokens

    talk(running, script)


def test_samples_of_one_prompt_are_those_of_requests_with_their_seeds(running: Engine) -> None:
    """And a single one can be ended, by its handle, while the others go on."""
    prompt = struct.pack("<40i", *range(40))

    async def samples(client: RawClient, **sampling: Any) -> dict[int, bytes]:
        await client.send(Op.SUBMIT, submit("s", prompt, temperature=1.0, seed=5, **sampling))
        op, accepted = await client.receive()
        assert (op, accepted["seed"]) == (Op.ACCEPTED, 5)
        first, n = accepted["handle"], sampling["n"]
        if n == 4:
            await client.send(
                Op.ABORT, {"request_ids": [], "handles": struct.pack("<2I", first + 1, 99_999)}
            )
        tokens = dict.fromkeys(range(first, first + n), b"")
        ended: dict[int, str] = {}
        while len(ended) < n:
            op, output = await client.receive()
            assert op == Op.OUTPUT
            handles = struct.unpack(f"<{len(output.get('handles', b'')) // 4}I",
                                    output.get("handles", b""))  # fmt: skip
            assert "counts" not in output
            for i, handle in enumerate(handles):
                tokens[handle] += output["tokens"][4 * i : 4 * i + 4]
            for event in output.get("events", []):
                if "finish_reason" in event:
                    ended[event["handle"]] = event["finish_reason"]
        aborted = [handle - first for handle, reason in ended.items() if reason == "abort"]
        assert aborted == ([1] if n == 4 else [])
        return {handle - first: ids for handle, ids in tokens.items() if ended[handle] == "length"}

    async def script(client: RawClient) -> None:
        await client.hello()
        three = await samples(client, n=3, max_tokens=6)
        assert len(set(three.values())) == 3
        for i in range(3):
            alone = submit(f"alone-{i}", prompt, temperature=1.0, seed=5 + i, max_tokens=6)
            assert (await client.complete(alone))[1] == three[i]
        left = await samples(client, n=4, max_tokens=200)
        assert left.keys() == {0, 2, 3}
        assert all(len(ids) == 800 for ids in left.values())

    talk(running, script)
