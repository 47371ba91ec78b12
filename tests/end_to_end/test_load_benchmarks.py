"""Benchmarks of load, start-up, steps and prefix caching's cost run, and write what they say."""

from __future__ import annotations

import importlib
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.campaign

DEMO_MODEL = Path(__file__).parents[2] / "nanocore" / "demo_model"


def run_main(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *flags: str
) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["benchmark", *flags, "--out", str(out)])
    benchmark.main()
    report: dict[str, Any] = json.loads(out.read_text())
    return report


@pytest.mark.parametrize("benchmark", ["arrivals"], indirect=True)
def test_equal_seeds_draw_equal_arrivals_and_a_long_prompt_among_them(
    benchmark: ModuleType,
) -> None:
    load = benchmark.Load(
        rate=20, duration_s=10, short_tokens=3, long_tokens=50, output_tokens=4, long_every_s=4
    )
    arrivals = benchmark.draw_arrivals(load, vocab_size=100, seed="1")
    assert arrivals == benchmark.draw_arrivals(load, vocab_size=100, seed="1")
    assert arrivals != benchmark.draw_arrivals(load, vocab_size=100, seed="2")
    assert [each.time_s for each in arrivals if each.is_long] == [2, 6]
    assert {len(each.prompt_token_ids) for each in arrivals} == {3, 50}
    times_s = [each.time_s for each in arrivals]
    assert times_s == sorted(times_s)
    assert times_s[0] == 0
    assert times_s[-1] < 10
    assert 120 < len(times_s) < 290  # 200 in the mean


@pytest.mark.parametrize("benchmark", ["under_load"], indirect=True)
def test_engines_are_compared_under_load_and_drawn(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    picture = tmp_path / "load.png"
    flags = [
        "--model", str(DEMO_MODEL), "--rate", "10", "--duration-s", "0.5", "--long-tokens", "300",
        "--output-tokens", "600", "--chunk-tokens", "64", "--targets", "50", "--reps", "1",
        "--plot", str(picture),
    ]  # fmt: skip
    report = run_main(benchmark, monkeypatch, tmp_path / "out.json", *flags)
    assert report["engines"].keys() == {"whole", "chunked", "target-50"}
    for summary in report["engines"].values():
        for name in ("itl_ms", "ttft_ms", "long_ttft_ms"):
            p50, p99, largest = (
                summary[f"{name}_{end}"]["median"] for end in ("p50", "p99", "max")
            )
            assert 0 < p50 <= p99 <= largest
        assert summary["output_tokens_per_s"]["min"] > 0
        quantiles = summary["itl_ms_quantiles"]
        assert quantiles == sorted(quantiles)
        assert len(quantiles) == len(report["quantiles"])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("benchmark", ["startup"], indirect=True)
def test_the_phases_of_a_start_add_up(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmark, "WARM_UP", 0)
    report = run_main(benchmark, monkeypatch, tmp_path / "out.json", "--starts", "1")
    figures = report["figures"]
    phases = [figures[event]["median"] for event in report["phases"]]
    assert len(phases) == 8
    assert sum(phases) == pytest.approx(figures["first_token_s"]["median"], abs=0.01)
    assert figures["import_torch_s"]["median"] > 0


@pytest.mark.parametrize("benchmark", ["startup"], indirect=True)
def test_a_start_that_fails_is_an_error_with_what_was_logged(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "client.py"
    script.write_text("raise KeyError('no engine today')")
    monkeypatch.setattr(benchmark, "CLIENT", script)
    with pytest.raises(RuntimeError, match="no engine today"):
        benchmark.time_start()


@pytest.mark.parametrize("benchmark", ["prefix_cache_cost"], indirect=True)
def test_prefix_caching_is_measured_in_the_engine_and_alone(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def make_workload(name: str, vocab_size: int, repetition: int) -> object:
        workloads = importlib.import_module("workloads")
        prompt = tuple(random.Random(f"{name}/{repetition}").choices(range(vocab_size), k=40))
        return workloads.Workload(name, "tiny", (workloads.BenchmarkRequest(prompt, 20),))

    monkeypatch.setattr(benchmark, "make_workload", make_workload)
    flags = ["--model", str(DEMO_MODEL), "--pairs", "1", "--passes", "3"]
    report = run_main(benchmark, monkeypatch, tmp_path / "out.json", *flags)
    assert report["workloads"].keys() == set(benchmark.WORKLOADS)
    for summary in report["workloads"].values():
        assert summary["alone"]["num_steps"] == 20
        assert len(summary["alone"]["total_us"]["values"]) == 3
        assert summary["engine"]["on_s"]["min"] > 0
        assert summary["step_ms"] > 0


@pytest.mark.parametrize("benchmark", ["breakdown"], indirect=True)
def test_the_parts_of_a_step_add_up(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = ["--model", str(DEMO_MODEL), "--cases", "W5"]
    report = run_main(benchmark, monkeypatch, tmp_path / "out.json", *flags)
    case = report["cases"]["W5"]
    parts = case["mean_ms"]
    assert {"linear", "attention", "sampling", "input_preparation", "other"} <= parts.keys()
    assert all(milliseconds > 0 for milliseconds in parts.values())
    steps_ms = case["step_ms"]["values"]
    assert sum(parts.values()) == pytest.approx(sum(steps_ms) / len(steps_ms), rel=0.01)
    assert case["engine_step_ms"]["median"] > 0
    assert case["context_switches_per_step"]["median"] > 0
