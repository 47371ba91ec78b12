"""Ranks that replay captured steps, and ranks whose steps await masks, compute what one does."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nanocore.protocol.errors import WorkerError
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.communication.communicator import Communicator
from nanocore.worker.communication.shared_memory import progress
from nanocore.worker.executors.executor import Executor
from nanocore.worker.executors.process_executor import ProcessExecutor, RankProcess
from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput
from nanocore.worker.rank_messages import WorkerConfig
from nanocore.worker.worker import LocalExecutor
from tests.campaign import in_campaign
from tests.model_families import BUILDERS
from tests.step_plans import make_plan, make_row
from tests.worker.configs import make_worker_config
from tests.worker.masked_steps import pack_masks
from tests.worker.ranks import run_ranks
from tests.worker.running import Script, World, make_runner, run_runner, write_script

LENGTHS = [1, 17, 40, 130, 31]
NUM_TOKENS = 4


@dataclass(frozen=True)
class Split:
    """How a model is split over ranks."""

    family: str
    tp_size: int = 1
    num_stages: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.num_stages


SPLITS = [
    Split("llama_biased", tp_size=2),
    Split("llama_biased", tp_size=2, num_stages=2),
    *in_campaign(Split("llama_biased", num_stages=3), Split("phi3", tp_size=4)),
]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    return cache(lambda name: BUILDERS[name](tmp_path_factory.mktemp(name)))


def script_of(num_groups: int) -> Script:
    """Chunks, a shared prefix and mixed batches; what is said does not matter."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 256, n).tolist() for n in LENGTHS]
    prompts[3][:32] = prompts[2][:32]
    outputs = [rng.integers(0, 256, NUM_TOKENS).tolist() for _ in LENGTHS]
    return write_script(prompts, outputs, num_groups)


def logits_of(folder: Path, split: Split, dtype: torch.dtype, eager: Collection[int]) -> Tensor:
    world, script = World(split.tp_size, split.num_stages), script_of(split.num_stages)

    def run(rank: Communicator) -> Tensor:
        placement, links = world.join(rank.rank, dtype)
        is_eager = rank.rank in eager
        runner = make_runner(folder, placement, links, enforce_eager=is_eager)
        assert runner.is_captured is not is_eager
        said = run_runner(runner, script)
        return torch.cat([one.logits_V for one in said]) if said else torch.empty(0)

    return torch.cat(run_ranks(split.num_ranks, run))


@pytest.mark.parametrize("dtype", [torch.bfloat16, *in_campaign(torch.float32)])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_ranks_that_replay_say_the_bits_of_those_that_do_not(
    split: Split,
    dtype: torch.dtype,
    folder_of,  # type: ignore[no-untyped-def]
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    folder = folder_of(split.family)
    one_by_one = logits_of(folder, split, dtype, eager=range(split.num_ranks))
    assert len(one_by_one) > 0
    assert torch.equal(logits_of(folder, split, dtype, eager=()), one_by_one)
    assert torch.equal(logits_of(folder, split, dtype, eager={0}), one_by_one)
    assert "one by one" not in caplog.text


@pytest.mark.campaign
@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_dies_in_the_middle_of_a_replay_is_named(
    folder_of,  # type: ignore[no-untyped-def]
    dies: int,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other waits for it within one native call, and ends with the engine."""
    config = config_of(folder_of("llama_biased"), tensor_parallel_size=2)
    executor = ProcessExecutor(config, HIDDEN_SIZE)
    others = children()
    with started(executor):
        pids = sorted(children() - others)
        os.kill(pids[dies], signal.SIGSTOP)
        executor.submit(plan_of(1))
        sample(executor, 1)
        deadline_s = time.monotonic() + DEADLINE_S
        while (entered := progress(executor._reduce_fds[0], 2))[1 - dies] == entered[dies]:
            assert time.monotonic() < deadline_s, entered
        os.kill(pids[dies], signal.SIGKILL)
        words = rf"rank {dies} of 2 \(pid {pids[dies]}\) was killed by SIGKILL"
        with pytest.raises(WorkerError, match=words):
            executor.collect()
        monkeypatch.setattr(RankProcess, "kill", not_by_force)
    assert "one by one" not in capfd.readouterr().err


def not_by_force(rank: RankProcess) -> None:
    pytest.fail(f"{rank.name} does not end with the engine")


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
        yield executor
    finally:
        executor.close()


def plan_of(step: int, group: int = 0) -> SchedulerOutput:
    """The prompts, anew: one plain, one that asks for more. group: of the rows."""
    rows = [group, group + 2]
    samplings = [EngineSamplingParams(temperature=0.9), EngineSamplingParams(top_p=0.8)]
    added = [
        make_row(row, prompt, sampling, blocks=[row], seed=step)
        for row, prompt, sampling in zip(rows, PROMPTS, samplings, strict=True)
    ]
    chunks = dict(zip(rows, map(len, PROMPTS), strict=True))
    return make_plan(added, chunks, removed=rows, step=step, group=group, awaits_masks=True)


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
