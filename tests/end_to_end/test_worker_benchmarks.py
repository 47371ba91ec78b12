"""The benchmarks of ranks, plans and KV cache dtypes run, end, and write what they say."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.campaign

DEMO_MODEL = Path(__file__).parents[2] / "nanocore" / "demo_model"


@pytest.mark.parametrize("benchmark", ["preparation"], indirect=True)
def test_preparation_of_every_kind_of_step_is_measured(benchmark: ModuleType) -> None:
    kinds = "decode", "gaps", "ends", "chunk"
    cases = [benchmark.Case(kind, 1 if kind == "chunk" else 40, 30) for kind in kinds]
    summary = benchmark.measure(cases, 2)
    assert [len(row["values"]) for row in summary.values()] == [2, 2, 2, 2]
    assert all(row["min"] > 0 for row in summary.values())


@pytest.mark.parametrize("benchmark", ["sampling"], indirect=True)
def test_every_filter_is_compared_with_a_temperature_alone(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "_MIN_LOGITS", 1)
    figures = benchmark.measure("flat", vocab_size=3000, num_rows=2, num_rounds=2)
    assert figures.keys() == benchmark.FILTERS.keys()
    assert figures["temperature"]["ratio"] == 1.0
    assert all(figure["min"] > 0 and figure["ratio"] > 0 for figure in figures.values())


@pytest.mark.parametrize("benchmark", ["plans"], indirect=True)
def test_every_plan_has_bytes_and_times(benchmark: ModuleType) -> None:
    summary = benchmark.measure(num_rounds=1, num_samples=2)
    assert summary.keys() == {"echo_us", *benchmark.CASES}
    for name in benchmark.CASES:
        assert all(summary[name][figure]["min"] > 0 for figure in benchmark.FIGURES)
    # Decodes are planned by their differences; prompts travel whole, four bytes a token.
    assert summary["steady_256"]["mean_bytes"] < 1000
    assert summary["admit_256x128"]["max_bytes"] > 256 * 128 * 4


def run_main(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *flags: str
) -> dict[str, dict[str, dict[str, float]]]:
    monkeypatch.setattr(sys, "argv", ["benchmark", *flags, "--out", str(out)])
    benchmark.main()
    report: dict[str, dict[str, dict[str, float]]] = json.loads(out.read_text())
    return report


@pytest.mark.parametrize("benchmark", ["kv_cache_dtype"], indirect=True)
def test_answers_and_blocks_are_counted_by_cache_dtype(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmark, "TASKS", ("compare",))
    report = run_main(benchmark, monkeypatch, tmp_path / "out.json", "--count", "2")
    engines = report["engines"]
    assert all(0 <= row["right"] <= row["num_answers"] == 2 for row in engines.values())
    assert engines["float32"]["num_blocks"] < engines["bfloat16"]["num_blocks"]
    assert engines["bfloat16"]["num_blocks"] < engines["int8"]["num_blocks"]


@pytest.mark.parametrize("benchmark", ["parallel"], indirect=True)
def test_engines_of_several_ranks_are_measured(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workload = importlib.import_module("workloads").Workload("tiny", "", (one_request(),))
    monkeypatch.setattr(benchmark, "make_workload", lambda *_: workload)
    flags = ["--model", str(DEMO_MODEL), "--engines", "tp1,tp2", "--rounds", "1"]
    report = run_main(benchmark, monkeypatch, tmp_path / "out.json", *flags)
    assert report["engines"].keys() == {"tp1", "tp2"}
    assert all(row["output_tokens_per_s"]["min"] > 0 for row in report["engines"].values())


def one_request() -> object:
    workloads = importlib.import_module("workloads")
    return workloads.BenchmarkRequest((1, 2, 3), 4)
