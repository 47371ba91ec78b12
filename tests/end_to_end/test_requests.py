"""Requests through two real processes over a real socket: streams, aborts, bad input, control."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nanocore.client import (
    AsyncEngineClient,
    ContextLengthError,
    InvalidRequestError,
    RequestOutput,
    SamplingParams,
)
from nanocore.client.chat.events import Started
from tests.end_to_end.forked import Engine, engine
from tests.tiny_models import EOS, MAX_MODEL_LEN, VOCAB_SIZE

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def running(tiny_model: Path) -> Iterator[Engine]:
    """One engine for this module: four seats and small steps, so that queues form."""
    with engine(tiny_model, "--max-num-seqs", "4", "--max-num-batched-tokens", "32") as started:
        yield started


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


def connect(running: Engine) -> AsyncEngineClient:
    return AsyncEngineClient.connect(running.endpoint, timeout_s=60)


async def wait_until_idle(client: AsyncEngineClient) -> None:
    """Until nothing runs or waits and every block is free again."""
    while True:
        stats = await client.stats()
        if stats.num_requests_running == stats.num_requests_waiting == 0:
            assert stats.num_free_blocks == stats.num_blocks
            return


def test_a_stream_arrives_token_by_token_and_adds_up(running: Engine) -> None:
    async def main() -> None:
        async with connect(running) as client:
            tokenizer = await client.get_tokenizer()
            outputs = [output async for output in client.generate("Hello", GREEDY)]
            last = outputs[-1]
            assert len(outputs) > 1
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            assert "".join(output.outputs[0].delta for output in outputs) == last.outputs[0].text
            assert last.outputs[0].finish_reason == "length"
            assert len(last.outputs[0].token_ids) == 8
            assert last.prompt == "Hello"
            assert last.prompt_token_ids == tokenizer.encode("Hello")
            assert last.num_cached_tokens == 0
            assert last.metrics.time_to_first_token_s is not None
            again = await client.complete({"prompt_token_ids": last.prompt_token_ids}, GREEDY)
            assert again.outputs[0].token_ids == last.outputs[0].token_ids

    run(main())


def test_chat_uses_the_models_template(running: Engine) -> None:
    async def main() -> None:
        async with connect(running) as client:
            messages = [{"role": "user", "content": "hi"}]
            started = await anext(client.chat(messages, GREEDY))
            assert isinstance(started, Started)
            tokenizer = await client.get_tokenizer()
            assert tokenizer.decode(started.prompt_token_ids) == "user: hi\nassistant: "

    run(main())


def test_64_concurrent_requests_of_8_clients_get_their_own_tokens(running: Engine) -> None:
    async def main() -> None:
        prompts = [[i + 1] * (1 + i % 40) for i in range(64)]
        async with connect(running) as client:
            alone = [(await client.complete(p, GREEDY)).outputs[0].token_ids for p in prompts]

        async def one_client(mine: list[list[int]]) -> list[list[int]]:
            async with connect(running) as client:
                # The same request ids in every session: ids belong to their session.
                results = await asyncio.gather(
                    *(client.complete(p, GREEDY, request_id=f"r{i}") for i, p in enumerate(mine))
                )
                return [result.outputs[0].token_ids for result in results]

        groups = await asyncio.gather(*(one_client(prompts[i::8]) for i in range(8)))
        for i, group in enumerate(groups):
            assert group == alone[i::8]

    run(main())


def test_seeded_sampling_is_the_same_alone_and_in_a_crowd(running: Engine) -> None:
    params = SamplingParams(
        temperature=0.9, top_p=0.95, top_k=50, min_p=0.01, seed=11, max_tokens=16, ignore_eos=True
    )

    async def main() -> None:
        async with connect(running) as client:
            alone = await client.complete("abc", params)
            noise = [client.complete([i] * 30, SamplingParams(max_tokens=20)) for i in range(12)]
            crowd = await asyncio.gather(client.complete("abc", params), *noise)
            assert crowd[0].outputs[0].token_ids == alone.outputs[0].token_ids
            other = await client.complete("abc", SamplingParams(seed=12, max_tokens=16))
            assert other.outputs[0].token_ids != alone.outputs[0].token_ids

    run(main())


def test_stop_token_ids_and_stop_strings_end_a_request(running: Engine) -> None:
    async def main() -> None:
        async with connect(running) as client:
            free = (await client.complete("abc", GREEDY)).outputs[0]
            stop_id = free.token_ids[3]
            params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[stop_id])
            stopped = (await client.complete("abc", params)).outputs[0]
            assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop_id) + 1]
            assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop_id)

            piece = (await client.get_tokenizer()).decode(free.token_ids[:4])[-2:]
            params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True, stop=[piece])
            stopped = (await client.complete("abc", params)).outputs[0]
            assert (stopped.finish_reason, stopped.stop_reason) == ("stop", piece)
            assert piece not in stopped.text
            await wait_until_idle(client)

    run(main())


def test_eos_ends_a_request_unless_it_is_ignored(
    running: Engine, tiny_model: Path, tmp_path: Path
) -> None:
    async def main(other: Engine) -> None:
        async with connect(other) as client:
            assert client.model_card.eos_token_ids == [EOS, eos]
            stopped = (await client.complete("abc", SamplingParams(temperature=0))).outputs[0]
            assert (stopped.finish_reason, stopped.stop_reason) == ("stop", None)
            assert stopped.token_ids[-1] == eos
            ignored = (await client.complete("abc", GREEDY)).outputs[0]
            assert ignored.finish_reason == "length"
            assert ignored.token_ids[: len(stopped.token_ids)] == stopped.token_ids[:8]

    async def third_token() -> int:
        async with connect(running) as client:
            return (await client.complete("abc", GREEDY)).outputs[0].token_ids[2]

    eos = asyncio.run(third_token())
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, eos]}))
    with engine(folder) as other:
        run(main(other))


def test_abort_in_every_state_frees_everything(running: Engine) -> None:
    async def main() -> None:
        async with connect(running) as client:

            async def first_output(request_id: str, prompt: list[int]) -> asyncio.Task:
                """A request that has delivered a token, and the task that reads on."""
                stream = client.generate(prompt, LONG, request_id=request_id)
                await anext(stream)

                async def rest() -> RequestOutput:
                    return [output async for output in stream][-1]

                return asyncio.create_task(rest())

            running_tasks = [await first_output(f"running{i}", [i] * 9) for i in range(3)]
            mid_chunk = asyncio.create_task(client.complete([7] * 900, GREEDY, "chunk"))
            waiting = asyncio.create_task(client.complete([8] * 20, GREEDY, "waiting"))
            while (await client.stats()).num_requests_waiting == 0:
                pass
            for request_id in ("chunk", "waiting", "running0", "running1", "running2", "unknown"):
                await client.abort(request_id)
                await client.abort(request_id)
            results = await asyncio.gather(mid_chunk, waiting, *running_tasks)
            assert {result.outputs[0].finish_reason for result in results} == {"abort"}
            await wait_until_idle(client)
            await client.abort("running0")  # ended long ago
            await client.complete([1], GREEDY)

    run(main())


def test_leaving_the_iterator_or_cancelling_the_task_aborts(running: Engine) -> None:
    async def main() -> None:
        async with connect(running) as client:
            before = (await client.stats()).num_aborts
            async for _ in client.generate([1, 2, 3], LONG):
                break
            task = asyncio.create_task(client.complete([4, 5, 6], LONG))
            while (await client.stats()).num_requests_running == 0:
                pass
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await wait_until_idle(client)
            assert (await client.stats()).num_aborts == before + 2

    run(main())


def test_one_client_cannot_abort_anothers_request(running: Engine) -> None:
    async def main() -> None:
        async with connect(running) as mine, connect(running) as other:
            task = asyncio.create_task(mine.complete([1, 2], GREEDY, request_id="same"))
            await other.abort("same")
            assert (await task).outputs[0].finish_reason == "length"

    run(main())


@pytest.mark.parametrize(
    ("prompt", "params", "error", "words"),
    [
        ([VOCAB_SIZE], GREEDY, InvalidRequestError, [f"[0]={VOCAB_SIZE}", f"{VOCAB_SIZE - 1}"]),
        ([5, -1], GREEDY, InvalidRequestError, ["[1]=-1"]),
        ([], GREEDY, InvalidRequestError, ["0 bytes"]),
        ([1] * MAX_MODEL_LEN, SamplingParams(), ContextLengthError, ["1024", "max_model_len=1024"]),
        ([1] * 1000, SamplingParams(max_tokens=25), ContextLengthError, ["1000", "25", "1024"]),
        ([1], SamplingParams(stop_token_ids=[VOCAB_SIZE]), InvalidRequestError, ["stop_token_ids"]),
    ],
)
def test_a_bad_request_is_answered_and_harms_nobody(
    running: Engine,
    prompt: list[int],
    params: SamplingParams,
    error: type[Exception],
    words: list[str],
) -> None:
    async def main() -> None:
        async with connect(running) as client:
            bystander = asyncio.create_task(client.complete([1, 2, 3], GREEDY))
            await asyncio.sleep(0)  # let it submit
            with pytest.raises(error) as caught:
                await client.complete(prompt, params)
            for word in words:
                assert word in str(caught.value)
            assert (await bystander).outputs[0].finish_reason == "length"

    run(main())


def test_a_duplicate_request_id_is_refused_and_the_first_goes_on(running: Engine) -> None:
    async def main() -> None:
        async with connect(running) as client:
            first = asyncio.create_task(client.complete([1, 2], GREEDY, request_id="twice"))
            await asyncio.sleep(0)
            with pytest.raises(InvalidRequestError, match="'twice' is in use"):
                await client.complete([1, 2], GREEDY, request_id="twice")
            assert (await first).outputs[0].finish_reason == "length"
            # Once it has ended the id is free again.
            await client.complete([1, 2], GREEDY, request_id="twice")

    run(main())


def test_pause_keeps_requests_and_resume_goes_on(running: Engine) -> None:
    async def main() -> None:
        async with connect(running) as client:
            expected = (await client.complete([9, 9], GREEDY)).outputs[0].token_ids
            await client.pause()
            task = asyncio.create_task(client.complete([9, 9], GREEDY))
            while (await client.stats()).num_requests_waiting == 0:
                pass
            stats = await client.stats()
            assert stats.paused
            health = await client.health()  # the io thread answers, whatever the step loop does
            assert health.num_steps == stats.num_steps
            assert not task.done()
            await client.resume()
            assert (await task).outputs[0].token_ids == expected

    run(main())


def test_a_client_that_pauses_the_engine_and_leaves_stops_nobody(running: Engine) -> None:
    async def main() -> None:
        async with connect(running) as client:
            async with connect(running) as passer_by:
                await passer_by.pause()
                task = asyncio.create_task(client.complete([9, 9], GREEDY))
                while (await client.stats()).num_requests_waiting == 0:
                    pass
                await client.resume()  # holds no pause: it ends none
                assert (await client.stats()).paused
            assert len((await task).outputs[0].token_ids) == GREEDY.max_tokens
            assert not (await client.stats()).paused

    run(main())


def test_the_prefix_cache_can_be_reset_when_idle(running: Engine) -> None:
    async def main() -> None:
        async with connect(running) as client:
            prompt = list(range(40))
            await client.complete(prompt, GREEDY)
            assert (await client.complete(prompt, GREEDY)).num_cached_tokens == 32
            assert (await client.complete(prompt, GREEDY, cache_salt="s")).num_cached_tokens == 0
            assert await client.reset_prefix_cache()
            assert (await client.complete(prompt, GREEDY)).num_cached_tokens == 0
            stream = client.generate([1] * 20, LONG)
            await anext(stream)
            assert not await client.reset_prefix_cache()
            await stream.aclose()
            await wait_until_idle(client)

    run(main())


def test_without_sampling_parameters_the_models_own_are_used(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    generation = {
        "temperature": 0.0, "top_k": 7, "repetition_penalty": 1.3, "typical_p": 0.9,
        "eos_token_id": EOS,
    }  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(generation))
    prompt = [5] * 1000  # 24 tokens are left

    async def main(endpoint: str) -> None:
        async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
            assert client.model_card.default_sampling.top_k == 7
            bare = await client.complete(prompt)
            same = SamplingParams(temperature=0.0, repetition_penalty=1.3)
            asked = await client.complete(prompt, same)
            assert bare.outputs[0].token_ids == asked.outputs[0].token_ids
            plain = await client.complete(prompt, SamplingParams(temperature=0.0))
            assert bare.outputs[0].token_ids != plain.outputs[0].token_ids

    with engine(folder) as running:
        asyncio.run(main(running.endpoint))
        log = running.stderr.read_text()
    assert "without sampling parameters: temperature 0.0, top_k 7, repetition_penalty 1.3" in log
    assert "ignored: typical_p = 0.9" in log


def test_a_request_that_repeats_itself_ends(running: Engine) -> None:
    async def main() -> None:
        detection = {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 5}
        looping = replace(
            GREEDY, logit_bias={11: 100.0}, max_tokens=40, repetition_detection=detection
        )
        async with connect(running) as client:
            (sample,) = (await client.complete("Hello", looping)).outputs
            assert sample.token_ids == [11] * 10
            assert (sample.finish_reason, sample.stop_reason) == ("stop", "repetition")
            longer = replace(looping, min_tokens=13, n=2)
            for sample in (await client.complete("Hello", longer)).outputs:
                assert sample.token_ids == [11] * 13
                assert (sample.finish_reason, sample.stop_reason) == ("stop", "repetition")

    run(main())
