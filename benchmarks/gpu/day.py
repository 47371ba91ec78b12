"""The whole day on a GPU: parts in a fixed order, in two calls that fit fifteen minutes.

    python3 -m benchmarks.gpu.day first --out "$OUT" --carried carried
    python3 -m benchmarks.gpu.day second --out "$OUT" --carried carried

Each part runs in a process of its own, whose time is limited: one that crashes, hangs or breaks the
CUDA context costs what it was at, and another one goes on behind that. What a limit cuts off is
continued when all parts have had their time, or by the next call; what failed is tried again with
another commit. Each figure is printed, and on disk, as soon as it exists. The records stay in
--work, on the machine's disk, and are in --out as they are written; on a new machine they are taken
from a folder that is carried. So is the cache of Triton, which goes back to --out.

If `smoke` fails, programmatic dependent launch (PDL) is turned off for all parts behind it. If no
engine starts, the parts that need one are left out.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from benchmarks.gpu.part import PARTS, Part, add_flags
from benchmarks.gpu.results import (
    LOST_CODE,
    PDL_VARIABLE,
    TRITON_CACHE,
    Records,
    file_name,
    summary,
)
from benchmarks.report import describe_commit, table, write_report

ROOT: Final = Path(__file__).resolve().parents[2]
DEVICE_S: Final = 900.0
"""Seconds that a machine is lent for in all; its starts, copies and ends count."""
START_S: Final = 90.0
COPY_S: Final = 10.0
CLOSE_S: Final = 10.0
CALL_LIMITS_S: Final = {"first": 330.0, "second": 340.0}
"""Of the commands of the two calls: between them the machine is given back, and errors are read."""
GRACE_S: Final = 20.0
"""What a part may take beyond its limit, to finish what it is at."""
LEAST_S: Final = 15.0
"""Less is not worth a start."""
ENDED: Final = "ended"
CUT_OFF: Final = "cut off by its limit"
NO_ENGINE: Final = "waits: no engine has started"
TRITON: Final = "triton"
"""Archive of the cache of compiled kernels."""
_MARK: Final = "NANOCORE_GPU_DAY"
"""All that a call starts has this in its environment, so that all of it can be ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """One call; 0 if nothing of what it was to measure failed or is missing, 1 if not."""
    start_s = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [part.name for part in PARTS]
    calls = {name: number for number, name in enumerate(CALL_LIMITS_S, 1)}
    choice = f"{', '.join(calls)} (call of the day), or {', '.join(names)}"
    parser.add_argument("parts", nargs="*", metavar="PART", default=["first"], help=choice)
    parser.add_argument("--out", type=Path, required=True, help="folder of the report and log")
    parser.add_argument("--carried", type=Path, nargs="*", default=[], help="what carry.py made, "
                        "or the --out of an earlier day")  # fmt: skip
    work = Path(tempfile.gettempdir()) / f"nanocore-gpu-{os.getuid()}"
    parser.add_argument("--work", type=Path, default=work, help="stays from call to call")
    parser.add_argument("--limit-s", type=float, help="of this call")
    add_flags(parser)
    arguments = parser.parse_args(argv)
    if unknown := {*arguments.parts} - {*names, *calls}:
        parser.error(f"{', '.join(unknown)}: choose from {', '.join((*calls, *names))}")
    wanted = {calls.get(name, name) for name in arguments.parts}
    limit_s = max(CALL_LIMITS_S.values()) if arguments.limit_s is None else arguments.limit_s
    if not 0 < limit_s < math.inf:
        parser.error(f"--limit-s {limit_s:g}: give seconds, above 0")
    for folder in arguments.carried:
        if not folder.is_dir():
            parser.error(f"--carried {folder}: not a folder")
    day = Day(arguments, start_s + limit_s)
    parts = [part for part in PARTS if part.name in wanted or part.call in wanted]
    try:
        day.run(parts)
    finally:  # of a signal that comes as a process is started, too
        end_family(day.mark)
    day.keep_triton_cache()
    return day.summarize(parts)


class Day:
    """The records, and what is to be done."""

    def __init__(self, arguments: argparse.Namespace, end_s: float) -> None:
        self._arguments, self._end_s = arguments, end_s
        self._work, self._out = arguments.work.absolute(), arguments.out.absolute()
        self._carried = self._work / "carried"
        for folder in (self._carried, self._out):
            folder.mkdir(parents=True, exist_ok=True)
        self.mark = f"{_MARK}={self._work}"
        end_family(self.mark)  # of a call that was killed
        name = file_name(arguments.device, arguments.small)
        for folder in (*arguments.carried, self._out):
            if (folder / name).exists() and not (self._work / name).exists():
                shutil.copy(folder / name, self._work)
        if (self._work / name).exists():
            shutil.copy(self._work / name, self._out)
        for folder in arguments.carried:
            unpack(folder, self._carried)
        self._cached = cached_kernels()
        self._records = Records(name, (self._work, self._out))
        self._pdl = os.environ.get(PDL_VARIABLE, "1")
        is_same_code = self._records.head.get("commit") == describe_commit()["commit"]
        if is_same_code and self._pdl_failed():  # in a call before
            self._pdl = "0"
        self._report = Path(name).with_suffix(".json")
        self._reopen()

    def _reopen(self) -> None:
        """What was skipped may be possible now, and what failed may be repaired by a commit."""
        records, again = self._records, [*self._records.skipped]
        if records.head.get("commit") != describe_commit()["commit"]:
            again += records.errors
        parts = {name.partition("/")[0] for name in again}
        records.add(endings=dict.fromkeys(sorted(parts), "to be tried again"))

    def run(self, parts: Sequence[Part]) -> None:
        """Those that have not ended, in their order; those that a limit cut off, last."""
        endings = self._records.endings
        todo = [part for part in parts if endings.get(part.name) != ENDED]
        todo.sort(key=lambda part: endings.get(part.name) == CUT_OFF)
        while todo:
            part = todo.pop(0)
            left_s = self._end_s - GRACE_S - time.monotonic()
            lacking = [name for name in part.needs if not (self._carried / f".{name}").exists()]
            if lacking:
                ending = f"waits: not carried: {', '.join(lacking)}"
            elif part.needs_engine and self._no_engine_starts():
                ending = NO_ENGINE
            elif left_s < LEAST_S:
                return
            else:
                limit_s, start_s = min(part.limit_s, left_s), time.monotonic()
                print(f"{part.name}: {limit_s:.0f} s at most, {left_s:.0f} left", flush=True)
                ending = self._run_processes(part, start_s + limit_s)
                took_s = time.monotonic() - start_s
                print(f"{part.name}: {ending} after {took_s:.0f} s", flush=True)
            if part.name == "smoke" and self._pdl_failed():
                print("dependent launches are off from now on: smoke failed with them", flush=True)
                self._pdl = "0"
                todo = [part, *todo] if ending != CUT_OFF else todo
            todo += [part] if ending == CUT_OFF else []
            self._records.add(endings={part.name: ending})
            write_report(self._out / self._report, self._records.report())

    def _pdl_failed(self) -> bool:
        errors = self._records.errors
        return self._pdl != "0" and any(name.startswith("smoke/pdl/") for name in errors)

    def _no_engine_starts(self) -> bool:
        """Whether all engines failed that a smoke test or `speed` started."""
        is_start = re.compile(r"smoke/\w+/engine|speed/.*/start")
        started, failed = self._records.figures, self._records.errors
        return not any(map(is_start.match, started)) and any(map(is_start.match, failed))

    def _run_processes(self, part: Part, end_s: float) -> str:
        """One after the other, each behind what broke the one before; says how it ended."""
        log = self._out / "gpu.log"
        while (left_s := end_s - time.monotonic()) > 1:
            flags = ["--device", self._arguments.device, *["--small"] * self._arguments.small]
            command = [
                sys.executable, "-m", "benchmarks.gpu.part", part.name, *flags,
                "--limit-s", f"{left_s:.1f}", "--carried", str(self._carried),
                "--out", str(self._work), str(self._out),
            ]  # fmt: skip
            summary_fd = os.dup(1)
            try:
                command += ["--summary-fd", str(summary_fd)]
                code = run_bounded(
                    command, left_s + GRACE_S, self._environment(), log, (summary_fd,)
                )
            finally:
                os.close(summary_fd)
            self._records.read()
            begun, missing = self._records.begun, self._records.missing
            if code == 0:
                return CUT_OFF if self._records.of_part(part.name, missing) else ENDED
            if code is not None and begun is None and code != LOST_CODE:
                last = log.read_bytes()[-300:].decode(errors="replace").strip().splitlines()
                return f"exit code {code}: {last[-1] if last else ''} (see {log.name})"
            if code is not None and begun is not None:
                tail = log.read_bytes()[-3000:].decode(errors="replace")
                error = f"{tail}\ncrash or hang: exit code {code}"
                self._records.add(name=begun, error=error)
                print(summary(begun, {"error": error}), flush=True)
        return CUT_OFF

    def summarize(self, wanted: Sequence[Part]) -> int:
        """Print a line for each part; 0 if those that were wanted have ended and nothing failed."""
        records = self._records
        rows = [["", "measured", "failed", "skipped", "missing", "ending"]]
        for part in PARTS:
            kinds = (records.figures, records.errors, records.skipped, records.missing)
            counts = [str(len(records.of_part(part.name, kind))) for kind in kinds]
            rows.append([part.name, *counts, records.endings.get(part.name, "not begun")])
        print(table(rows), flush=True)
        is_complete = all(records.endings.get(part.name) == ENDED for part in wanted)
        failed = [name for part in wanted for name in records.of_part(part.name, records.errors)]
        return 0 if is_complete and not failed else 1

    def _environment(self) -> dict[str, str]:
        path = [str(ROOT), os.environ.get("PYTHONPATH", ""), str(self._carried / "site")]
        return {
            "PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONUNBUFFERED": "1",
            "TRITON_CACHE_DIR": str(TRITON_CACHE), PDL_VARIABLE: self._pdl,
            _MARK: str(self._work),
        }  # fmt: skip

    def keep_triton_cache(self) -> None:
        """Archive it in --out, to be carried next time, if kernels were compiled."""
        if self._arguments.device != "cuda" or cached_kernels() == self._cached:
            return
        with tarfile.open(self._out / f"{TRITON}.tar.xz", "w:xz", preset=1) as archive:
            archive.add(TRITON_CACHE, TRITON_CACHE.name)


def cached_kernels() -> set[str]:
    """Names of what Triton has compiled, of which each has a folder."""
    return {path.name for path in TRITON_CACHE.iterdir()} if TRITON_CACHE.is_dir() else set()


def unpack(folder: Path, target: Path) -> None:
    """Archives that were carried, once; one that is damaged costs only what needs it.

    Triton's cache goes where it was made: its files hold absolute paths.
    """
    for archive in sorted(folder.glob("*.tar.xz")):
        name = archive.name.removesuffix(".tar.xz")
        mark = target / f".{name}"
        if mark.exists():
            continue
        try:
            with tarfile.open(archive) as opened:
                place = TRITON_CACHE.parent if name == TRITON else target
                opened.extractall(place, filter="data")
        except Exception as error:
            print(f"{archive} is damaged: {type(error).__name__}: {error}", flush=True)
        else:
            mark.touch()


def run_bounded(
    command: list[str],
    limit_s: float,
    changes: dict[str, str],
    log: Path,
    keep_fds: Sequence[int] = (),
) -> int | None:
    """Exit code of a command; None if it was killed at the limit. What it started ends with it.

    changes: to the environment; it has the mark of `end_family`. keep_fds: that it inherits.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env=os.environ | changes, cwd=ROOT, stdout=output, stderr=output,
            pass_fds=keep_fds,
        )  # fmt: skip
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:  # of an interrupt, too
        end_family(f"{_MARK}={changes[_MARK]}")
        process.wait()


def end_family(mark: str) -> None:
    """End all that was started with NAME=VALUE in its environment, in whatever session it is."""
    while family := [*_family(mark.encode())]:
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _family(mark: bytes) -> Sequence[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


if __name__ == "__main__":
    # As an interrupt: what was started is ended with the call, see `run_bounded`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
