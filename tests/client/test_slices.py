"""However much has arrived, the event loop gets its turns, and a token costs the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nanocore.client import SamplingParams
from nanocore.client.detokenizer import IncrementalDetokenizer
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.messages import Event
from tests.client.byte_tokens import ids_of
from tests.client.driven_stream import DrivenStream
from tests.client.fake_engine import connected
from tests.client.running import run

NUM_TOKENS = 30_000


@contextmanager
def counted_slices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tokens that were turned into text in each turn of the event loop."""
    turns = [0]
    append = IncrementalDetokenizer.append

    def counting(self: IncrementalDetokenizer, token_ids: list[int]) -> str:
        turns[-1] += len(token_ids)
        return append(self, token_ids)

    monkeypatch.setattr(IncrementalDetokenizer, "append", counting)
    yield turns


async def _count_turns(turns: list[int]) -> None:
    while True:
        turns.append(0)
        await asyncio.sleep(0)


def _slice(tokenizer: Tokenizer) -> int:
    return IncrementalDetokenizer(tokenizer, [], True).tokens_per_slice


@pytest.mark.parametrize("stop", [None, "END"])
@pytest.mark.parametrize("n", [1, 128])
def test_final_lets_others_have_turns(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, n: int, stop: str | None
) -> None:
    driven = DrivenStream(tokenizer, n=n, stop=stop)
    for index in range(n):
        driven.push("a" * (NUM_TOKENS // n), index)
        driven.end(index=index)

    async def scenario(turns: list[int]) -> Any:
        counting = asyncio.create_task(_count_turns(turns))
        output = await driven.stream.final()
        counting.cancel()
        return output

    with counted_slices(monkeypatch) as turns:
        output = run(scenario(turns))
    assert [len(c.text) for c in output.outputs] == [NUM_TOKENS // n] * n
    assert sum(turns) == NUM_TOKENS // n * n
    assert max(turns) <= _slice(tokenizer)


async def test_generate_gives_a_backlog_piece_by_piece_with_turns_between(
    endpoint: str, tokenizer_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(endpoint, tokenizer=tokenizer_folder) as (engine, client):
        tokenizer = await client.get_tokenizer()
        outputs = client.generate([1], SamplingParams())
        reading = await engine.begin(anext(outputs))
        ids = ids_of(tokenizer, "a" * NUM_TOKENS)
        engine.output({1: ids}, Event(handle=1, finish_reason="length"))
        with counted_slices(monkeypatch) as turns:
            counting = asyncio.create_task(_count_turns(turns))
            deltas = [(await reading).outputs[0].delta]
            deltas += [output.outputs[0].delta async for output in outputs]
            counting.cancel()
        assert "".join(deltas) == "a" * NUM_TOKENS
        assert max(turns) <= _slice(tokenizer)


def test_the_end_of_a_sample_is_read_with_its_last_tokens(tokenizer: Tokenizer) -> None:
    driven = DrivenStream(tokenizer)
    num_tokens = _slice(tokenizer)
    driven.push("a" * (num_tokens + 1))
    driven.end("stop")
    first, last = driven.rest()
    assert (len(first.outputs[0].text), first.finished) == (num_tokens, False)
    assert (len(last.outputs[0].text), last.finished) == (
        num_tokens,
        True,
    )  # without the stop token


def test_samples_share_a_slice_and_none_waits_for_the_others(tokenizer: Tokenizer) -> None:
    driven = DrivenStream(tokenizer, n=2)
    num_tokens = _slice(tokenizer)
    driven.push("a" * 10 * num_tokens, 0)
    driven.push("b", 1)
    output = driven.next()
    assert [len(c.text) for c in output.outputs] == [num_tokens // 2, 1]


def test_a_token_costs_the_same_at_any_length(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token is decoded for each, and an output shares the lists of those before it."""
    driven = DrivenStream(tokenizer, stop=["END"])
    with counted_slices(monkeypatch) as turns:
        for num_tokens in range(1, 2001):
            driven.push("a")
            output = driven.next()
            assert sum(turns) == num_tokens
            assert output.outputs[0].delta == "a"
    assert output.outputs[0].num_tokens == 2000
