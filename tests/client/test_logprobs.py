"""Log probabilities: from OUTPUT's columns to dicts of each token, with texts and bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nanocore.client import ProtocolError, SamplingParams
from nanocore.client.requests.request_outputs import LogprobTable, SampleLogprobs
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.codec import pack_uint32, unpack_logprobs
from nanocore.protocol.messages import Event, TokenLogprobs
from tests.client.byte_tokens import ids_of
from tests.client.fake_engine import connected
from tests.client.logprob_columns import logprobs_of

TWO = SamplingParams(logprobs=2, detokenize=False)


def _plain(entries: Any) -> list[list[tuple[int, float, int]] | None]:
    return [
        None if entry is None else [(token_id, p.logprob, p.rank) for token_id, p in entry.items()]
        for entry in entries
    ]


async def test_each_token_has_itself_first_and_then_the_most_likely_ones(endpoint: str) -> None:
    async with connected(endpoint) as (engine, client):
        outputs = client.generate([1], TWO)
        reading = await engine.begin(anext(outputs))
        likely = (1, 1, [(10, -0.5), (10, -0.5), (11, -1.0)])
        engine.output({1: [10]}, logprobs=logprobs_of(likely))
        first = (await reading).outputs[0]
        unlikely = (1, 7, [(12, -4.0), (10, -0.5), (11, -1.0)])
        second = (1, 2, [(11, -1.0), (10, -0.5), (11, -1.0)])
        end = Event(handle=1, finish_reason="length")
        engine.output({1: [12, 11]}, end, logprobs=logprobs_of(unlikely, second))
        last = (await anext(outputs)).outputs[0]
        expected = [
            [(10, -0.5, 1), (11, -1.0, 2)],
            [(12, -4.0, 7), (10, -0.5, 1), (11, -1.0, 2)],
            [(11, -1.0, 2), (10, -0.5, 1)],
        ]
        assert _plain(last.logprobs) == expected
        assert _plain(first.logprobs) == expected[:1], "a snapshot does not grow"
        assert (first.cumulative_logprob, last.cumulative_logprob) == (-0.5, -5.5)
        assert last.logprobs is not None
        assert _plain(last.logprobs[-2:]) == expected[-2:]
        assert last.logprobs[-1][10].decoded_token is None
        with pytest.raises(IndexError):
            last.logprobs[3]


async def test_texts_and_bytes_are_those_of_the_tokens(
    endpoint: str, tokenizer_folder: Path
) -> None:
    async with connected(endpoint, tokenizer=tokenizer_folder) as (engine, client):
        request = asyncio.create_task(client.complete([1], SamplingParams(logprobs=0)))
        ids = ids_of(await client.get_tokenizer(), "é")
        await engine.accept(1)
        told = logprobs_of(*[(1, 1, [(token_id, -1.0)]) for token_id in ids])
        engine.output({1: ids}, Event(handle=1, finish_reason="length"), logprobs=told)
        completion = (await request).outputs[0]
        assert completion.logprobs is not None
        own = [next(iter(entry.values())) for entry in completion.logprobs]
        assert [p.bytes for p in own] == [b"\xc3", b"\xa9"]
        assert [p.decoded_token for p in own] == ["\ufffd", "\ufffd"]
        assert repr(own[0]) == "Logprob(logprob=-1.0, rank=1, decoded_token='\ufffd')"


async def test_prompt_logprobs_begin_with_none_and_come_in_pieces(endpoint: str) -> None:
    params = SamplingParams(prompt_logprobs=1, n=2, detokenize=False)

    async with connected(endpoint) as (engine, client):
        request = await engine.begin(client.complete([5, 6, 7], params))
        engine.output({}, prompt_logprobs=logprobs_of((1, 3, [(6, -2.0), (9, -0.5)])))
        ends = [Event(handle=handle, finish_reason="length") for handle in (1, 2)]
        last = logprobs_of((1, 1, [(7, -0.25), (7, -0.25)]))
        engine.output({1: [8], 2: [8]}, *ends, prompt_logprobs=last)
        output = await request
        assert output.outputs[0].logprobs is output.outputs[0].cumulative_logprob is None
        expected = [None, [(6, -2.0, 3), (9, -0.5, 1)], [(7, -0.25, 1)]]
        assert _plain(output.prompt_logprobs) == expected


async def test_a_stop_string_cuts_logprobs_as_it_cuts_tokens(
    endpoint: str, tokenizer_folder: Path
) -> None:
    async with connected(endpoint, tokenizer=tokenizer_folder) as (engine, client):
        params = SamplingParams(logprobs=0, stop=".")
        request = asyncio.create_task(client.complete([1], params))
        ids = ids_of(await client.get_tokenizer(), "ab.cd")
        await engine.accept(1)
        told = logprobs_of(*[(1, 1, [(token_id, -1.0)]) for token_id in ids])
        engine.output({1: ids}, logprobs=told)
        completion = (await request).outputs[0]
        assert completion.token_ids == ids[:3]
        assert _plain(completion.logprobs) == [[(token_id, -1.0, 1)] for token_id in ids[:3]]
        assert completion.cumulative_logprob == -3.0


async def test_logprobs_of_nobody_and_of_those_who_did_not_ask_are_ignored(endpoint: str) -> None:
    async with connected(endpoint) as (engine, client):
        asks = asyncio.create_task(client.complete([1], TWO))
        other = await engine.begin(client.complete([1], SamplingParams(detokenize=False)))
        await engine.accept(2)
        ends = [Event(handle=handle, finish_reason="length") for handle in (1, 2)]
        told = logprobs_of(*[(handle, 1, [(10 * handle, -1.0)]) for handle in (9, 2, 1)])
        engine.output({1: [10], 2: [20]}, *ends, logprobs=told, prompt_logprobs=told)
        assert _plain((await asks).outputs[0].logprobs) == [[(10, -1.0, 1)]]
        assert (await other).outputs[0].logprobs is None


@pytest.mark.parametrize(
    "told",
    [
        None,
        logprobs_of((1, 1, [(10, -1.0)])),
        logprobs_of(*[(1, 1, [(token_id, -1.0)]) for token_id in (10, 11, 12)]),
        logprobs_of(*[(1, 1, [(token_id, -1.0)]) for token_id in (11, 10)]),
    ],
    ids=["none", "fewer", "more", "others"],
)
async def test_logprobs_that_are_not_the_tokens_end_the_session(
    endpoint: str, told: TokenLogprobs | None
) -> None:
    async with connected(endpoint) as (engine, client):
        request = await engine.begin(client.complete([1], TWO))
        engine.output({1: [10, 11]}, logprobs=told)
        with pytest.raises(ProtocolError, match="logprobs of"):
            await request


@pytest.mark.parametrize("num", [0, 1, 3])
async def test_prompt_logprobs_that_are_not_the_prompts_end_the_session(
    endpoint: str, num: int
) -> None:
    params = SamplingParams(prompt_logprobs=0, detokenize=False)

    async with connected(endpoint) as (engine, client):
        request = await engine.begin(client.complete([5, 6, 7], params))
        told = logprobs_of(*[(1, 1, [(6, -1.0)])] * num)
        engine.output({1: [10]}, prompt_logprobs=told)
        with pytest.raises(ProtocolError, match=f"{num} prompt_logprobs of a prompt of 3"):
            await request


BREAKS: dict[str, Callable[[TokenLogprobs], TokenLogprobs]] = {
    "handles": lambda told: replace(told, handles=told.handles + b"\0\0\0\0"),
    "ranks": lambda told: replace(told, ranks=told.ranks[4:]),
    "counts": lambda told: replace(told, counts=pack_uint32([2, 2])),
    "candidates": lambda told: replace(told, logprobs=told.logprobs[4:]),
    "cut": lambda told: replace(told, logprobs=told.logprobs[1:]),
    "itself": lambda told: replace(told, counts=pack_uint32([3, 0])),
}


@pytest.mark.parametrize("kind", BREAKS)
def test_columns_that_do_not_fit_together_are_refused(kind: str) -> None:
    told = logprobs_of((1, 1, [(10, -1.0), (10, -1.0)]), (1, 1, [(11, -2.0)]))
    assert unpack_logprobs(told).logprobs.tolist() == [-1.0, -1.0, -2.0]
    with pytest.raises(ProtocolError, match="logprobs"):
        unpack_logprobs(BREAKS[kind](told))


def test_reading_one_token_makes_the_dict_of_one_token(tokenizer: Tokenizer) -> None:
    """A reader that takes the newest entry of each output pays as much for each, however many."""
    made: list[int] = []

    class Counting(LogprobTable):
        def candidates(self, index: int) -> Any:
            made.append(index)
            return super().candidates(index)

    columns = Counting(tokenizer)
    for _ in range(1000):
        columns.append(unpack_logprobs(logprobs_of((1, 1, [(10, -1.0)]))), 0, 0)
        view = SampleLogprobs(columns, len(columns))
        assert view[-1][10].rank == 1
        assert view.sum == -len(columns)
    assert made == [*range(1000)]
