"""The driver's subcommands run without a GPU, end in time, and write what they have."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import run, tune
from benchmarks.gpu.restarts import CONTINUE_VARIABLE
from benchmarks.gpu.session import Results, Session
from nanocore.kernels.triton import attention
from nanocore.kernels.triton.prefill_attention import PrefillTiles

pytestmark = pytest.mark.campaign

Report = Callable[[str], dict[str, Any]]


def session(folder: Path, **changes: Any) -> Session:
    return Session(**({"out": folder, "device": torch.device("cpu"), "small": True} | changes))


def test_environment_and_ceilings_are_measured(run_driver: Any, report: Report) -> None:
    run_driver("env", "ceilings", "--commit", "abc", env={"TRITON_INTERPRET": "1"})
    environment, ceilings = report("env"), report("ceilings")
    for found in (environment, ceilings):
        assert found["commit"] == "abc"
        assert found["complete"]
        assert found["errors"] == {}
        assert found["versions"]["torch"] == torch.__version__
    assert environment["measurements"]["triton"]["works"]
    assert environment["measurements"]["fa3"] == {"carried": False}
    assert ceilings["measurements"]["copy"]["gb_per_s"]["median"] > 0
    assert ceilings["measurements"]["gemm/8192"]["tflop_per_s"]["min"] > 0
    assert ceilings["measurements"]["launch"]["host_us"]["median"] > 0


def test_kernels_are_right_and_timed(run_driver: Any, report: Report) -> None:
    only = "decode_attention,rms_norm/tiny/,rope_and_store_kv/tiny/1,gated_linear/tiny/1,best_token"
    run_driver("kernels", "--only", only, env={"TRITON_INTERPRET": "1"})
    found = report("kernels")
    assert found["kernels"] == "triton"
    assert found["errors"] == {}
    assert {name.split("/")[0] for name in found["measurements"]} == {
        "decode_attention", "rms_norm", "rope_and_store_kv", "gated_linear", "best_token",
    }  # fmt: skip
    for figures in found["measurements"].values():
        assert figures["error"] < 1e-5
        assert figures["us"]["min"] > 0
        assert all("us" in other for other in figures["others"].values())


def test_tiles_are_tried(run_driver: Any, report: Report) -> None:
    flags = ["--only", "decode,prefill,matmul/tiny/qkv,moe"]
    result = run_driver("tune", *flags, env={"TRITON_INTERPRET": "1"})
    found = report("tune")
    assert found["errors"] == {}
    for figures in found["measurements"].values():
        assert figures["failed"] == {}
        assert figures["us"][figures["best"]] == figures["best_us"]
        assert figures["ours_over_best"] >= 1
    assert "best; ours" in result.stdout


def test_chunks_are_tried_with_one_and_with_two_programs_on_a_multiprocessor() -> None:
    own = attention.prefill_tiles(128, 2, (9, 0))
    assert own == PrefillTiles(64, 64, num_warps=4, num_stages=3)
    assert {own, PrefillTiles(128, 64, num_warps=8, num_stages=3)} <= {
        PrefillTiles(*values) for values in tune.PREFILL_GRID
    }


def test_the_engine_is_checked_and_timed(run_driver: Any, report: Report) -> None:
    run_driver("engine")
    found = report("engine")
    assert found["errors"] == {}
    assert found["skipped"] == {
        "check/paths/tensor parallel": "needs two GPUs",
        "check/transformers/bfloat16, flash": "not carried: FlashAttention 3",
    }
    checks = found["measurements"]
    float32 = checks["check/transformers/float32"]
    assert float32["num_equal"] == float32["num_requests"] > 0
    crowd = checks["check/paths/alone and in a crowd/batch_invariant True"]
    assert crowd["equal_in_a_crowd"] == crowd["equal_in_chunks"] == crowd["num_requests"]
    step = checks["speed/tiny/decode/b4/ctx64"]
    assert step["share_of_limit"] * step["step_ms"]["median"] == pytest.approx(step["limit_ms"], 1)
    assert checks["speed/tiny-untied/prefill/64"]["tokens_per_s"] > 0
    assert checks["speed/tiny/start"]["phases_s"].keys() == {
        "build",
        "load",
        "allocate and capture",
    }


def test_nano_vllms_benchmark_runs_both_ways(run_driver: Any, report: Report) -> None:
    run_driver("offline", "--only", "tiny/sdk,tiny/in")
    found = report("offline")["measurements"]
    assert found.keys() == {"tiny/sdk", "tiny/in process"}
    for figures in found.values():
        assert figures["output_tokens_per_s"]["min"] > 0
        assert figures["num_output_tokens"] == found["tiny/sdk"]["num_output_tokens"]


def test_the_time_limit_ends_a_subcommand_and_says_what_is_missing(
    run_driver: Any, report: Report
) -> None:
    result = run_driver("ceilings=1.5", "env", "--limit-s", "2", check=False)
    assert result.returncode == 1
    assert "not complete" in result.stdout
    found = report("ceilings")
    assert not found["complete"]
    assert set(found["skipped"].values()) == {"time limit"}
    assert "gemm/8192" in found["skipped"]


def test_a_hanging_subcommand_is_killed_with_its_children(tmp_path: Path) -> None:
    """Its child holds the end of a pipe, which breaks when the child has ended."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    script = (
        "import subprocess, sys, time\n"
        f"with open({str(fifo)!r}, 'wb', 0) as pipe:\n"
        "    pipe.write(b'begun')\n"
        "    child = [sys.executable, '-c', 'import time; time.sleep(1000)']\n"
        "    subprocess.Popen(child, stdout=pipe)\n"
        "time.sleep(1000)\n"
    )
    code = run.run_bounded([sys.executable, "-c", script], 3.0, dict(os.environ))
    assert code == -signal.SIGKILL
    poll = select.poll()
    poll.register(reader, 0)  # for its end alone
    assert poll.poll(60_000), "the child lives"
    assert os.read(reader, 100) == b"begun"
    os.close(reader)


def test_what_was_measured_survives_and_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Results(session(tmp_path), "env", needs_s=0)
    first.measure("a", lambda: 1)
    first.measure("b", lambda: 1 / 0)
    written = json.loads(first.path.read_text())
    assert written["measurements"] == {"a": 1}
    assert "ZeroDivisionError" in written["errors"]["b"]
    assert not written["complete"]
    monkeypatch.setenv(CONTINUE_VARIABLE, "env")
    second = Results(session(tmp_path), "env", needs_s=0)
    assert second.measure("a", lambda: 2) == 1
    assert second.measure("b", lambda: 2) is None
    assert second.measure("c", lambda x: x, 3) == 3
    second.finish()
    assert json.loads(second.path.read_text())["complete"]


def test_a_lost_device_is_replaced_by_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, environments = iter([run.RESTART, run.RESTART, 0]), []

    def bounded(command: list[str], limit_s: float, environment: dict[str, str]) -> int:
        environments.append(environment.get(CONTINUE_VARIABLE))
        return next(codes)

    monkeypatch.setattr(run, "run_bounded", bounded)
    assert run.main(["kernels", "--out", str(tmp_path), "--device", "cpu"]) == 0
    assert environments == [None, "kernels", "kernels"]


def test_a_machine_without_a_gpu_is_told_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert run.main(["env", "--out", str(tmp_path), "--limit-s", "60"]) == 1
    assert "env: ended with 2" in capfd.readouterr().out
