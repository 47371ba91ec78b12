"""What hostile clients may not do to an engine and to others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from nanocore.protocol.codec import client_decoder, encode, pack_int32, unpack_int32
from nanocore.protocol.messages import (
    Accepted,
    Bye,
    Hello,
    Message,
    Output,
    Ping,
    Pong,
    Refused,
    Submit,
    Welcome,
)
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore_conformance.peer_socket import PeerSocket
from tests.hostile import attack
from tests.protocol.zmtp_peer import ZmtpPeer

pytestmark = pytest.mark.campaign

Heard = TypeVar("Heard", bound=Message)

NUM_MESSAGES = 10_000
PATIENCE_S = 60.0


def test_an_engine_and_its_clients_outlive_hostile_ones(short_path: Path) -> None:
    report = attack.run(
        short_path,
        num_messages=NUM_MESSAGES,
        num_attackers=2,
        num_bystanders=1,
        num_connections=100,
        quiet_s=0.5,
        seed=7,
    )
    assert report["num_messages"] >= NUM_MESSAGES
    assert report["engine_alive"]
    assert report["failures"] == []
    assert report["engine_exit_code"] == 0
    assert report["mismatches"] == []
    assert report["num_bystander_requests"] > 3
    assert report["descriptors_leaked"] == 0
    assert report["requests_left"] == 0
    assert report["free_blocks_after"] == report["free_blocks_before"]
    # Attackers get an answer to each message but to those that have none, and each is counted.
    answers = report["answers"]
    codes = ("protocol_error", "unknown_op", "no_session")
    num_errors = sum(answers[f"ERROR {code}"] for code in codes)
    assert NUM_MESSAGES / 3 < num_errors <= report["num_protocol_errors"]
    assert {"ERROR invalid_request", "ACCEPTED", "WELCOME", "REFUSED", "REPLY"} <= answers.keys()
    assert report["engine_log_lines"] < 100


@contextmanager
def limited_engine(
    model: Path, directory: Path, descriptors: tuple[int, int], *flags: str
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """(process, endpoint) of an engine that was started with a soft and a hard limit."""
    endpoint = f"ipc://{directory / 'e' / 'engine.sock'}"
    limited = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, {descriptors}); "
        "from nanocore.engine_core.cli import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", limited, "--model", str(model), "--listen", endpoint, *flags]
    process = subprocess.Popen(command)
    try:
        yield process, endpoint
    finally:
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def hear(peer: PeerSocket, kind: type[Heard]) -> Heard:
    """The next message of this kind; PINGs are passed over."""
    while (frames := peer.receive(PATIENCE_S)) is not None:
        message = client_decoder().decode(frames)
        if isinstance(message, kind):
            return message
        assert isinstance(message, (Ping, Accepted)), message
    raise AssertionError(f"no {kind.__name__} came")


def say_hello(peer: PeerSocket) -> None:
    peer.send(encode(Hello(protocol=(1, 4))))


def generate(peer: PeerSocket, request_id: str) -> list[int]:
    """Eight tokens of a request."""
    sampling = EngineSamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    peer.send(
        encode(
            Submit(request_id=request_id, prompt_token_ids=pack_int32([1, 2, 3]), sampling=sampling)
        )
    )
    tokens: list[int] = []
    while True:
        output = hear(peer, Output)
        tokens += unpack_int32(output.tokens)
        if any(event.finish_reason for event in output.events):
            return tokens


def peak_resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def test_more_connections_than_the_shells_limit_of_descriptors_do_not_end_an_engine(
    tiny_model: Path, short_path: Path
) -> None:
    with (
        limited_engine(tiny_model, short_path, (64, 2000)) as (_process, endpoint),
        closing(PeerSocket(endpoint)) as peer,
        ExitStack() as stack,
    ):
        say_hello(peer)
        assert hear(peer, Welcome).limits.max_num_clients == 1024
        for _ in range(200):
            stranger = stack.enter_context(ZmtpPeer(endpoint))
            assert stranger.read(1) == b"\xff"  # it was accepted: ZMTP's greeting
        peer.send(encode(Ping(nonce=5)))
        assert hear(peer, Pong).nonce == 5


def test_an_engine_with_64_descriptors_and_two_places_outlives_endless_messages_and_crowds(
    tiny_model: Path, short_path: Path
) -> None:
    with (
        limited_engine(tiny_model, short_path, (64, 64), "--max-num-clients", "2") as (
            process,
            endpoint,
        ),
        ExitStack() as stack,
    ):
        one, two, third = (stack.enter_context(closing(PeerSocket(endpoint))) for _ in range(3))
        for peer in (one, two):
            say_hello(peer)
            assert hear(peer, Welcome).limits.max_num_clients == 2
        say_hello(third)
        refused = hear(third, Refused)
        assert "--max-num-clients" in refused.message
        assert refused.retry_after_s is not None
        quiet = generate(one, "quiet")
        before = peak_resident_bytes(process.pid)

        for size, num_attacks in ((15 * 10**6, 5), (0, 1)):
            frame = b"\3" + size.to_bytes(8, "big") + bytes(size)
            frames = frame if size else frame * 10_000
            for attack in range(num_attacks):
                with ZmtpPeer(endpoint) as attacker:
                    attacker.greet()
                    attacker.send_endless_message(frames)
                assert generate(one, f"{size} {attack}") == quiet
        assert peak_resident_bytes(process.pid) - before < 100 * 10**6

        with ExitStack() as crowd:
            for _ in range(200):
                crowd.enter_context(ZmtpPeer(endpoint))
            assert generate(two, "in a crowd") == quiet
        two.send(encode(Bye()))
        for _ in range(100):
            say_hello(third)
            if isinstance(client_decoder().decode(third.receive(PATIENCE_S) or []), Welcome):
                break
        assert generate(third, "admitted") == quiet
