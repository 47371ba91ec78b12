"""What is measured of the machine, and how often; no test here looks at how fast it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nanocore.worker import machine_speed
from nanocore.worker.machine_speed import measure_speed

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_speed, "_CPU_CACHE_BYTES", 8 << 20)


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of what is read, one after the other."""
    sizes: list[int] = []
    full = torch.full

    def noting(*args: Any, **more: Any) -> Tensor:
        sizes.append((tensor := full(*args, **more)).nbytes)
        return tensor

    monkeypatch.setattr(torch, "full", noting)
    return sizes


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


@pytest.mark.parametrize(("room_bytes", "sizes"), [(3 << 20, [3 << 20]), (5, [1 << 20])])
def test_where_memory_is_short_less_is_read(
    room_bytes: int, sizes: list[int], read_bytes: list[int]
) -> None:
    speed = measure_speed(CPU, torch.float32, 4 << 20, 0, room_bytes)
    assert read_bytes == sizes
    assert speed.near_bytes == 0


def test_memory_is_read_whole_and_beyond_the_cache(read_bytes: list[int]) -> None:
    measure_speed(CPU, torch.float32, step_bytes=2 << 20, tries_s=0)
    assert read_bytes == [3 * (8 << 20), 2 << 20]
