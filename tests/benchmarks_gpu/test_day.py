"""The day's parts come in their order, in time, and are continued from call to call."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import day
from benchmarks.gpu.part import PARTS
from benchmarks.gpu.results import LOST_CODE, Records, file_name

README = Path(day.__file__).with_name("README.md")
USABLE_S = day.CALL_LIMIT_S - day.GRACE_S


class FakeParts:
    """In place of processes: each takes as long as is said, and writes records."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder, self.now_s, self.begun = folder, 0.0, list[tuple[str, float]]()
        self.takes_s: dict[str, float] = {}
        self.codes: dict[str, list[int]] = {}
        self.records: dict[str, dict[str, Any]] = {}
        self.commit = "old"
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr(day, "time", clock)
        monkeypatch.setattr(day, "end_family", lambda _: None)
        monkeypatch.setattr(day, "run_bounded", self._run)
        monkeypatch.setattr(day, "describe_commit", lambda: {"commit": self.commit})

    def call(self, *flags: str, limit_s: float = day.CALL_LIMIT_S) -> int:
        """A call with an --out of its own, as on the machine; returns its exit code."""
        self.begun.clear()
        folders = ["--out", str(self.folder / "out"), "--work", str(self.folder / "work")]
        return day.main([*flags, *folders, "--limit-s", str(limit_s)])

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.begun]

    def state(self) -> Records:
        return Records("gpu.jsonl", (self.folder / "work",))

    def _run(self, command: list[str], limit_s: float, _changes: Any, log: Path) -> int:
        name = command[3]
        self.begun.append((name, limit_s - day.GRACE_S))
        log.write_text(f"output of {name}")
        file = file_name(command[command.index("--device") + 1], "--small" in command)
        records = Records(file, (self.folder / "work", self.folder / "out"))
        records.add(head={"commit": self.commit})
        first = f"{name}/x"
        done = {*records.figures, *records.errors}
        records.add(planned={name: [n for n in (first, f"{name}/y") if n not in done]})
        codes = self.codes.get(name, [])
        if codes:
            records.add(begun=first)
            if codes[0] == LOST_CODE:
                records.add(name=first, error="the device is lost")
            return codes.pop(0)
        takes_s = self.takes_s.get(name, 5.0)
        self.takes_s[name] = max(0.0, takes_s - limit_s)
        self.now_s += min(takes_s, limit_s)
        for measurement in () if takes_s > limit_s else records.missing.copy():
            if measurement.startswith(f"{name}/"):
                what = self.records.get(measurement, {"figures": {"us": 1}})
                records.add(name=measurement, **what)
        return 0


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeParts:
    return FakeParts(monkeypatch, tmp_path)


def carry(folder: Path, *names: str) -> str:
    folder.mkdir(exist_ok=True)
    for name in names:
        with tarfile.open(folder / f"{name}.tar.xz", "w:xz"):
            pass
    return str(folder)


ARCHIVES = ("base", "nano-vllm")
EVERY_PART = [part.name for part in PARTS]


def test_three_calls_hold_all_parts() -> None:
    """A machine that is lent for 30 minutes, of which each call may take ten."""
    assert day.CALL_LIMIT_S < 600
    assert 3 * day.CALL_LIMIT_S < 1800
    assert sum(part.limit_s for part in PARTS) <= 3 * USABLE_S
    assert all(part.limit_s <= USABLE_S for part in PARTS)
    assert {name for part in PARTS for name in part.needs} == {*ARCHIVES}


def test_the_readme_names_the_parts_in_their_order() -> None:
    calls = [line for line in README.read_text().splitlines() if "benchmarks.gpu.day" in line]
    named = [name for line in calls for name in line.partition("# ")[2].split(", ") if name]
    assert named == EVERY_PART


def test_a_day_goes_on_from_call_to_call(parts: FakeParts, tmp_path: Path) -> None:
    """No call takes longer than it may, and none repeats what another has done."""
    parts.takes_s = {part.name: part.limit_s for part in PARTS}
    carried, begun = carry(tmp_path / "carried", *ARCHIVES), []
    for _ in range(4):
        start_s = parts.now_s
        code = parts.call("--carried", carried)
        assert parts.now_s - start_s <= day.CALL_LIMIT_S
        begun += parts.names
        if code == 0:
            break
    assert code == 0
    assert list(dict.fromkeys(begun)) == EVERY_PART
    assert parts.state().missing == []
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "gpu.json", "gpu.jsonl", "gpu.log"
    }  # fmt: skip
    parts.call()
    assert parts.names == []


def test_what_a_limit_cuts_off_comes_last_and_with_the_next_call(parts: FakeParts) -> None:
    parts.takes_s = {"speed": 1000.0}
    assert parts.call("speed", "check", "env", limit_s=300.0) == 1
    assert parts.names == ["env", "speed", "check", "speed"]
    assert parts.state().endings["speed"] == day.CUT_OFF
    assert parts.state().missing == ["speed/x", "speed/y"]
    parts.takes_s = {}
    parts.call("speed", "attention", "env")
    assert parts.names == ["attention", "speed"]
    assert parts.state().missing == []


def test_a_part_is_not_begun_without_time_for_it(parts: FakeParts) -> None:
    assert parts.call(limit_s=day.GRACE_S + day.LEAST_S + 3) == 1
    assert parts.names == ["env"]


def test_a_process_that_dies_costs_what_it_was_at(parts: FakeParts) -> None:
    parts.codes = {"speed": [-signal.SIGSEGV], "check": [LOST_CODE]}
    assert parts.call("speed", "check") == 1
    assert parts.names == ["speed", "speed", "check", "check"]
    found = parts.state()
    assert found.errors["speed/x"].startswith("crash or hang: exit code -11")
    assert "output of speed" in found.errors["speed/x"]
    assert found.errors["check/x"] == "the device is lost"
    assert {*found.figures} == {"speed/y", "check/y"}


def test_a_process_that_begins_nothing_is_not_started_again_and_again(
    parts: FakeParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = iter([1])
    monkeypatch.setattr(day, "run_bounded", lambda *_: next(codes))
    assert parts.call("env") == 1
    assert parts.state().endings["env"] == "exit code 1: see gpu.log"


def test_what_failed_is_tried_again_with_another_commit_only(parts: FakeParts) -> None:
    parts.records = {"env/x": {"error": "wrong"}}
    assert parts.call("env") == 1
    parts.call("env")
    assert parts.names == []
    parts.commit, parts.records = "new", {}
    parts.call("env")
    assert parts.names == ["env"]
    found = parts.state()
    assert found.errors == {}
    assert {name: figures["commit"] for name, figures in found.figures.items()} == {
        "env/y": "old", "env/x": "new"
    }  # fmt: skip


def test_what_was_skipped_is_tried_again_by_each_call(parts: FakeParts) -> None:
    parts.records = {"tests/x": {"skipped": "no pytest"}}
    parts.call("tests")
    assert parts.state().skipped == {"tests/x": "no pytest"}
    parts.records = {}
    parts.call("tests")
    assert parts.names == ["tests"]
    assert parts.state().skipped == {}


def test_peers_wait_until_they_are_carried(parts: FakeParts, tmp_path: Path) -> None:
    parts.call("nano-vllm", "--carried", carry(tmp_path / "first", "base"))
    assert parts.names == []
    assert parts.state().endings["nano-vllm"] == "waits: not carried: nano-vllm"
    parts.call("nano-vllm", "--carried", carry(tmp_path / "second", "nano-vllm"))
    assert parts.names == ["nano-vllm"]


def test_a_damaged_archive_is_told_and_does_not_stop_the_day(
    parts: FakeParts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "carried"
    folder.mkdir()
    (folder / "base.tar.xz").write_bytes(b"cut off on its way")
    parts.call("env", "nano-vllm", "--carried", str(folder))
    assert "base.tar.xz is damaged: ReadError" in capsys.readouterr().out
    assert parts.names == ["env"]
    assert "base" in parts.state().endings["nano-vllm"]


def test_on_a_new_machine_the_records_that_were_carried_are_continued(
    parts: FakeParts, tmp_path: Path
) -> None:
    parts.call("env")
    (tmp_path / "work").rename(tmp_path / "gone")
    (tmp_path / "out").rename(tmp_path / "carried")
    parts.call("env", "speed", "--carried", str(tmp_path / "carried"))
    assert parts.names == ["speed"]
    assert {name.partition("/")[0] for name in parts.state().figures} == {"env", "speed"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["sped"], "sped: choose from env, tests"), (["--carried", "/nowhere"], "not a folder")],
)
def test_what_is_not_there_is_refused(
    parts: FakeParts, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parts.call(*flags)
    assert message in capsys.readouterr().err


def test_a_rehearsal_leaves_what_a_gpu_measured_alone(parts: FakeParts, tmp_path: Path) -> None:
    parts.call("env")
    measured = [tmp_path / "work" / "gpu.jsonl", *(tmp_path / "out").glob("gpu.json*")]
    assert len(measured) == 3
    before = [path.read_bytes() for path in measured]
    parts.call("env", "--device", "cpu", "--small")
    parts.call("env", "--small")
    assert parts.names == [], "the second rehearsal continues the first"
    assert [path.read_bytes() for path in measured] == before
    assert (tmp_path / "out" / "rehearsal.json").exists()


WAITS = """
import subprocess, sys, time
with open(sys.argv[1], "wb", 0) as pipe:
    child = [sys.executable, "-c", "import time; time.sleep(1000)"]
    subprocess.Popen(child, stdout=pipe, start_new_session=True)
    pipe.write(b"begun")
time.sleep(1000)
"""


def test_what_a_killed_call_left_behind_is_ended_by_the_next(tmp_path: Path) -> None:
    """A process and its child, which is in a session of its own and holds the end of a pipe."""
    work, fifo = tmp_path / "work", tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    environment = os.environ | {"NANOCORE_GPU_DAY": str(work)}
    left = subprocess.Popen([sys.executable, "-c", WAITS, str(fifo)], env=environment)
    assert poll.poll(60_000), "it has not begun"
    assert os.read(reader, 100) == b"begun"
    folders = ["--out", str(tmp_path / "out"), "--work", str(work)]
    assert day.main(["env", *folders, "--limit-s", "1"]) == 1
    assert left.wait(60) == -signal.SIGKILL
    poll.modify(reader, 0)  # for its end alone
    assert poll.poll(60_000), "the child lives"
    os.close(reader)


def test_a_process_that_hangs_is_ended(tmp_path: Path) -> None:
    environment = {"NANOCORE_GPU_DAY": str(tmp_path)}
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    assert day.run_bounded(command, 0.2, environment, tmp_path / "log") is None
    assert day.run_bounded([sys.executable, "-c", "exit(3)"], 100, environment, tmp_path / "l") == 3
