"""Steps that await masks on ranks that are processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from nanocore.protocol.errors import WorkerError
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.executors.executor import Executor
from nanocore.worker.executors.process_executor import ProcessExecutor
from nanocore.worker.plan import ModelRunnerOutput, NewRow, SchedulerOutput
from nanocore.worker.rank_messages import WorkerConfig
from nanocore.worker.worker import LocalExecutor
from tests.worker.configs import make_worker_config
from tests.worker.masked_steps import pack_masks

VOCAB_SIZE, HIDDEN_SIZE = 384, 64
PROMPTS = ([5, 6, 7], [1, 2, 3, 4])
DEADLINE_S = 60


def config_of(folder: Path, **ranks: int) -> WorkerConfig:
    return make_worker_config(
        folder=str(folder), load_format="auto", max_num_seqs=4, max_num_batched_tokens=16, **ranks
    )


@contextmanager
def started(executor: Executor) -> Iterator[Executor]:
    try:
        executor.load_model()
        executor.profile()
        executor.allocate_kv_cache(8, 64)
        executor.capture()
        yield executor
    finally:
        executor.close()


def plan_of(step: int, group: int = 0) -> SchedulerOutput:
    """The prompts, anew: one plain, one that asks for more. group: of the rows."""
    rows = [group, group + 2]
    samplings = [EngineSamplingParams(temperature=0.9), EngineSamplingParams(top_p=0.8)]
    added = [
        NewRow(
            row=row,
            token_ids=np.array(prompt, "<i4").tobytes(),
            num_prompt_tokens=len(prompt),
            num_computed_tokens=0,
            block_ids=np.array([row], "<i4").tobytes(),
            sampling=sampling,
            seed=step,
        )
        for row, prompt, sampling in zip(rows, PROMPTS, samplings, strict=True)
    ]
    counts = [len(prompt) for prompt in PROMPTS]
    return SchedulerOutput(
        step=step,
        group=group,
        removed_rows=np.array(rows, "<i4").tobytes(),
        added=added,
        block_rows=b"",
        block_ids=b"",
        chunk_rows=np.array(rows, "<i4").tobytes(),
        chunk_counts=np.array(counts, "<i4").tobytes(),
        num_tokens=sum(counts),
        awaits_masks=True,
    )


def sample(executor: Executor, step: int, group: int = 0) -> None:
    allowed = np.arange(VOCAB_SIZE) % 7 == step % 7
    executor.sample(pack_masks(step, {group: allowed, group + 2: allowed}))


def finish(executor: Executor, step: int) -> ModelRunnerOutput:
    sample(executor, step)
    return executor.collect()


def run(executor: Executor, step: int) -> ModelRunnerOutput:
    executor.submit(plan_of(step))
    return finish(executor, step)


def children() -> set[int]:
    return {int(pid) for pid in Path("/proc/thread-self/children").read_text().split()}


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[int, ModelRunnerOutput]:
    with started(LocalExecutor(config_of(tiny_model))) as executor:
        return {step: run(executor, step) for step in (1, 2, 3)}


def test_the_executor_of_one_rank_samples_what_masks_allow(
    expected: dict[int, ModelRunnerOutput],
) -> None:
    for step, output in expected.items():
        token_ids = np.frombuffer(output.token_ids, "<i4")
        assert len(token_ids) == 2
        assert (token_ids % 7 == step).all()


@pytest.mark.campaign
def test_ranks_sample_the_same_and_who_keeps_a_step_waiting_is_named(
    tiny_model: Path, expected: dict[int, ModelRunnerOutput]
) -> None:
    executor = ProcessExecutor(config_of(tiny_model, tensor_parallel_size=2), HIDDEN_SIZE)
    others = children()
    with started(executor):
        pids = sorted(children() - others)
        for step, output in expected.items():
            assert run(executor, step) == output
        executor.submit(plan_of(4))
        assert "in the engine's own process" in executor.blame()
        os.kill(pids[1], signal.SIGSTOP)
        sample(executor, 4)
        deadline_s = time.monotonic() + DEADLINE_S
        while "rank 0" in (blamed := executor.blame()):  # has not come to the exchange yet
            assert time.monotonic() < deadline_s, blamed
        assert f"it waits for rank 1 of 2 (pid {pids[1]}), which is at step" in blamed
        os.kill(pids[1], signal.SIGCONT)
        executor.collect()


@pytest.mark.campaign
@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_dies_while_it_awaits_masks_is_named(tiny_model: Path, dies: int) -> None:
    executor = ProcessExecutor(config_of(tiny_model, tensor_parallel_size=2), HIDDEN_SIZE)
    others = children()
    with started(executor):
        pids = sorted(children() - others)
        executor.submit(plan_of(1))
        os.kill(pids[dies], signal.SIGKILL)
        words = rf"rank {dies} of 2 \(pid {pids[dies]}\) was killed by SIGKILL"
        with pytest.raises(WorkerError, match=words):
            finish(executor, 1)


@pytest.mark.campaign
def test_the_last_stage_samples_while_the_first_is_at_the_next_step(
    tiny_model: Path, expected: dict[int, ModelRunnerOutput]
) -> None:
    executor = ProcessExecutor(config_of(tiny_model, pipeline_parallel_size=2), HIDDEN_SIZE)
    with started(executor):
        assert executor.max_concurrent_steps == 2
        for step, group in ((1, 0), (2, 1)):
            executor.submit(plan_of(step, group))
            sample(executor, step, group)
        outputs = {1: executor.collect()}
        executor.submit(plan_of(3))
        outputs[2] = executor.collect()
        sample(executor, 3)
        outputs[3] = executor.collect()
        for step, output in outputs.items():
            assert output.token_ids == expected[step].token_ids
