"""KV cache events of a whole engine process: what routers hear of a client's requests.

One engine and one client make a story, and each test looks at a part of it. The events of a request
may be published after its end has reached the client; a reset comes after all of them.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nanocore.client import AsyncEngineClient, SamplingParams
from nanocore.demo_model import demo_model_folder
from nanocore.engine_core.io.kv_event_publisher import KVEventPublisher
from nanocore.kv_cache.block_key import KeyChain
from nanocore.protocol.codec import pack_int32
from tests.end_to_end.forked import engine, run_to_exit
from tests.kv_event_peers import PATIENCE_MS, Peer, peers, untyped

pytestmark = pytest.mark.campaign

DEMO_MODEL = demo_model_folder()
TOPIC = "kv@engine-0@demo"
SALT = "tenant-7-secret"
CLEARED = {"type": "AllBlocksCleared"}
PROMPT_TOKENS = 53  # three blocks and a part of one; with a step's 32 tokens, in two steps
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@dataclass
class Story:
    """What a client did, and what two routers heard of it.

    tokens, salted_tokens: prompt and output of a request without and one with a salt. num_clears:
    resets of the cache; all but the last came before the requests. replayed: (sequence number,
    payload) of every batch. heard: the frames of each batch that came to a subscriber.
    """

    block_size: int = 0
    tokens: list[int] = field(default_factory=list)
    salted_tokens: list[int] = field(default_factory=list)
    num_clears: int = 0
    replayed: list[tuple[int, bytes]] = field(default_factory=list)
    heard: list[list[bytes]] = field(default_factory=list)

    async def act(self, endpoint: str, subscriber: Peer) -> None:
        """The client's part, which begins when the subscription is in effect."""
        async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
            self.block_size = client.model_card.block_size
            while not subscriber.socket.poll(10):
                await self._reset(client)
            tokenizer = await client.get_tokenizer()
            prompt = tokenizer.encode("What is 12 plus 34? " * 20)[:PROMPT_TOKENS]
            output = await client.complete(prompt, GREEDY)
            self.tokens = [*prompt, *output.outputs[0].token_ids]
            output = await client.complete(prompt, GREEDY, cache_salt=SALT)
            self.salted_tokens = [*prompt, *output.outputs[0].token_ids]
            await self._reset(client)

    async def _reset(self, client: AsyncEngineClient) -> None:
        assert await client.reset_prefix_cache()
        self.num_clears += 1

    def listen(self, subscriber: Peer, replay_client: Peer) -> None:
        """The routers' part."""
        deadline = time.monotonic() + PATIENCE_MS / 1000
        while events_of(self.replayed).count(CLEARED) < self.num_clears:
            assert time.monotonic() < deadline, "a reset was not published"
            replay_client.ask(b"", bytes(8))
            self.replayed = replay_client.answers()
        last, _payload = self.replayed[-1]
        while not self.heard or self.heard[-1][1] != last.to_bytes(8, "big"):
            self.heard.append(subscriber.receive())

    def prefixes(self) -> list[list[dict[str, Any]]]:
        """The BlockStored events of each prefix that began at a prompt's start."""
        prefixes: list[list[dict[str, Any]]] = []
        for event in events_of(self.replayed):
            if event["type"] == "BlockStored":
                if event["parent_block_hash"] is None:
                    prefixes.append([])
                prefixes[-1].append(event)
        return prefixes

    def expected_hashes(self, tokens: list[int], salt: str | None = None) -> list[int]:
        """Of the full blocks. The last token was sampled and never computed."""
        chain = KeyChain(self.block_size, {"cache_salt": salt})
        chain.extend(pack_int32(tokens[:-1]))
        return [int.from_bytes(digest[-8:], "big") for digest, _content in chain.keys]


@pytest.fixture(scope="module")
def story() -> Story:
    """The story of the demo model's engine, at its end."""
    told = Story()
    with tempfile.TemporaryDirectory(prefix="nc-", dir="/tmp") as name, peers() as routers:
        events, replay = f"ipc://{name}/events.sock", f"ipc://{name}/replay.sock"
        flags = ["--kv-events-endpoint", events, "--kv-events-replay-endpoint", replay]
        flags += ["--kv-events-topic", TOPIC, "--device", "cpu"]
        flags += ["--max-num-seqs", "4", "--max-num-batched-tokens", "32"]
        with engine(DEMO_MODEL, *flags) as running:
            subscriber = routers.subscriber(events)
            asyncio.run(asyncio.wait_for(told.act(running.endpoint, subscriber), 60))
            told.listen(subscriber, routers.replay_client(replay))
    return told


@pytest.fixture
def no_model(tiny_model: Path, tmp_path: Path) -> Path:
    """A model short_path that cannot be loaded: the weights are missing."""
    copy = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (copy / "model.safetensors").unlink()
    return copy


def events_of(batches: list[tuple[int, bytes]]) -> list[dict[str, Any]]:
    """The events of all batches, in order."""
    return [event for _sequence, payload in batches for event in untyped(payload)[1]]


def joined(events: list[dict[str, Any]], name: str) -> list[Any]:
    """The lists that consecutive events hold under a name, as one."""
    return [item for event in events for item in event[name]]


# -- what is published ----------------------------------------------------------------------------


def test_a_replay_from_0_gives_exactly_the_blocks_of_prompt_and_output(story: Story) -> None:
    plain, salted = story.prefixes()
    for events, tokens, salt in [
        (plain, story.tokens, None),
        (salted, story.salted_tokens, SALT),
    ]:
        hashes = joined(events, "block_hashes")
        assert hashes == story.expected_hashes(tokens, salt)
        assert joined(events, "token_ids") == tokens[: len(hashes) * story.block_size]
        assert len(hashes) * story.block_size > PROMPT_TOKENS > 3 * story.block_size
    types = [event["type"] for event in events_of(story.replayed)]
    assert "BlockRemoved" not in types, "nothing was evicted"


def test_each_event_continues_the_one_before(story: Story) -> None:
    for events in story.prefixes():
        assert len(events) >= 3, "two steps of the prompt, one of the output"
        parent = None
        for event in events:
            assert event["parent_block_hash"] == parent
            assert event["block_size"] == story.block_size
            assert event["medium"] == "CPU"
            assert len(event["token_ids"]) == len(event["block_hashes"]) * story.block_size
            parent = event["block_hashes"][-1]


def test_batches_are_numbered_without_gaps_and_a_reset_clears_in_a_later_one(story: Story) -> None:
    assert [sequence for sequence, _ in story.replayed] == [*range(len(story.replayed))]
    types = [[event["type"] for event in untyped(payload)[1]] for _, payload in story.replayed]
    num_before = story.num_clears - 1
    assert types[:num_before] == [["AllBlocksCleared"]] * num_before
    assert types[-1] == ["AllBlocksCleared"]
    assert {name for batch in types[num_before:-1] for name in batch} == {"BlockStored"}


def test_a_salt_marks_the_first_block_and_is_in_no_frame(story: Story) -> None:
    plain, salted = story.prefixes()
    assert [event["extra_keys"] for event in plain] == [None] * len(plain)
    first, *others = salted
    (digest,), *rest = first["extra_keys"]
    assert len(bytes.fromhex(digest)) == 16
    assert rest == [None] * (len(first["block_hashes"]) - 1)
    assert [event["extra_keys"] for event in others] == [None] * len(others)
    assert not {*joined(plain, "block_hashes")} & {*joined(salted, "block_hashes")}
    frames = [frame for frames in story.heard for frame in frames]
    for frame in [*frames, *(payload for _sequence, payload in story.replayed)]:
        assert SALT.encode() not in frame


def test_a_subscriber_hears_under_the_topic_what_a_replay_repeats(story: Story) -> None:
    first = int.from_bytes(story.heard[0][1], "big")
    assert first < story.num_clears, "the subscription was in effect before the requests"
    assert story.heard == [
        [TOPIC.encode(), sequence.to_bytes(8, "big"), payload]
        for sequence, payload in story.replayed[first:]
    ]


# -- the endpoints --------------------------------------------------------------------------------


def test_an_engine_serves_its_event_endpoints_until_it_ends(
    tiny_model: Path, short_path: Path
) -> None:
    events = ["--kv-events-endpoint", f"ipc://{short_path}/events.sock"]
    replay = f"ipc://{short_path}/replay.sock"
    flags = [*events, "--kv-events-replay-endpoint", replay, "--kv-events-topic", "kv"]
    with peers() as routers, engine(tiny_model, *flags) as running:
        assert routers.replay_client(replay).replay(0) == []
        listen = ["--listen", f"ipc://{short_path}/other/engine.sock"]
        second = run_to_exit("--model", str(tiny_model), *listen, *events)
        assert second.returncode == 5
        assert f"process {running.pid}" in second.stderr
        assert "--kv-events-endpoint" in second.stderr
    assert running.wait() == 0
    assert not list(short_path.glob("**/*.sock"))


@pytest.mark.parametrize("taken", ["events", "replay"])
def test_a_taken_event_endpoint_exits_with_5_before_the_model_is_looked_at(
    no_model: Path, short_path: Path, taken: str
) -> None:
    events, replay = f"ipc://{short_path}/events.sock", f"ipc://{short_path}/replay.sock"
    flags = ["--model", str(no_model), "--listen", f"ipc://{short_path}/e/engine.sock"]
    flags += ["--kv-events-endpoint", events, "--kv-events-replay-endpoint", replay]
    with closing(KVEventPublisher(events if taken == "events" else replay)):
        result = run_to_exit(*flags)
    assert result.returncode == 5
    assert f"{short_path}/{taken}.sock is served by process" in result.stderr
    result = run_to_exit(*flags)
    assert result.returncode == 3, "without the other process, the model is what is wrong"
    assert not list(short_path.glob("**/*.sock"))
