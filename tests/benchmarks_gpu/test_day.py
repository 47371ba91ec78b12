"""The day's parts come in their order, in time, and are continued from call to call."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import day
from benchmarks.gpu.part import PARTS
from benchmarks.gpu.results import LOST_CODE, Records, file_name

README = Path(day.__file__).with_name("README.md")
LONGEST_S = max(day.CALL_LIMITS_S.values())


class FakeParts:
    """In place of processes: each takes as long as is said, and writes records."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder, self.now_s, self.begun = folder, 0.0, list[tuple[str, float]]()
        self.takes_s: dict[str, float] = {}
        self.codes: dict[str, list[int]] = {}
        self.records: dict[str, dict[str, Any]] = {}
        self.measurements: dict[str, tuple[str, ...]] = {}
        self.actions: dict[str, Callable[[], Any]] = {}
        self.commit, self.pdl = "old", dict[str, list[str]]()
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr(day, "time", clock)
        monkeypatch.setattr(day, "end_family", lambda _: None)
        monkeypatch.setattr(day, "TRITON_CACHE", folder / "nanocore-triton")
        monkeypatch.delenv("NANOCORE_PDL", raising=False)
        monkeypatch.setattr(day, "run_bounded", self._run)
        monkeypatch.setattr(day, "describe_commit", lambda: {"commit": self.commit})

    def call(self, *flags: str, limit_s: float = LONGEST_S) -> int:
        """A call with an --out of its own, as on the machine; returns its exit code."""
        self.begun.clear()
        folders = ["--out", str(self.folder / "out"), "--work", str(self.folder / "work")]
        return day.main([*flags, *folders, "--limit-s", str(limit_s)])

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.begun]

    def state(self) -> Records:
        return Records("gpu.jsonl", (self.folder / "work",))

    def _run(
        self, command: list[str], limit_s: float, changes: dict[str, str], log: Path, fds: Any
    ) -> int:
        assert command[-2:] == ["--summary-fd", str(fds[0])]
        name = command[3]
        self.pdl.setdefault(name, []).append(changes["NANOCORE_PDL"])
        self.begun.append((name, limit_s - day.GRACE_S))
        log.write_text(f"output of {name}")
        file = file_name(command[command.index("--device") + 1], "--small" in command)
        records = Records(file, (self.folder / "work", self.folder / "out"))
        records.add(head={"commit": self.commit})
        prefix = name
        if name == "smoke":
            prefix = "smoke/plain" if changes["NANOCORE_PDL"] == "0" else "smoke/pdl"
        first = f"{prefix}/x"
        done = {*records.figures, *records.errors}
        names = [*self.measurements.get(name, (first, f"{prefix}/y"))]
        records.add(planned={name: [n for n in names if n not in done]})
        self.actions.get(name, lambda: None)()
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


ARCHIVES = ("base", "nano-vllm", "vllm-first", "vllm-second")
CALLS = {
    name: [part.name for part in PARTS if part.call == number]
    for number, name in enumerate(day.CALL_LIMITS_S, 1)
}


def test_two_calls_fit_the_time_that_a_machine_is_lent_for() -> None:
    """Each with a start of its own, for the machine is given back between them."""
    around_s = day.START_S + day.COPY_S + day.CLOSE_S
    assert sum(day.CALL_LIMITS_S.values()) + 2 * around_s <= day.DEVICE_S == 900
    for number, limit_s in enumerate(day.CALL_LIMITS_S.values(), 1):
        assert sum(p.limit_s for p in PARTS if p.call == number) <= limit_s - day.GRACE_S
    assert all(part.limit_s <= LONGEST_S - day.GRACE_S for part in PARTS)
    assert {name for part in PARTS for name in part.needs} == {*ARCHIVES}


def test_the_readme_names_the_parts_in_their_order() -> None:
    named = re.findall(r"^\| (first|second|by name) \| (.*?) \|", README.read_text(), re.M)
    found = [(call, name) for call, cell in named for name in re.findall(r"`(.*?)`", cell)]
    calls = ["by name", *day.CALL_LIMITS_S]
    assert found == [(calls[part.call], part.name) for part in PARTS]


def test_a_day_goes_on_from_call_to_call(parts: FakeParts, tmp_path: Path) -> None:
    """No call takes longer than it may, and none repeats what another has done."""
    parts.takes_s = {part.name: part.limit_s for part in PARTS}
    carried = carry(tmp_path / "carried", *ARCHIVES)
    for call, names in CALLS.items():
        start_s = parts.now_s
        assert parts.call(call, "--carried", carried, limit_s=day.CALL_LIMITS_S[call]) == 0
        assert parts.now_s - start_s <= day.CALL_LIMITS_S[call]
        assert parts.names == names
    assert parts.state().missing == []
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "gpu.json", "gpu.jsonl", "gpu.log"
    }  # fmt: skip
    parts.call("first", "second")
    assert parts.names == []


def test_where_smoke_fails_the_rest_of_the_day_has_no_dependent_launches(parts: FakeParts) -> None:
    parts.codes = {"smoke": [-signal.SIGKILL]}
    parts.call("env", "smoke", "speed")
    assert parts.names == ["env", "smoke", "smoke", "smoke", "speed"]
    assert parts.pdl == {"env": ["1"], "smoke": ["1", "1", "0"], "speed": ["0"]}
    found = parts.state()
    assert found.errors.keys() == {"smoke/pdl/x"}
    assert {"smoke/pdl/y", "smoke/plain/x", "smoke/plain/y"} <= found.figures.keys()
    parts.call("check")
    assert parts.pdl["check"] == ["0"], "a later call knows of it"
    parts.commit = "new"
    parts.call("smoke", "bench")
    assert parts.pdl["bench"] == ["1"], "another commit may have repaired it"


def test_where_no_engine_starts_the_parts_that_need_one_wait(parts: FakeParts) -> None:
    parts.measurements = {"smoke": ("smoke/pdl/engine/eager",), "speed": ("speed/m/start",)}
    parts.records = {"smoke/pdl/engine/eager": {"error": "x"}, "speed/m/start": {"error": "x"}}
    parts.call("smoke", "bench", "attention")
    assert parts.names == ["smoke", "smoke", "attention"]
    assert parts.state().endings["bench"] == day.NO_ENGINE
    parts.commit, parts.records = "new", {}
    parts.call("smoke", "bench", "attention")
    assert parts.names == ["smoke", "bench"]


def test_compiled_kernels_come_and_go_with_the_day(parts: FakeParts, tmp_path: Path) -> None:
    cache, out = tmp_path / "nanocore-triton", tmp_path / "out"

    def compile_kernel() -> None:
        (cache / "key").mkdir(parents=True)
        (cache / "key" / "kernel.cubin").write_bytes(b"compiled")

    parts.actions = {"env": compile_kernel}
    parts.call("env")
    out.rename(tmp_path / "carried")
    cache.rename(tmp_path / "elsewhere")
    (tmp_path / "work").rename(tmp_path / "gone")
    parts.actions = {}
    parts.call("speed", "--carried", str(tmp_path / "carried"))
    assert (cache / "key" / "kernel.cubin").read_bytes() == b"compiled"
    assert not (out / "triton.tar.xz").exists(), "nothing was compiled"


def test_what_a_limit_cuts_off_comes_last_and_with_the_next_call(parts: FakeParts) -> None:
    parts.takes_s = {"speed": 1000.0}
    assert parts.call("speed", "check", "env", limit_s=200.0) == 1
    assert parts.names == ["env", "speed", "check", "speed"]
    assert parts.state().endings["speed"] == day.CUT_OFF
    assert parts.state().missing == ["speed/x", "speed/y"]
    parts.takes_s = {}
    parts.call("speed", "attention", "env")
    assert parts.names == ["attention", "speed"]
    assert parts.state().missing == []


def test_a_part_is_not_begun_without_time_for_it(parts: FakeParts) -> None:
    assert parts.call("first", limit_s=day.GRACE_S + day.LEAST_S + 3) == 1
    assert parts.names == ["env"]


def test_a_process_that_dies_costs_what_it_was_at(parts: FakeParts) -> None:
    parts.codes = {"speed": [-signal.SIGSEGV], "check": [LOST_CODE]}
    assert parts.call("speed", "check") == 1
    assert parts.names == ["speed", "speed", "check", "check"]
    found = parts.state()
    assert found.errors["speed/x"].endswith("crash or hang: exit code -11")
    assert "output of speed" in found.errors["speed/x"]
    assert found.errors["check/x"] == "the device is lost"
    assert {*found.figures} == {"speed/y", "check/y"}


def test_a_process_that_begins_nothing_is_not_started_again_and_again(
    parts: FakeParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = iter([1])

    def run(_command: list[str], _limit_s: float, _changes: Any, log: Path, _fds: Any) -> int:
        log.write_text("torch sees no CUDA device\n")
        return next(codes)

    monkeypatch.setattr(day, "run_bounded", run)
    assert parts.call("env") == 1
    ending = parts.state().endings["env"]
    assert ending == "exit code 1: torch sees no CUDA device (see gpu.log)"


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
    [
        (["sped"], "sped: choose from first, second, env, smoke"),
        (["--limit-s", "nan"], "--limit-s nan: give seconds, above 0"),
        (["--carried", "/nowhere"], "not a folder"),
    ],
)
def test_what_is_not_there_is_refused(
    parts: FakeParts, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        day.main([*flags, "--out", str(parts.folder / "out")])
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


@pytest.mark.campaign
def test_a_call_that_is_terminated_ends_what_it_started(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.day", "env", "--device", "cpu", "--small"]
    folders = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    with subprocess.Popen(
        [*command, *folders], cwd=README.parents[2], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline().startswith("env: ")
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not day._family(f"NANOCORE_GPU_DAY={tmp_path / 'work'}".encode())
