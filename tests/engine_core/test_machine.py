"""Whose speed is measured where."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from nanocore.engine_core.process import machine
from nanocore.engine_core.process.machine import machine_speeds
from nanocore.worker.model_cost import MachineSpeed
from tests.engine_core.test_forecast import RANK, SPEED

WHOLE = MachineSpeed(bytes_per_s=8e9, flops_per_s=4e11, near_bytes=1000, near_bytes_per_s=1e11)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What is measured."""
    asked: list[tuple[object, ...]] = []

    def measure(*arguments: object) -> MachineSpeed:
        asked.append(arguments)
        return WHOLE

    monkeypatch.setattr(machine, "measure_speed", measure)
    return asked


def test_ranks_on_a_cpu_share_what_all_its_cores_do(asked: list[tuple[object, ...]]) -> None:
    speeds = machine_speeds([RANK, RANK], stretch_s=0.5)
    assert asked == [(torch.device("cpu"), torch.bfloat16, 2 * 4_000_000, 0.5, 2 * 10**9 // 8)]
    assert speeds == [WHOLE.shared(2)] * 2
    assert MachineSpeed.joined(speeds) == WHOLE


def test_gpus_of_a_dry_run_are_as_the_first_one(asked: list[tuple[object, ...]]) -> None:
    rank = replace(RANK, device="cuda:0")
    assert machine_speeds([rank, rank], stretch_s=0.5) == [WHOLE, WHOLE]
    assert asked == [(torch.device("cuda:0"), torch.bfloat16, 4_000_000, 0.5)]


def test_what_ranks_have_measured_is_not_measured_again(asked: list[tuple[object, ...]]) -> None:
    assert machine_speeds([replace(RANK, speed=SPEED)] * 2) == [SPEED] * 2
    assert asked == []
