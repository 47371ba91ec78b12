"""What was measured survives rehearsals, damaged files, full folders, interrupts, second calls."""

from __future__ import annotations

import faulthandler
import fcntl
import lzma
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import bounded, gpu_tests, plan, run
from benchmarks.gpu.engine import graph_settings
from benchmarks.gpu.goals import GOALS, NOT_MEASURED, goals_table
from benchmarks.gpu.reports import FolderError, read_json, write_json
from benchmarks.gpu.run import ROOT, child_environment
from benchmarks.gpu.session import BrokenContextError, LackingError, Results, Session
from nanocore.protocol.errors import WorkerError
from tests.benchmarks_gpu.fake_parts import PEERS, FakeParts, carry_peers, write_kernel

pytestmark = pytest.mark.campaign

CUDA = {"name": "NVIDIA H200"}


def session(folder: Path, **changes: Any) -> Session:
    return Session(**({"out": folder, "device": torch.device("cpu"), "small": True} | changes))


def test_a_rehearsal_does_not_count_on_the_day(parts: FakeParts) -> None:
    parts.call("env", "--small")
    parts.call("env", "--device", "cuda")
    assert [name for name, _ in parts.begun] == ["env"]
    assert any("gpu-plan.json" in text and "set aside" in text for text in parts.problems())
    assert len(list((parts.work / "reports").glob("set-aside-0-gpu-*.json"))) == 2
    parts.call("env", "--device", "cuda")
    assert parts.begun == []


def test_a_rehearsal_has_a_work_folder_of_its_own() -> None:
    real, small, cpu = (
        plan.parse_arguments(["--out", "x", *flags]).work
        for flags in ([], ["--small"], ["--device", "cpu"])
    )
    assert small == cpu != real


@pytest.mark.parametrize("place", ["out", "work"])
def test_a_rehearsal_leaves_what_a_gpu_measured_alone(
    parts: FakeParts, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parts.call("env", "--device", "cuda")
    parts.out_is_new = False
    parts.work = parts.work if place == "work" else parts.work.with_name("another")
    before = {path: path.read_bytes() for path in parts.out.iterdir()}
    assert parts.call("env", "--small") == 2
    assert "was measured on a GPU, and this is a rehearsal" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in parts.out.iterdir()} == before
    assert parts.begun == []


def test_one_subcommand_of_a_rehearsal_leaves_it_alone_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = {"small": False, "device": CUDA, "measurements": {"gpu": 1}}
    write_json("gpu-tune.json", real, tmp_path)
    assert run.main(["tune", "--device", "cpu", "--small", "--out", str(tmp_path)]) == 2
    assert "give it other folders" in capsys.readouterr().out
    assert read_json(tmp_path / "gpu-tune.json") == real


def test_what_another_gpu_measured_is_set_aside(tmp_path: Path) -> None:
    write_json("gpu-env.json", {"small": True, "device": CUDA}, tmp_path)
    assert "set-aside-0-gpu-env.json" in Results(session(tmp_path), "env").data["problems"][0]
    assert read_json(tmp_path / "set-aside-0-gpu-env.json")["device"] == CUDA


def test_a_damaged_report_is_set_aside_and_taken_from_out(parts: FakeParts) -> None:
    parts.call("env", "tune")
    parts.out_is_new = False
    good = (parts.out / "gpu-env.json").read_bytes()
    for name in ("gpu-env.json", plan.STATE):
        (parts.work / "reports" / name).write_bytes(b'{"cut o')
    parts.call("env", "tune")
    assert parts.begun == [], "what is in --out is as good"
    assert (parts.out / "gpu-env.json").read_bytes() == good
    assert (parts.work / "reports" / "gpu-env.json").read_bytes() == good
    assert [text.partition(" ")[0] for text in parts.problems()] == ["gpu-env.json", plan.STATE]


def test_what_is_damaged_everywhere_is_measured_again(parts: FakeParts) -> None:
    parts.call("env", "tune")
    (parts.work / "reports" / "gpu-env.json").write_bytes(b"")
    parts.call("env", "tune")
    assert [name for name, _ in parts.begun] == ["env"]


def test_a_damaged_report_that_was_carried_is_not_taken(parts: FakeParts, tmp_path: Path) -> None:
    (tmp_path / "carried").mkdir()
    (tmp_path / "carried" / "gpu-env.json").write_text("[")
    parts.call("env", "--carried", str(tmp_path / "carried"))
    assert [name for name, _ in parts.begun] == ["env"]
    assert "damaged" in parts.problems()[0]


def test_where_out_cannot_be_written_the_work_folder_has_it_all(
    parts: FakeParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_part = plan.run_subcommand

    def spoil_out(*arguments: Any) -> str:
        for name in ("gpu-engine.json", plan.STATE, plan.CACHE):
            (parts.out / name).unlink(missing_ok=True)
            (parts.out / name / "in the way").mkdir(parents=True)
        monkeypatch.setattr(plan, "run_subcommand", run_part)
        return run_part(*arguments)

    write_kernel(parts.work / "triton-cache", "AAA")
    monkeypatch.setattr(plan, "run_subcommand", spoil_out)
    parts.call()
    assert parts.state()["tune"]["ending"] == "ended"
    assert read_json(parts.work / "reports" / "gpu-engine.json")["small"] is False
    assert parts.problems() == [
        f"{name} cannot be written to {parts.out}: Is a directory"
        for name in (plan.STATE, plan.CACHE)
    ]
    assert not list(parts.out.glob(".*")), "nothing unfinished is left"
    parts.out_is_new = False
    parts.out = tmp_path / "file" / "out"
    parts.out.parent.write_text("")
    parts.call("env", "--commit", "new")
    assert any("file/out" in text for text in parts.problems())


def test_a_report_that_no_folder_takes_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="cannot be written to"):
        write_json("gpu-env.json", {}, tmp_path / "file" / "out")


def test_a_second_call_beside_the_first_is_refused(
    parts: FakeParts, capsys: pytest.CaptureFixture[str]
) -> None:
    parts.work.mkdir()
    with (parts.work / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert parts.call("env") == 2
    assert "another call has --work" in capsys.readouterr().err
    assert parts.call("env") == 1
    assert [name for name, _ in parts.begun] == ["env"]


PLANS = """
import sys
from benchmarks.gpu import bounded, plan
in_time = bounded.run_bounded
waits = "import sys, time; f = open(sys.argv[1], 'wb', 0); f.write(b'begun'); time.sleep(1000)"
def run(command, *others):
    return in_time([sys.executable, "-c", waits, sys.argv[1] + "/fifo"], *others)
bounded.run_bounded = run
folders = ["--out", sys.argv[1] + "/out", "--work", sys.argv[1] + "/work"]
sys.exit(plan.main(["env", "--device", "cpu", "--small", *folders]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_plan_that_is_killed_takes_what_it_measures_with_it(number: int, tmp_path: Path) -> None:
    """Its child holds the end of a pipe, which breaks when it ends."""
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    process = subprocess.Popen(
        [sys.executable, "-c", PLANS, str(tmp_path)], env=child_environment(), cwd=ROOT
    )
    assert poll.poll(60_000), "it has not begun"
    assert os.read(reader, 100) == b"begun"
    process.send_signal(number)
    assert process.wait(60) == (130 if number == signal.SIGTERM else -signal.SIGKILL)
    poll.modify(reader, 0)  # for its end alone
    assert poll.poll(60_000), "the child lives"
    os.close(reader)


def test_what_an_interrupt_cut_off_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        write_json("gpu-env.json", {"begun": "a", "missing": ["a"]}, tmp_path)
        raise KeyboardInterrupt

    monkeypatch.setattr(bounded, "run_bounded", interrupt)
    arguments = run.parse_arguments(["env", "--out", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        bounded.run_subcommand("env", 50.0, arguments, {}, {}, tmp_path / "log")
    assert read_json(tmp_path / "gpu-env.json") == {"begun": None, "missing": ["a"]}


def test_what_did_not_end_is_tried_once_more_before_it_is_an_error(tmp_path: Path) -> None:
    for _ in range(2):  # processes that were killed, perhaps from outside
        results = Results(session(tmp_path), "env", needs_s=0)
        results.expect(["a"])
        assert results.data["missing"] == ["a"]
        assert results.data["errors"] == {}
        results.begin("a")
        faulthandler.cancel_dump_traceback_later()
    results = Results(session(tmp_path), "env", needs_s=0)
    assert results.data["missing"] == []
    assert "crashed or hung" in results.data["errors"]["a"]


def lacking() -> None:
    raise LackingError("not carried: FlashAttention 3")


def test_what_a_later_call_may_bring_stays_missing(tmp_path: Path) -> None:
    def import_it() -> None:
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401

    for _ in range(2):
        results = Results(session(tmp_path), "env", needs_s=0)
        results.run({"a": lacking, "b": import_it, "c": lambda: 1})
        assert results.data["missing"] == ["a", "b"]
        assert results.data["skipped"]["a"] == "not carried: FlashAttention 3"
        assert "no_such_module" in results.data["skipped"]["b"]
        assert results.data["errors"] == {}
    results = Results(session(tmp_path), "env", needs_s=0)
    results.run({"a": lambda: 2, "b": lambda: 3})
    assert results.measurements == {"a": 2, "b": 3, "c": 1}
    assert results.data["missing"] == []
    assert results.data["skipped"] == {}


def test_a_part_that_lacks_something_is_tried_once_in_each_call(
    parts: FakeParts, tmp_path: Path
) -> None:
    carried = carry_peers(tmp_path / "carried", *PEERS, "fa3.so.xz/x")
    parts.reports = {"tests": {"missing": ["all tests"], "skipped": {"all tests": "no pytest"}}}
    assert parts.call("--carried", str(carried)) == 1
    assert [name for name, _ in parts.begun] == [part.name for part in plan.PARTS]
    assert parts.state()["tests"]["skipped"] == {"all tests": "no pytest"}
    parts.reports = {}
    assert parts.call() == 0
    assert [name for name, _ in parts.begun] == ["tests"]


def test_a_graph_that_could_not_be_recorded_ends_the_process_and_all_graphs(tmp_path: Path) -> None:
    def start() -> None:
        raise WorkerError("no graph of 8 decodes could be recorded, RuntimeError: ...")

    results = Results(session(tmp_path), "engine", needs_s=0)
    with pytest.raises(BrokenContextError):
        results.run({"matrix/tiny/start": start, "matrix/tiny/b1": lambda: 1})
    results = Results(session(tmp_path), "engine", needs_s=0)
    results.run({"matrix/tiny/start": start, "matrix/tiny/b1": lambda: 1})
    assert results.data["errors"].keys() == {"matrix/tiny/start"}
    assert results.measurements == {"matrix/tiny/b1": 1}
    assert graph_settings(session(tmp_path)) == {"enforce_eager": True}


def test_junk_in_a_carried_folder_costs_itself(parts: FakeParts, tmp_path: Path) -> None:
    carried = carry_peers(tmp_path / "carried", *PEERS)
    (carried / plan.CACHE).write_bytes(b"junk")
    (carried / "a-1-py3-none-any.whl").write_bytes(b"junk")
    parts.call("env", "--carried", str(carried))
    assert (parts.work / "carried" / PEERS[0]).exists()
    assert not (parts.work / "triton-cache").exists(), "the next folder may have a good one"
    cache, wheel = parts.problems()
    assert cache.startswith(f"carried: {plan.CACHE}: ReadError")
    assert wheel.startswith("carried: a-1-py3-none-any.whl: BadZipFile")


def test_half_of_a_library_is_none(parts: FakeParts, tmp_path: Path) -> None:
    (tmp_path / "carried").mkdir()
    packed = lzma.compress(os.urandom(1000))[:-100]
    (tmp_path / "carried" / "vllm-library.so.xz").write_bytes(packed)
    parts.call("env", "--carried", str(tmp_path / "carried"))
    assert "EOFError" in parts.problems()[0]
    assert not (parts.work / "carried" / PEERS[1]).exists()


@pytest.mark.parametrize(
    "kind", [{"small": True, "device": CUDA}, {"small": False, "device": {"name": "cpu"}}]
)
def test_a_rehearsal_is_not_in_the_table(kind: dict[str, Any], tmp_path: Path) -> None:
    step = {"step_ms": {"median": 1.0}, "share_of_limit": 0.3}
    found = {"measurements": {goal.measurement: step for goal in GOALS}, "errors": {}}
    write_json("gpu-engine.json", kind | found, tmp_path)
    assert goals_table(tmp_path).count(NOT_MEASURED) == len(GOALS)


def test_the_table_asks_for_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.main(["table", "--device", "cpu", "--out", str(tmp_path / "missing")])
    assert "not a folder" in capsys.readouterr().err


def test_real_graphs_are_tested_first_and_single_kernels_last() -> None:
    files = [Path(name) for name in ("test_a.py", "test_cuda_steps.py", "test_kernels.py")]
    ordered = sorted([*files, Path("test_z.py")], key=gpu_tests.place)
    assert [path.stem for path in ordered] == [
        "test_cuda_steps",
        "test_a",
        "test_z",
        "test_kernels",
    ]
    assert {path.name for path in files[1:]} <= {p.name for p in (ROOT / "tests/gpu").iterdir()}
