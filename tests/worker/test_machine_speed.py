"""What is measured of the machine, and with what; no test here looks at how fast it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanocore.worker.cost import machine_speed
from nanocore.worker.cost.machine_speed import measure_speed

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_speed, "_CPU_CACHE_BYTES", 8 << 20)
    monkeypatch.setattr(machine_speed, "_FAR_BYTES", {"cpu": 24 << 20})


@pytest.fixture(params=[1, 2])
def num_cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    told: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    yield request.param
    assert set(told[:-1]) == {1}
    assert told[-1] == request.param


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    full = torch.full

    def noting(*args: Any, **more: Any) -> Tensor:
        sizes.append((tensor := full(*args, **more)).nbytes)
        return tensor

    monkeypatch.setattr(torch, "full", noting)
    return sizes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_machine_reads_and_multiplies(dtype: torch.dtype) -> None:
    speed = measure_speed(CPU, dtype, stretch_s=0)
    assert speed.bytes_per_s > 0 < speed.flops_per_s


def test_each_core_reads_its_share_of_what_no_cache_holds(
    num_cores: int, read_bytes: list[int]
) -> None:
    measure_speed(CPU, torch.float32, stretch_s=0)
    assert read_bytes == [(24 << 20) // num_cores] * num_cores


def test_each_core_multiplies_on_a_thread_of_its_own(
    num_cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    linear = F.linear

    def noting(*args: Any) -> Tensor:
        threads.add(threading.get_ident())
        return linear(*args)

    monkeypatch.setattr(F, "linear", noting)
    measure_speed(CPU, torch.float32, stretch_s=0)
    assert len(threads) == num_cores
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(("room_bytes", "total"), [(3 << 20, 3 << 20), (5, 1 << 20)])
def test_where_memory_is_short_less_is_read(
    room_bytes: int, total: int, num_cores: int, read_bytes: list[int]
) -> None:
    measure_speed(CPU, torch.float32, 0, room_bytes)
    assert sum(read_bytes) == total


def test_time_that_other_programs_take_does_not_count(
    num_cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "perf_counter", count(step=1000).__next__)
    monkeypatch.setattr(time, "thread_time", count(step=0.5).__next__)
    monkeypatch.setattr(time, "monotonic", count(step=0.5).__next__)
    speed = measure_speed(CPU, torch.float32, stretch_s=0)
    assert speed.flops_per_s > 2 * 128 * 1024**2 / 100
