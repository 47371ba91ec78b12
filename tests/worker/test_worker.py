"""A rank is set up in phases that its caller can time and tell apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanocore.kernels.cpu.cpu_backend import CpuKernels
from nanocore.worker import worker as worker_module
from nanocore.worker.dry_run import dry_run
from nanocore.worker.memory.kv_memory import KVMemory
from nanocore.worker.worker import Worker
from tests.worker.configs import make_worker_config


def test_each_phase_does_its_own_work_and_no_more(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: set[str] = set()

    def note(owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def noting(*args: Any, **more: Any) -> Any:
            done.add(name)
            return original(*args, **more)

        monkeypatch.setattr(owner, name, noting)

    note(worker_module, "load_weights")
    note(CpuKernels, "pack_linear")
    note(worker_module, "cpu_memory_bytes")
    note(KVMemory, "__init__")
    note(CpuKernels, "capture")
    config = make_worker_config(folder=str(tiny_model), load_format="auto", attention_backend="cpu")
    worker = Worker(config)
    assert done == set()
    phases: list[tuple[Callable[[], object], set[str]]] = [
        (worker.load_model, {"load_weights", "pack_linear"}),
        (worker.profile, {"cpu_memory_bytes"}),
        (lambda: worker.allocate_kv_cache(5, 64), {"__init__", "capture"}),
    ]
    for phase, work in phases:
        done.clear()
        phase()
        assert done == work


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_rank_reports_what_a_dry_run_expects(
    tiny_model: Path, quantization: str, backend: str
) -> None:
    config = make_worker_config(
        folder=str(tiny_model),
        load_format="auto",
        quantization=quantization,
        attention_backend=backend,
    )
    (expected,) = dry_run(config)
    worker = Worker(config)
    worker.load_model()
    found = worker.profile()
    assert found.cost == expected.cost
    assert found.activation_bytes == expected.activation_bytes > 0
    assert found.table_bytes == expected.table_bytes > 0
    assert found.speed is None  # a CPU is its engine's to measure
