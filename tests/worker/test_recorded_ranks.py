"""Ranks that replay their steps: the bits of those that call kernels one by one, in any company."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nanocore.protocol.errors import WorkerError
from nanocore.worker.communication.communicator import Communicator
from nanocore.worker.communication.shared_memory import progress
from nanocore.worker.executors.process_executor import ProcessExecutor, RankProcess
from tests.campaign import in_campaign
from tests.model_families import BUILDERS
from tests.worker.ranks import run_ranks
from tests.worker.running import Script, World, make_runner, run_runner, write_script
from tests.worker.test_ranks_in_two_phases import (
    DEADLINE_S,
    HIDDEN_SIZE,
    children,
    config_of,
    plan_of,
    sample,
    started,
)

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
