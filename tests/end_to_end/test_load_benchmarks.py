"""The benchmark of load runs, and writes what it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nanocore.demo_model import demo_model_folder

pytestmark = pytest.mark.campaign

DEMO_MODEL = demo_model_folder()


def run_main(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *flags: str
) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["benchmark", *flags, "--out", str(out)])
    benchmark.main()
    report: dict[str, Any] = json.loads(out.read_text())
    return report


@pytest.mark.parametrize("benchmark", ["under_load"], indirect=True)
def test_equal_seeds_draw_equal_arrivals_and_a_long_prompt_among_them(
    benchmark: ModuleType,
) -> None:
    load = benchmark.Load(
        rate=20, duration_s=10, short_tokens=3, long_tokens=50, output_tokens=4, long_every_s=4
    )
    arrivals = benchmark.draw_arrivals(load, vocab_size=100, seed="1")
    assert arrivals == benchmark.draw_arrivals(load, vocab_size=100, seed="1")
    assert arrivals != benchmark.draw_arrivals(load, vocab_size=100, seed="2")
    assert [each.arrival_s for each in arrivals if len(each.prompt) == 50] == [2, 6]
    assert {(len(each.prompt), each.num_prompt_tokens) for each in arrivals} == {(3, 3), (50, 50)}
    times_s = [each.arrival_s for each in arrivals]
    assert times_s == sorted(times_s)
    assert times_s[0] == 0
    assert times_s[-1] < 10
    assert 120 < len(times_s) < 290  # 200 in the mean


@pytest.mark.parametrize("benchmark", ["under_load"], indirect=True)
def test_engines_are_compared_under_load(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = [
        "--model", str(DEMO_MODEL), "--rate", "10", "--duration-s", "0.5", "--long-tokens", "300",
        "--output-tokens", "600", "--chunk-tokens", "64", "--targets", "50", "--reps", "1",
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
