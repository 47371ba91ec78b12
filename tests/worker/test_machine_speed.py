"""What is measured of the machine, and how often; no test here looks at how fast it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanocore.worker import machine_speed
from nanocore.worker.machine_speed import measure_speed

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_speed, "_CPU_CACHE_BYTES", 8 << 20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_machine_reads_and_multiplies(dtype: torch.dtype) -> None:
    speed = measure_speed(CPU, dtype, step_bytes=10**9, tries_s=0)
    assert speed.bytes_per_s > 0 < speed.flops_per_s
    assert (speed.near_bytes, speed.near_bytes_per_s) == (0, 0)


@pytest.mark.parametrize(
    ("step_bytes", "near_bytes"),
    [(5, 1 << 20), (3_000_000, 3_000_000 & ~63), (4 << 20, 4 << 20), ((4 << 20) + 64, 0)],
)
def test_caches_are_measured_where_they_hold_the_model(step_bytes: int, near_bytes: int) -> None:
    speed = measure_speed(CPU, torch.float32, step_bytes, tries_s=0)
    assert speed.near_bytes == near_bytes
    assert (speed.near_bytes_per_s > 0) == (near_bytes > 0)


def test_memory_is_read_whole_and_beyond_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    full = torch.full

    def noting(*args: object, **more: object) -> Tensor:
        sizes.append((tensor := full(*args, **more)).nbytes)  # type: ignore[call-overload]
        return tensor

    monkeypatch.setattr(torch, "full", noting)
    measure_speed(CPU, torch.float32, step_bytes=2 << 20, tries_s=0)
    assert sizes == [3 * (8 << 20), 2 << 20]


def test_ranks_meet_as_often_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    counts = []
    for seconds in (1e-9, 1e3):
        monkeypatch.setattr(
            machine_speed.time, "perf_counter", lambda seconds=seconds: next(clock) * seconds
        )
        meetings: list[None] = []
        measure_speed(CPU, torch.float32, 10**6, lambda: meetings.append(None), tries_s=0.002)
        counts.append(len(meetings))
    assert counts[0] == counts[1] > 9
