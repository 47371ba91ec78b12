"""The day's parts come in their order, in time, and are continued from call to call."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import engine_report, kernel_times, peer_report, plan
from benchmarks.gpu.bounded import ENDED
from benchmarks.gpu.goals import GOALS, README
from benchmarks.gpu.run import ROOT, SUBCOMMANDS
from benchmarks.gpu.session import Session
from tests.benchmarks_gpu.fake_parts import KILLED, PEERS, FakeParts, carry_peers, write_kernel

pytestmark = pytest.mark.campaign


def test_the_parts_are_in_the_order_of_what_they_tell_and_fit_the_day() -> None:
    names = [part.name for part in plan.PARTS]
    assert names == [
        "env", "tests", "speed", "checks", "ceilings", "attention", "matrix", "vllm", "nano-vllm",
        "products", "transformers", "tune",
    ]  # fmt: skip
    usable_s = plan.CALL_LIMIT_S - plan.OVERHEAD_S
    assert plan.CALL_LIMIT_S < 600
    assert sum(part.limit_s for part in plan.PARTS) <= 4 * usable_s
    assert 4 * plan.CALL_LIMIT_S <= 40 * 60
    assert all(part.limit_s <= usable_s for part in plan.PARTS)


def names_of(report: str, folder: Path) -> list[str]:
    """All measurements of a report, on a machine with a GPU."""
    session = Session(out=folder, device=torch.device("cuda"))
    if report == "kernels":
        return list(kernel_times.all_cases(session))
    if report == "engine":
        return list(engine_report.measurements(engine_report.Engines(session, folder)))
    return list(peer_report.pairs(session))


@pytest.mark.parametrize("report", ["kernels", "engine", "peers"])
def test_every_measurement_is_in_one_part(report: str, tmp_path: Path) -> None:
    parts = [part for part in plan.PARTS if part.subcommand == report]
    for name in names_of(report, tmp_path):
        assert sum(name.startswith(part.only) for part in parts) == 1, name


def test_every_goal_is_measured(tmp_path: Path) -> None:
    for goal in GOALS:
        assert goal.measurement in names_of(goal.report, tmp_path), goal.measure


def test_the_engine_is_timed_with_few_and_many_rows(tmp_path: Path) -> None:
    names = names_of("engine", tmp_path)
    for rows in (1, 8, 32, 48, 64, 128, 256):
        assert f"speed/qwen3-0.6b/decode/b{rows}/ctx1024" in names
    for variant in ("weights int8", "weights fp8", "kv int8", "kv fp8"):
        assert f"matrix/qwen3-8b/{variant}/decode/b32/ctx1024" in names


def test_eight_files_come_back_and_the_readme_names_the_parts() -> None:
    reports = {report for _, report in SUBCOMMANDS.values()} - {"table"}
    assert len({*reports, plan.STATE, plan.CACHE}) == 8
    readme = README.read_text()
    calls = [line for line in readme.splitlines() if line.startswith("    export NANOCORE_COMMIT")]
    named = [name for line in calls for name in line.partition("# ")[2].split(", ")]
    assert list(dict.fromkeys(named)) == [part.name for part in plan.PARTS]


def test_a_day_goes_on_from_call_to_call(parts: FakeParts, tmp_path: Path) -> None:
    """No call takes longer than it may, and none repeats what another has done."""
    parts.takes_s = {part.name: part.limit_s for part in plan.PARTS}
    carried = carry_peers(tmp_path / "carried", *PEERS)
    (parts.work / "carried").mkdir(parents=True)
    (parts.work / "carried" / "fa3.so.xz").write_text("")
    begun = []
    for number in range(4):
        start_s = parts.now_s
        code = parts.call("--carried", str(carried))
        assert parts.now_s - start_s <= plan.CALL_LIMIT_S - plan.OVERHEAD_S
        assert code == (0 if number == 3 else 1)
        begun += parts.begun
    assert [name for i, (name, _) in enumerate(begun) if not i or begun[i - 1][0] != name] == [
        part.name for part in plan.PARTS
    ]
    assert parts.now_s == sum(part.limit_s for part in plan.PARTS)
    assert all(state["missing"] == [] for state in parts.state().values())
    assert len(list(parts.out.iterdir())) <= 8


def test_a_part_that_is_killed_names_what_is_missing_and_the_others_run(parts: FakeParts) -> None:
    """It is continued when all others have had their time, as long as the call lasts."""
    parts.takes_s = {"speed": 1000.0}
    parts.call(limit_s=300.0)
    state = parts.state()["speed"]
    assert state["ending"] == KILLED
    assert state["missing"] == ["speed/rest"]
    assert state["output"] == "output of speed"
    assert parts.state()["tune"]["ending"] == ENDED
    begun = [name for name, _ in parts.begun]
    assert begun == [name for name in begun[:-1] if name not in ("vllm", "nano-vllm")] + ["speed"]
    parts.takes_s = {}
    parts.call()
    assert [name for name, _ in parts.begun] == ["speed"]
    assert parts.state()["speed"]["missing"] == []


def test_what_the_calls_end_cuts_off_is_said_and_continued(parts: FakeParts) -> None:
    parts.takes_s = {"checks": 100.0}
    assert parts.call(limit_s=100.0) == 1
    assert parts.state()["checks"]["missing"] == ["check/rest"]
    assert parts.state()["ceilings"]["ending"] == "not begun"
    assert parts.state()["ceilings"]["missing"] == ["all of it"]
    parts.call()
    assert parts.begun[0] == ("checks", 170.0 - 50.0)
    assert parts.state()["checks"] | {"missing": []} == parts.state()["checks"]
    assert "env" not in dict(parts.begun)


def test_a_part_that_breaks_is_told_of_and_tried_again(parts: FakeParts) -> None:
    parts.endings = {"speed": "ended with exit code 1"}
    parts.call()
    assert parts.state()["speed"]["ending"] == "ended with exit code 1"
    assert parts.state()["speed"]["output"] == "output of speed"
    assert parts.state()["tune"]["ending"] == ENDED
    parts.endings = {}
    parts.call()
    assert [name for name, _ in parts.begun] == ["speed"]


def test_what_failed_is_measured_again_with_another_commit_only(
    parts: FakeParts, tmp_path: Path
) -> None:
    parts.reports = {"attention": {"errors": {"attention/decode": "wrong"}}}
    carried = carry_peers(tmp_path / "carried", *PEERS, "fa3.so.xz/x")
    assert parts.call("--commit", "old", "--carried", str(carried)) == 1
    assert parts.state()["attention"]["failed"] == ["attention/decode"]
    parts.call("--commit", "old")
    assert parts.begun == []
    parts.reports = {}
    assert parts.call("--commit", "new") == 0
    assert [name for name, _ in parts.begun] == ["attention"]
    assert parts.state()["attention"]["failed"] == []


def test_peers_wait_until_they_are_carried(parts: FakeParts, tmp_path: Path) -> None:
    parts.call("--carried", str(carry_peers(tmp_path / "first", PEERS[0])))
    assert parts.state()["vllm"]["ending"].endswith("not carried: " + PEERS[1])
    parts.call("--carried", str(carry_peers(tmp_path / "second", *PEERS[1:])))
    assert [name for name, _ in parts.begun] == ["vllm"]
    assert "fa3.so.xz" in parts.state()["nano-vllm"]["ending"]


def test_what_cannot_be_unpacked_is_told_and_does_not_stop_the_day(
    parts: FakeParts, tmp_path: Path
) -> None:
    carried = tmp_path / "carried"
    carried.mkdir()
    (carried / "vllm-library.so.xz").write_bytes(b"cut off on its way")
    parts.call("--carried", str(carried))
    (problem,) = json.loads((parts.out / plan.STATE).read_text())["problems"]
    assert problem.startswith("carried: vllm-library.so.xz: LZMAError")
    assert parts.state()["speed"]["ending"] == ENDED


def test_parts_can_be_chosen(parts: FakeParts, capsys: pytest.CaptureFixture[str]) -> None:
    parts.call("tune", "env")
    assert [name for name, _ in parts.begun] == ["env", "tune"]
    with pytest.raises(SystemExit):
        parts.call("tunes")
    assert "choose from env, tests" in capsys.readouterr().err


def test_tritons_cache_travels_there_and_back(parts: FakeParts, tmp_path: Path) -> None:
    cache = parts.work / "triton-cache"
    parts.call()
    assert parts.environment["TRITON_CACHE_DIR"] == str(cache)
    assert not (parts.out / plan.CACHE).exists(), "nothing was compiled"
    write_kernel(cache, "AAA")
    parts.call()
    with tarfile.open(parts.out / plan.CACHE) as archive:
        assert {m.name for m in archive} == {"AAA/kernel.json", "AAA/kernel.cubin"}
    carried = tmp_path / "carried"
    parts.out.rename(carried)
    parts.work.rename(tmp_path / "gone")
    parts.call("--carried", str(carried))
    assert (cache / "AAA" / "kernel.cubin").exists()
    assert parts.begun == [], "the reports came back, too"


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from benchmarks.gpu.empty_kernel import _add_one_kernel

source = ASTSource(_add_one_kernel, {"x": "*fp32", "SIZE": "constexpr"}, {"SIZE": 64})
print(len(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]))
"""


@pytest.mark.campaign
def test_triton_finds_its_kernels_in_a_cache_that_has_travelled(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}

    def compile_one() -> str:
        command = [sys.executable, "-c", COMPILE]
        return subprocess.run(
            command, env=environment, cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout

    size = compile_one()
    packed = plan.pack(cache)
    assert packed is not None
    cache.rename(tmp_path / "gone")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(cache, filter="data")
    assert compile_one() == size
    assert list(cache.rglob("*.ttir")) == [], "it was compiled again"


def test_a_cache_that_is_too_large_does_not_travel(tmp_path: Path) -> None:
    write_kernel(tmp_path, "AAA")
    assert plan.pack(tmp_path, limit_bytes=10) is None
    assert plan.pack(tmp_path) is not None


def test_a_folder_that_was_not_carried_is_refused(parts: FakeParts, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        parts.call("--carried", str(tmp_path / "nothing"))


def test_a_call_that_is_killed_leaves_what_it_was_at(
    parts: FakeParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "run_subcommand", die)
    assert parts.call() == 130
    states = [state["ending"] for state in parts.state().values()]
    assert states == ["running", *["not begun"] * (len(states) - 1)]
