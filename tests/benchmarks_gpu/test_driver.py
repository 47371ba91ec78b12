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

from benchmarks.gpu import bounded, run, tune
from benchmarks.gpu.engine import common_settings
from benchmarks.gpu.reports import read_json, write_json
from benchmarks.gpu.session import Results, Session, UnavailableError
from nanocore.kernels.triton import attention
from nanocore.kernels.triton.prefill_attention import PrefillTiles

pytestmark = pytest.mark.campaign

Report = Callable[[str], dict[str, Any]]


def session(folder: Path, **changes: Any) -> Session:
    return Session(**({"out": folder, "device": torch.device("cpu"), "small": True} | changes))


def test_environment_and_ceilings_are_measured(run_driver: Any, report: Report) -> None:
    for subcommand in ("env", "ceilings"):
        run_driver(subcommand, "--commit", "abc", env={"TRITON_INTERPRET": "1"})
    found = report("env")
    assert found["commit"] == "abc"
    assert found["missing"] == []
    assert found["errors"] == {}
    assert found["versions"]["torch"] == torch.__version__
    measured = found["measurements"]
    assert measured["triton"]["works"]
    assert measured["fa3"] == {"carried": False}
    assert measured["copy"]["gb_per_s"]["median"] > 0
    assert measured["gemm/8192"]["tflop_per_s"]["min"] > 0
    assert measured["launch"]["host_us"]["median"] > 0


def test_kernels_are_right_and_timed(run_driver: Any, report: Report) -> None:
    only = "attention/decode/g2/b1/ctx16,attention/chunk,gated_linear/tiny/,linear/qkv/tiny/"
    run_driver("kernels", "--only", f"{only},logits/tiny/3", env={"TRITON_INTERPRET": "1"})
    found = report("kernels")
    assert found["kernels"] == "triton"
    assert found["errors"] == {}
    assert {name.split("/")[0] for name in found["measurements"]} == {
        "attention", "gated_linear", "linear", "logits",
    }  # fmt: skip
    forms = {name.rpartition("/")[2] for name in found["measurements"] if "linear" in name}
    assert forms | {name.rpartition("/")[2] for name in found["skipped"]} == {
        "plain",
        "int8",
        "fp8",
    }
    assert all("no quantization" in reason for reason in found["skipped"].values())
    for figures in found["measurements"].values():
        assert figures["error"] < 1e-5
        assert figures["us"]["min"] > 0
        assert all("us" in other for other in figures["others"].values())


def test_tiles_are_tried(run_driver: Any, report: Report) -> None:
    flags = ["--only", "decode,prefill"]
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
    run_driver("engine", "--only", "speed,check,bench/tiny-untied,matrix/tiny/")
    found = report("engine")
    assert found["errors"] == {}
    skipped = {name for name in found["skipped"] if "fp8" not in name}
    assert skipped == {"check/transformers/bfloat16, flash"}
    fp8 = {name.split("/")[2]: reason for name, reason in found["skipped"].items() if "fp8" in name}
    assert "fp8 needs CUDA" in fp8["kv fp8"]
    measured = found["measurements"]
    float32 = measured["check/transformers/float32"]
    assert float32["num_equal"] == float32["num_requests"] > 0
    crowd = measured["check/paths/alone and in a crowd/batch_invariant True"]
    assert crowd["equal_in_a_crowd"] == crowd["equal_in_chunks"] == crowd["num_requests"]
    step = measured["speed/tiny/decode/b4/ctx64"]
    assert step["share_of_limit"] * step["step_ms"]["median"] == pytest.approx(step["limit_ms"], 1)
    assert measured["speed/tiny/prefill/64"]["tokens_per_s"] > 0
    assert measured["speed/tiny/start"]["phases_s"].keys() == {
        "build",
        "load",
        "allocate and capture",
    }
    for variant in ("weights int8", "kv int8"):
        assert measured[f"matrix/tiny/{variant}/decode/b4/ctx64"]["step_ms"]["min"] > 0
    assert measured["matrix/tiny/eager/start"]["eager"]
    bench = measured["bench/tiny-untied"]
    assert bench["output_tokens_per_s"]["min"] > 0


def test_where_graphs_cannot_be_recorded_the_rest_is_measured_without(tmp_path: Path) -> None:
    assert "enforce_eager" not in common_settings(session(tmp_path))
    results = Results(session(tmp_path), "engine", needs_s=0)
    results.run({"speed/tiny/start": lambda: 1 / 0})
    assert common_settings(session(tmp_path))["enforce_eager"]


def test_the_time_limit_ends_a_subcommand_and_says_what_is_missing(
    run_driver: Any, report: Report
) -> None:
    run_driver("ceilings", "--limit-s", "2")
    found = report("env")
    assert found["missing"] == ["copy", "read", "copy/256_mib", "gemm/8192", "launch"]
    assert found["measurements"] == {}


def test_a_hanging_subcommand_is_killed_with_its_children(tmp_path: Path) -> None:
    """Its child, in a session of its own, holds the end of a pipe, which breaks when it ends."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    script = (
        "import subprocess, sys, time\n"
        f"with open({str(fifo)!r}, 'wb', 0) as pipe:\n"
        "    pipe.write(b'begun')\n"
        "    child = [sys.executable, '-c', 'import time; time.sleep(1000)']\n"
        "    subprocess.Popen(child, stdout=pipe, start_new_session=True)\n"
        "time.sleep(1000)\n"
    )
    log = tmp_path / "log"
    assert bounded.run_bounded([sys.executable, "-c", script], 3.0, dict(os.environ), log) is None
    poll = select.poll()
    poll.register(reader, 0)  # for its end alone
    assert poll.poll(60_000), "the child lives"
    assert os.read(reader, 100) == b"begun"
    os.close(reader)


def unavailable() -> None:
    raise UnavailableError("not carried")


def test_what_was_measured_survives_and_is_not_measured_again(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    first = Results(session(tmp_path, keep=kept), "env", needs_s=0)
    first.run({"a": lambda: 1, "b": lambda: 1 / 0, "c": unavailable})
    first.expect(["d"])
    for folder in (tmp_path, kept):
        written = json.loads((folder / "gpu-env.json").read_text())
        assert written["measurements"] == {"a": 1}
        assert "ZeroDivisionError" in written["errors"]["b"]
        assert written["skipped"] == {"c": "not carried"}
        assert written["missing"] == ["d"]
    second = Results(session(tmp_path), "env", needs_s=0)
    second.run(dict.fromkeys("abcd", lambda: 2))
    assert second.measurements == {"a": 1, "c": 2, "d": 2}
    assert second.data["errors"].keys() == {"b"}
    assert second.data["missing"] == []


def test_another_commit_tries_again_what_failed_and_says_what_it_did_not_measure(
    tmp_path: Path,
) -> None:
    Results(session(tmp_path, commit="old"), "env", needs_s=0).run(
        {"a": lambda: 1, "b": lambda: 1 / 0}
    )
    second = Results(session(tmp_path, commit="new"), "env", needs_s=0)
    second.run(dict.fromkeys("ab", lambda: 2))
    assert second.data["commit"] == "new"
    assert second.measurements == {"a": 1, "b": 2}
    assert second.data["measured_before"] == {"a": "old"}
    assert second.data["errors"] == {}


def test_the_time_limit_is_no_error_of_a_measurement(tmp_path: Path) -> None:
    late = Results(session(tmp_path, deadline_s=0.0), "env", needs_s=0)
    late.run({"a": lambda: 1 / 0, "b": lambda: 1})
    assert late.data["errors"] == {}
    assert late.data["missing"] == ["a"]


CRASHES = """
import os, sys, time, torch
from pathlib import Path
from benchmarks.gpu.session import Results, Session

results = Results(Session(out=Path(sys.argv[1]), device=torch.device("cpu")), "env", hangs_s=3.0)
hang = lambda: time.sleep(1000)
results.run({"a": lambda: 1, "hangs": hang, "crashes": os.abort, "b": lambda: 2})
"""


def test_a_measurement_that_hangs_or_crashes_costs_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each ends the process; the next one leaves it out."""
    in_time = bounded.run_bounded
    codes = []

    def run_script(command: list[str], *others: Any) -> int | None:
        codes.append(in_time([sys.executable, "-c", CRASHES, str(tmp_path)], *others))
        return codes[-1]

    monkeypatch.setattr(bounded, "run_bounded", run_script)
    arguments = run.parse_arguments(["env", "--out", str(tmp_path), "--device", "cpu"])
    ending = bounded.run_subcommand("env", 100.0, arguments, {}, {}, tmp_path / "log")
    assert ending == bounded.ENDED
    assert codes == [1, -signal.SIGABRT, 0]
    found = json.loads((tmp_path / "gpu-env.json").read_text())
    assert found["measurements"] == {"a": 1, "b": 2}
    assert all("crashed or hung" in found["errors"][name] for name in ("hangs", "crashes"))


def test_a_part_that_never_begins_is_not_started_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "run_bounded", lambda *_: 1)
    arguments = run.parse_arguments(["env", "--out", str(tmp_path)])
    assert (
        bounded.run_subcommand("env", 50.0, arguments, {}, {}, tmp_path / "log")
        == "ended with exit code 1"
    )
    write_json("gpu-env.json", {"begun": "a"}, tmp_path)
    assert (
        bounded.run_subcommand("env", 50.0, arguments, {}, {}, tmp_path / "log")
        == "ended with exit code 1"
    )


FAILING_TESTS = """
import warnings
import pytest

def test_passes(): warnings.warn("as a newer library might")
def test_fails(): assert 1 == 2, "the kernel is wrong"
@pytest.mark.skip(reason="no such device")
def test_is_skipped(): pass
@pytest.fixture
def broken(): raise RuntimeError("no stream")
def test_cannot_be_set_up(broken): pass
"""
RUN_TESTS = """
import sys, torch
from pathlib import Path
from benchmarks.gpu.gpu_tests import run_tests
from benchmarks.gpu.session import Session
run_tests(Session(out=Path(sys.argv[1]), device=torch.device("cpu")), Path(sys.argv[2]))
"""


def test_gpu_tests_are_measurements(tmp_path: Path, report: Report) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_a.py").write_text(FAILING_TESTS)
    (tests / "test_b.py").write_text("import no_such_module")
    command = [sys.executable, "-c", RUN_TESTS, str(tmp_path), str(tests)]
    for _ in range(2):  # the second has nothing to do
        assert bounded.run_bounded(command, 100.0, run.child_environment(), tmp_path / "log") == 0
        found = report("tests")
        assert [name.rpartition("::")[2] for name in found["measurements"]] == ["test_passes"]
        errors = {name.rpartition("::")[2]: text for name, text in found["errors"].items()}
        assert "the kernel is wrong" in errors.pop("test_fails")
        assert "no stream" in errors.pop("test_cannot_be_set_up")
        assert errors == {}
        (lacking,) = found["missing"]
        assert lacking.endswith("test_b.py")
        assert "no_such_module" in found["skipped"].pop(lacking)
        assert list(found["skipped"].values()) == ["Skipped: no such device"]
    (tests / "test_b.py").write_text("def test_imports(): pass")
    assert bounded.run_bounded(command, 100.0, run.child_environment(), tmp_path / "log") == 0
    assert report("tests")["missing"] == []
    assert len(report("tests")["measurements"]) == 2


def test_without_pytest_the_tests_are_missing_until_it_is_there(
    tmp_path: Path, report: Report
) -> None:
    for name in ("test_a.py", "test_kernels.py", "test_cuda_steps.py"):
        (tmp_path / name).write_text("def test_passes(): pass")
    for before in ("sys.modules['pytest'] = None", ""):
        command = [sys.executable, "-c", f"import sys; {before}\n{RUN_TESTS}"]
        command += [str(tmp_path)] * 2
        assert bounded.run_bounded(command, 100.0, run.child_environment(), tmp_path / "log") == 0
        found = report("tests")
        assert found["errors"] == {}
        if before:
            assert found["missing"] == ["all tests"]
            assert "pytest" in found["skipped"]["all tests"]
    assert found["missing"] == []
    names = [name.partition("::")[0].rpartition("/")[2] for name in found["measurements"]]
    assert names == ["test_cuda_steps.py", "test_a.py", "test_kernels.py"]


def test_a_part_that_is_killed_in_a_measurement_can_go_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time limit killed it, and not the measurement."""
    arguments = run.parse_arguments(["env", "--out", str(tmp_path)])
    write_json("gpu-env.json", {"begun": "a", "missing": ["a"]}, tmp_path)
    monkeypatch.setattr(bounded, "run_bounded", lambda *_: None)
    ending = bounded.run_subcommand("env", 50.0, arguments, {}, {}, tmp_path / "log")
    assert ending == "killed at its time limit"
    assert read_json(tmp_path / "gpu-env.json") == {"begun": None, "missing": ["a"]}


def test_a_machine_without_a_gpu_is_told_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert run.main(["env", "--out", str(tmp_path)]) == 2
    assert "torch sees no CUDA device" in capfd.readouterr().out
