"""The benchmarks of cost beside the model run, end, and leave no process behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.campaign

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def overhead(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import overhead_client

    return overhead_client


@pytest.fixture
def engine_overhead(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import overhead_engine

    return overhead_engine


def test_the_scheduler_and_the_cache_are_measured(engine_overhead: ModuleType) -> None:
    figures = [
        engine_overhead.step_us(3, 2),
        engine_overhead.admit_us(64, 2),
        engine_overhead.admit_us(64, 2, cached=True),
        engine_overhead.blocks_us(64, 2),
        engine_overhead.blocks_us(64, 2, evict=True),
        engine_overhead.core_us(3, 2),
    ]
    assert [len(values) for values in figures] == [2] * len(figures)
    assert all(value > 0 for values in figures for value in values)


def test_the_table_of_goals_is_measured_and_written(tmp_path: Path) -> None:
    out = tmp_path / "overhead.json"
    script = BENCHMARKS / "overhead.py"
    result = subprocess.run(
        [sys.executable, str(script), "--passes", "2", "--repeats", "1", "--only",
         "step_1,outputs_256", "--out", str(out)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "steady decode step" in result.stdout
    record = json.loads(out.read_text())
    assert {key: len(row["values"]) for key, row in record["nanocore"].items()} == {
        "step_1": 2,
        "outputs_256": 2,
    }
    assert record["host"]["cores"] >= 1


@pytest.mark.parametrize(("text", "nice"), [("/autogroup-6 nice -15\n", "-15"), ("", None)])
def test_a_session_without_an_autogroup_has_no_nice_value(
    overhead: ModuleType, tmp_path: Path, text: str, nice: str | None
) -> None:
    import machine

    (tmp_path / "autogroup").write_text(text)
    assert machine._session_nice(tmp_path / "autogroup") == nice
    assert machine._session_nice(tmp_path / "missing") is None


def _is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize("stop", [None, "</never-said>"])
def test_each_repeat_is_a_figure(overhead: ModuleType, stop: str | None) -> None:
    figures = [
        overhead.client_us_per_token(2, 3, stop),
        overhead.outputs_us(2, 3),
        overhead.submit_us(2, 3),
    ]
    assert [len(values) for values in figures] == [3, 3, 3]
    assert all(value > 0 for values in figures for value in values)


def test_both_processes_give_every_figure(overhead: ModuleType) -> None:
    figures = overhead.both_processes(num_streams=3, num_output_tokens=5, repeats=2)
    assert {name: len(values) for name, values in figures.items()} == {
        "client_cpu_us_per_token": 2,
        "core_cpu_us_per_token": 2,
        "wall_us_per_token": 2,
        "tokens_per_chunk": 2,
    }
    assert all(1 <= value <= 5 for value in figures["tokens_per_chunk"])


def test_a_failure_leaves_no_engine_behind(
    overhead: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    async def fail(endpoint: str, pid: int, *_: int) -> None:
        seen.append((pid, Path(endpoint.removeprefix("ipc://")).parent))
        raise KeyError(endpoint)

    monkeypatch.setattr(overhead, "_both", fail)
    with pytest.raises(KeyError):
        overhead.both_processes(1, 1, 1)
    ((pid, directory),) = seen
    assert not _is_alive(pid)
    assert not directory.exists()


def test_an_engine_that_cannot_start_is_an_error(
    overhead: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="exit code 1"):
        overhead.both_processes(1, 1, 1)
