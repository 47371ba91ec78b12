"""The day's parts run without a GPU, on tiny shapes, and measure what the goals ask for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import (
    engine_checks,
    engine_speed,
    environment,
    kernels,
    peers,
    smoke,
    tile_shapes,
)
from benchmarks.gpu.goals import GOALS, goals_table
from benchmarks.gpu.part import PARTS
from benchmarks.gpu.results import Records, Results, Session
from benchmarks.report import spread

pytestmark = pytest.mark.campaign

ROOT = Path(__file__).parents[2]
Run = Callable[..., Records]


@pytest.fixture
def run_part(tmp_path: Path) -> Run:
    """Runs a part; returns its records."""

    def run(part: str, *flags: str, interpret: str = "0") -> Records:
        command = [sys.executable, "-m", "benchmarks.gpu.part", part, *flags, "--device", "cpu"]
        result = subprocess.run(
            [*command, "--small", "--out", str(tmp_path)], capture_output=True, text=True,
            cwd=ROOT, timeout=110, check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": interpret},
        )  # fmt: skip
        assert result.returncode == 0, result.stdout + result.stderr
        return Records("rehearsal.jsonl", (tmp_path,))

    return run


def names_on_a_gpu(monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, list[str]]:
    """What each part measures on a machine that has one."""
    cuda = torch.device("cuda")
    session = Session(folders=(folder,), device=cuda)
    monkeypatch.setattr("benchmarks.gpu.results.describe_device", lambda _: {"name": "H200"})
    results = Results(session)
    engine = engine_speed.CurrentEngine(results, folder)
    found = {
        "env": environment.measurements(session),
        "smoke": smoke.measurements(session, "smoke"),
        "check": engine_checks.measurements(engine_checks.Checked(results, folder / "model")),
    }
    steps = ("speed", "large", "variants")
    found |= {part: engine_speed.measurements(engine, part) for part in steps}
    others = ("bench", "bench-large", "nano-vllm", "transformers", "vllm-inductor", "vllm")
    found |= {part: peers.measurements(results, part) for part in others}
    names = {part: list(measurements) for part, measurements in found.items()}
    for part in ("attention", "products", "states"):
        names[part] = [case.name for case in kernels.cases(session, part)]
    names["tiles"] = [case.name for case in tile_shapes.cases(session)]
    return names


def test_every_part_measures_what_has_its_name_and_every_goal_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = names_on_a_gpu(monkeypatch, tmp_path)
    assert {*found, "tests"} == {part.name for part in PARTS}
    for part, names in found.items():
        assert len({*names}) == len(names) > 0
        assert all(name.startswith(f"{part}/") for name in names)
    every = {name for names in found.values() for name in names}
    assert {goal.measurement for goal in GOALS} <= every
    for rows in (1, 32, 256):
        assert f"speed/qwen3-0.6b/decode/b{rows}/ctx1024" in every
        assert f"large/qwen3-8b/decode/b{rows}/ctx1024" in every
    for rows in (1, 8, 32, 64, 128, 256):
        assert f"attention/decode/g2/b{rows}/ctx1024" in every
        assert f"attention/decode/g4/b{rows}/ctx1024" in every
    for variant in ("no pdl", "weights int8", "weights fp8", "kv int8", "kv fp8", "flash"):
        assert f"variants/qwen3-0.6b/{variant}/decode/b32/ctx1024" in every


def test_a_goal_that_was_measured_is_in_the_table() -> None:
    step = {"step_ms": {"median": 1.234}, "share_of_limit": 0.25}
    ratio = {"times_slower_than_ours": spread([1.25, 1.5, 2.0])}
    one_round = {"times_slower_than_ours": spread([1.75])}
    bench = {"nanocore": {"output_tokens_per_s": {"median": 20000.0}, "share_of_limit": 0.5}}
    case = {"gb_per_s": 2400.0, "others": {"fa3": {"times_of_ours": 0.9}}}
    figures = {"speed/qwen3-0.6b/decode/b1/ctx1024": step, "nano-vllm/qwen3-0.6b": ratio,
               "vllm/qwen3-0.6b": one_round,
               "bench/qwen3-0.6b": bench, "attention/prefill/g2/4x4096": case,
               "attention/decode/g2/b256/ctx1024": case}  # fmt: skip
    table = goals_table({"figures": figures, "errors": {}, "device": {"name": "NVIDIA H100"}})
    cells = "1.23 ms (35%)", "1.50x (1.25-2.00)", "20,000 tok/s (78%)", "2.40 TB/s (80%), 0.90x FA3"
    for cell in (*cells, "1.75x, one round", "0.90x"):
        assert f" {cell}" in table


def test_the_machine_is_described_and_its_ceilings_are_measured(run_part: Run) -> None:
    found = run_part("env")
    assert (found.errors, found.missing) == ({}, [])
    assert found.figures["env/installed"]["packages"]["torch"] == torch.__version__
    assert found.figures["env/copy"]["gb_per_s"]["median"] > 0
    assert found.figures["env/gemm"]["tflop_per_s"]["median"] > 0


def test_kernels_are_right_and_timed(run_part: Run) -> None:
    only = "attention/decode/g2/b1/ctx16,attention/mixed"
    run_part("attention", "--only", only, interpret="1")
    products = "products/gated_linear/tiny/,products/linear/tiny/,products/logits/tiny/3"
    run_part("products", "--only", products, interpret="1")
    found = run_part("states", interpret="1")
    assert found.errors == {}
    assert {name.split("/")[1] for name in found.figures} == {
        "decode", "mixed", "gated_linear", "linear", "logits", "delta_rule", "silu_conv",
        "gated_norm", "sigmoid_gate",
    }  # fmt: skip
    for figures in found.figures.values():
        assert figures["kernels"] == "triton"
        assert figures["error"] < 1e-5
        assert figures["us"]["min"] > 0
        assert all("us" in other for other in figures["others"].values())


def test_shapes_of_tiles_are_tried(run_part: Run) -> None:
    only = "tiles/decode/g2/b1/,tiles/int8/linear/tiny/256,tiles/int4/linear/tiny/1"
    found = run_part("tiles", "--only", only, interpret="1")
    assert (found.errors, found.missing, len(found.figures)) == ({}, [], 3)
    for figures in found.figures.values():
        assert 2 <= len(figures["candidates"]) <= 3
        assert {figures["fastest"], figures["today"]} <= figures["candidates"].keys()
        assert all(each["error"] < 1e-4 for each in figures["candidates"].values())


def test_the_engine_is_checked_and_timed(run_part: Run) -> None:
    run_part("speed")
    run_part("large")
    run_part("variants", "--only", "variants/tiny/kv,variants/tiny/no")
    run_part("smoke")
    found = run_part("check")
    assert (found.errors, found.missing) == ({}, [])
    figures = found.figures
    assert figures["check/transformers/float32"]["num_equal"] > 0
    for path in ("graphs", "overlapped", "chunks", "one by one"):
        paths = figures[f"check/paths/{path}"]
        assert paths["num_equal"] == paths["num_requests"] > 0
    start = figures["speed/tiny/start"]
    assert start["phases_s"].keys() == {"build", "load", "allocate and capture"}
    assert figures["speed/tiny/decode/b4/ctx64"]["step_ms"]["min"] > 0
    assert figures["speed/tiny/prefill/64"]["tokens_per_s"] > 0
    assert figures["speed/tiny/idle/b4"]["idle_ms"] > 0
    assert "device_busy_ms" in figures["speed/tiny/prompts"]
    assert figures["large/tiny-untied/decode/b4/ctx64"]["step_ms"]["min"] > 0
    assert figures["variants/tiny/kv int8/decode/b4/ctx64"]["step_ms"]["min"] > 0
    assert "fp8 needs CUDA" in found.skipped["variants/tiny/kv fp8/start"]
    assert "needs a GPU" in found.skipped["variants/tiny/no pdl/start"]
    for path in ("eager", "graphs", "overlapped"):
        assert figures[f"smoke/pdl/engine/{path}"]["num_equal"] == 4


def test_the_device_is_busy_where_pieces_of_work_are() -> None:
    """Two that overlap, a gap, and one more."""
    busy, by_name = engine_speed.device_work([(10, 14, "a"), (0, 4, "a"), (2, 6, "b")])
    assert busy == 10
    assert by_name == {"a": 8, "b": 4}


@pytest.fixture
def run_in_copy(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """As on the day: nothing is installed, and the sources are a folder in another checkout."""
    outer = tmp_path / "outer"
    copy, ignored = outer / "engines" / "ours", shutil.ignore_patterns("__pycache__", "*.so")
    for folder in ("nanocore", "benchmarks", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", copy)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "other"]):
        subprocess.run(["git", *words], cwd=outer, check=True)
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    site = tmp_path / "site"
    site.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "nanocore" not in path.name and path.suffix != ".pth":
            (site / path.name).symlink_to(path)
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}

    def run(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [tmp_path / "venv" / "bin" / "python", *words], cwd=copy, env=environment | changes,
            capture_output=True, text=True, timeout=110, check=False,
        )  # fmt: skip

    return run


def test_the_day_runs_in_a_copy_that_is_not_installed(
    run_in_copy: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    alone = run_in_copy("-I", "-c", "import nanocore")
    assert "No module named 'nanocore'" in alone.stderr
    out, work = tmp_path / "out", tmp_path / "work"
    flags = ["--out", str(out), "--work", str(work), "--device", "cpu", "--small"]
    result = run_in_copy(
        "-m", "benchmarks.gpu.day", "speed", "bench", *flags, NANOCORE_COMMIT="abc"
    )
    assert result.returncode == 0, result.stdout + result.stderr
    report: dict[str, Any] = json.loads((out / "rehearsal.json").read_text())
    assert (report["errors"], report["missing"]) == ({}, [])
    assert report["endings"] == {"speed": "ended", "bench": "ended"}
    assert report["commit"] == "abc", "that of the checkout around it is none of ours"
    assert {name.partition("/")[0] for name in report["figures"]} == {"speed", "bench"}
    bench = report["figures"]["bench/tiny"]["nanocore"]
    assert bench["output_tokens_per_s"]["min"] > 0
    assert len(result.stdout) < 12_000, "what a call shows of its output"
    for name in report["figures"]:
        assert f"\n{name}: " in result.stdout
    assert (work / "rehearsal.jsonl").read_bytes() == (out / "rehearsal.jsonl").read_bytes()
