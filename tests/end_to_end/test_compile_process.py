"""The process that tries structured outputs, in the real program: killed, or busy at its end."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress

from nanocore.client import (
    AsyncEngineClient,
    EngineOverloadedError,
    SamplingParams,
    StructuredOutputsParams,
)
from nanocore.demo_model import demo_model_folder
from tests.end_to_end.forked import engine
from tests.end_to_end.rank_processes import child_pids
from tests.engine_core.grammars.test_compile_process import ENDLESS, is_running

DEMO_MODEL = demo_model_folder()
WAIT_S = 60


def wanting(max_tokens: int = 20, **wanted: object) -> SamplingParams:
    return SamplingParams(
        structured_outputs=StructuredOutputsParams(**wanted),  # type: ignore[arg-type]
        max_tokens=max_tokens,
    )


def trial_process(engine_pid: int) -> int:
    [pid] = child_pids(engine_pid)
    return pid


def test_an_engine_outlives_its_trials_and_ends_in_order_while_one_runs() -> None:
    async def main(endpoint: str, pid: int) -> list[int]:
        async with AsyncEngineClient.connect(endpoint, timeout_s=WAIT_S, resume=False) as client:
            await client.complete("Say it", wanting(choice=["no"]))  # starts the process
            os.kill(trial_process(pid), signal.SIGKILL)
            text = None
            while text is None:
                with suppress(EngineOverloadedError):
                    output = await client.complete("Say it", wanting(choice=["yes"]))
                    text = output.outputs[0].text
            assert text == "yes"
            assert ENDLESS.grammar is not None
            endless = asyncio.create_task(client.complete("x", wanting(grammar=ENDLESS.grammar)))
            while (await client.stats()).num_requests_waiting == 0:
                pass
            [trials] = child_pids(pid)
            os.kill(pid, signal.SIGTERM)
            assert (await endless).outputs[0].finish_reason == "abort"
            return [trials, *child_pids(trials)] if is_running(trials) else [trials]

    with engine(DEMO_MODEL, "--shutdown-timeout", "0") as running:
        left = asyncio.run(main(running.endpoint, running.pid))
        assert running.wait() == 0
        while any(map(is_running, left)):
            pass


def test_a_compile_process_that_is_stopped_ends_with_an_engine_that_is_killed() -> None:
    async def use(endpoint: str) -> None:
        async with AsyncEngineClient.connect(endpoint, timeout_s=WAIT_S, resume=False) as client:
            await client.complete("Say it", wanting(choice=["no"]))

    with engine(DEMO_MODEL) as running:
        asyncio.run(use(running.endpoint))
        trials = trial_process(running.pid)
        os.kill(trials, signal.SIGSTOP)
        os.kill(running.pid, signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL
        while is_running(trials):
            pass
