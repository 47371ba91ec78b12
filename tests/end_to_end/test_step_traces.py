"""A real engine's trace, read: timelines, and times to first tokens that add up."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

from nanocore.cli.trace import read_trace
from nanocore.client import AsyncEngineClient, RequestOutput, SamplingParams
from nanocore.demo_model import demo_model_folder
from nanocore.tracing.explanation import explanation_of, read_runs
from nanocore.tracing.reader import TraceReader
from nanocore.tracing.timeline import PrefillChunk
from tests.end_to_end.forked import engine

DEMO_MODEL = demo_model_folder()
FLAGS = (
    "--max-num-seqs=6", "--max-num-batched-tokens=64", "--num-gpu-blocks-override=40",
    "--scheduling-policy=priority", "--block-size=16",
)  # fmt: skip
NUM_REQUESTS = 40


async def load(endpoint: str) -> dict[str, RequestOutput]:
    """Two sessions' requests, more than fit, of several lengths, priorities and samples."""
    rng = random.Random(5)
    outputs = {}
    async with (
        AsyncEngineClient.connect(endpoint, timeout_s=60) as one,
        AsyncEngineClient.connect(endpoint, timeout_s=60) as other,
    ):

        async def ask(name: str, client: AsyncEngineClient, prompt: list[int], n: int = 1) -> None:
            params = SamplingParams(
                max_tokens=rng.randrange(1, 40), ignore_eos=True, temperature=0.5, n=n, seed=1
            )
            outputs[name] = await client.complete(
                {"prompt_token_ids": prompt}, params, request_id=name, priority=rng.randrange(2)
            )

        shared = [rng.randrange(3, 400) for _ in range(100)]
        await ask("first", one, shared)
        await ask("hit", other, [*shared, 7, 8, 9])
        prompts = [
            [rng.randrange(3, 400) for _ in range(rng.randrange(1, 200))]
            for _ in range(NUM_REQUESTS)
        ]
        clients = [one, other]
        await asyncio.gather(
            *(ask(f"r{i}", clients[i % 2], prompt) for i, prompt in enumerate(prompts))
        )
        await ask("samples", one, shared, 3)
        # What was sent last is told with the next step.
        outputs["after"] = await one.complete(
            {"prompt_token_ids": [5]},
            SamplingParams(max_tokens=3, ignore_eos=True),
            request_id="after",
        )
    return outputs


def test_a_load_with_chunks_hits_and_preemptions_is_explained(tmp_path: Path) -> None:
    trace = tmp_path / "steps.jsonl"
    with engine(DEMO_MODEL, "--step-trace", str(trace), *FLAGS) as running:
        outputs = asyncio.run(asyncio.wait_for(load(running.endpoint), 100))
    (run,) = read_runs(TraceReader(str(trace)))
    assert len(run.timelines) == NUM_REQUESTS + 6, "three samples are three"
    explained = {timeline.id: explanation_of(run, timeline) for timeline in run.timelines}
    for name, told in explained.items():
        assert told.state == "finished"
        assert told.ttft_ms is not None
        assert told.sent_s is not None or name == "after", "it may be sent after the last step"
        total_ms = sum(part.ms for part in told.ttft_parts)
        assert 0.99 * told.ttft_ms <= total_ms <= told.ttft_ms + 1e-6, told
        waited_ms = sum(wait.ms for wait in told.waits)
        part_ms = sum(part.ms for part in told.ttft_parts if part.name == "waiting")
        assert abs(waited_ms - part_ms) < 0.002, "what kept it waiting is that part"
    for name, output in outputs.items():
        if name != "after":
            told_ms, seen_s = explained[name].ttft_ms, output.metrics.time_to_first_token_s
            assert told_ms is not None
            assert seen_s is not None
            assert told_ms <= seen_s * 1e3, "the engine's part of what the client saw"
            assert explained[name].cached_tokens == output.num_cached_tokens
            assert explained[name].prompt_tokens == len(output.prompt_token_ids)
    assert explained["hit"].cached_tokens == 96
    assert any(len(timeline.chunks) > 2 for timeline in run.timelines), (
        "prompts longer than the budget"
    )
    pauses = [pause for told in explained.values() for pause in told.preemptions]
    assert pauses
    assert all(pause.by in explained and pause.ms is not None for pause in pauses)
    reasons = {wait.reason for told in explained.values() for wait in told.waits}
    assert {"kv_blocks", "priority", "next_step"} <= reasons

    summary = read_trace(str(trace)).runs[0]
    assert (summary.num_requests, summary.num_finished) == (len(run.timelines), len(run.timelines))
    assert summary.num_preemptions == len(pauses)
    computed = sum(one.num_tokens for timeline in run.timelines for one in timeline.work)
    assert summary.num_tokens == computed, "each token that a step computed is in a timeline"
    assert summary.num_steps == len(trace.read_text().splitlines())
    for line in trace.read_text().splitlines():
        step = json.loads(line)
        assert step["t_s"] >= 0
        for name, at_s in step["sent"].items():
            assert at_s >= explained[name].received_s
    for timeline in run.timelines:
        prompt = [one for one in timeline.work if isinstance(one, PrefillChunk)]
        assert timeline.arrival is not None
        last = next(one for one in prompt if one.end_s == timeline.first_s)
        assert last.num_computed + last.num_tokens == timeline.arrival.prompt_tokens
