"""The whole day on a GPU: parts in a fixed order, over calls of ten minutes.

    python3 -m benchmarks.gpu.plan --out "$OUT" --carried FOLDER

Each call goes on where the last one stopped: reports and what was carried stay in --work, on the
machine's disk, which one call at a time has, and reports are in --out as they are measured. A part
has a limit of its own; one that the call's end cuts off is continued by the next call, one that
broke is tried again if there is time, one that needs what is not yet carried waits. gpu-plan.json
says what each part misses, and as `problems` what was wrong with files and folders.
Triton's cache stays on the disk and is packed into --out at the end of a call; where the folders
that are carried have it, or reports, and the disk has not, they are taken from there.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import math
import os
import shutil
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.bounded import ENDED, GRACE_S, kill_family, run_subcommand
from benchmarks.gpu.carry import unpack
from benchmarks.gpu.reports import (
    FolderError,
    differs,
    read_json,
    take_over,
    write_file,
    write_json,
)
from benchmarks.gpu.run import add_flags, report_name

CALL_LIMIT_S: Final = 570.0
"""Of 600; then a call is killed."""
CACHE: Final = "triton-cache.tar.xz"
CACHE_LIMIT_BYTES: Final = 15 * 2**20
STATE: Final = "gpu-plan.json"
_CACHE_RAW_BYTES: Final = 48 * 2**20
OVERHEAD_S: Final = GRACE_S + 15.0
"""Of a call: for a part that does not end, and for packing."""
_LEAST_S: Final = 15.0
"""Less is not worth a start."""
_LOG_CHARS: Final = 3000
_WORK_VARIABLE: Final = "NANOCORE_GPU_BENCHMARK_WORK"
"""All that a call starts has it."""


@dataclass(frozen=True, slots=True)
class Part:
    """A subcommand, or the measurements of it that `only` has prefixes of.

    needs: what must have been carried, by its place then.
    """

    name: str
    subcommand: str
    limit_s: float
    only: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


_VLLM: Final = "vllm-site/vllm"
PARTS: Final = (
    Part("env", "env", 40),
    Part("tests", "tests", 130),
    Part("speed", "engine", 130, only=("speed",)),
    Part("checks", "engine", 170, only=("check",)),
    Part("ceilings", "ceilings", 45),
    Part("attention", "kernels", 220, only=("attention",)),
    Part("matrix", "engine", 320, only=("matrix", "bench")),
    Part("vllm", "peers", 330, only=("vllm",),
         needs=(f"{_VLLM}/__init__.py", f"{_VLLM}/_C_stable_libtorch.abi3.so")),
    Part("nano-vllm", "peers", 200, only=("nano-vllm",), needs=("nano-vllm", "fa3.so.xz")),
    Part("products", "kernels", 190, only=("gated", "linear", "logits")),
    Part("transformers", "peers", 110, only=("transformers",)),
    Part("tune", "tune", 180),
)  # fmt: skip
"""In the order of what they tell; 35 minutes in all, which is four calls."""


def main(argv: Sequence[str] | None = None) -> int:
    """One call; 0 if nothing is missing and nothing failed, 1 if not.

    2: a folder is not for this call. 130: it was interrupted, or told to end.
    """
    start_s = time.monotonic()
    arguments = parse_arguments(argv)
    try:
        with _alone(arguments.work):
            return _call(arguments, start_s + arguments.limit_s)
    except FolderError as error:
        print(f"benchmarks.gpu.plan: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("interrupted: another call goes on", file=sys.stderr, flush=True)
        return 130


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    """No other call has this folder, nor has one left a process behind; SIGTERM interrupts.

    Raises:
        FolderError: another call has it.
    """
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FolderError(f"another call has --work {work}: wait for it, or end it") from error
        kill_family(f"{_WORK_VARIABLE}={work}")
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


def _call(arguments: argparse.Namespace, end_s: float) -> int:
    plan = Plan(arguments, end_s)
    plan.prepare()
    parts = [part for part in PARTS if part.name in arguments.parts]
    for part in parts:
        plan.run(part, part.limit_s - plan.parts[part.name]["used_s"])
    for part in parts:  # in what time is left, what a limit has cut off
        plan.run(part, math.inf)
    plan.pack_cache()
    return plan.summarize()


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu.plan", description=(__doc__ or "").partition("\n")[0]
    )
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", default=names, metavar="PART", help=", ".join(names))
    add_flags(parser)
    parser.add_argument("--carried", type=Path, nargs="*", default=[], help="what carry.py made")
    parser.add_argument("--limit-s", type=float, default=CALL_LIMIT_S, help="of this call")
    parser.add_argument("--work", type=Path, help="stays from call to call")
    arguments = parser.parse_args(argv)
    if arguments.work is None:
        kind = "-rehearsal" if arguments.small or arguments.device == "cpu" else ""
        arguments.work = Path(tempfile.gettempdir()) / f"nanocore-gpu-{os.getuid()}{kind}"
    for name in arguments.parts:
        if name not in names:
            parser.error(f"{name}: choose from {', '.join(names)}")
    for folder in arguments.carried:
        if not folder.is_dir():
            parser.error(f"--carried {folder}: not a folder")
    arguments.out, arguments.work = arguments.out.absolute(), arguments.work.absolute()
    return arguments


class Plan:
    """One call's state; it is in the report after every change."""

    def __init__(self, arguments: argparse.Namespace, end_s: float) -> None:
        self._arguments, self._end_s = arguments, end_s
        work: Path = arguments.work
        self._reports, self._carried = work / "reports", work / "carried"
        self._site, self._cache = work / "site", work / "triton-cache"
        self._commit = arguments.commit or os.environ.get("NANOCORE_COMMIT")
        self._problems: list[str] = []
        self._lacking: set[str] = set()
        """Parts that are done but for what this call does not have."""

    def prepare(self) -> None:
        """Put what was carried in place, and find out how far the last call came.

        Raises:
            FolderError: a GPU's reports are there, and this is a rehearsal.
        """
        out: Path = self._arguments.out
        for folder in (self._reports, out):
            for unfinished in folder.glob(".gpu-*.json.*"):
                with suppress(OSError):
                    unfinished.unlink()
            for report in sorted(folder.glob("gpu-*.json")):
                _, problem = take_over(report, self._arguments.small, self._arguments.device)
                self._tell(problem)
        for folder in (out, *self._arguments.carried):
            self._take_reports(folder)
        for folder in self._arguments.carried:
            self._take_cache(folder / CACHE)
            for problem in unpack(folder, self._carried, self._site):
                self._tell(f"{folder.name}: {problem}")
        for report in self._reports.glob("gpu-*.json"):
            self._tell(*write_file(report.name, report.read_bytes(), out))
        found = read_json(self._reports / STATE).get("parts", {})
        self.parts: dict[str, dict[str, Any]] = {
            part.name: (self._has_report(part) and found.get(part.name))
            or {"limit_s": part.limit_s, "used_s": 0.0, "ending": "not begun",
                "missing": ["all of it"], "failed": [], "skipped": {}}
            for part in PARTS
        }  # fmt: skip
        self._write()

    def _has_report(self, part: Part) -> bool:
        return (self._reports / report_name(part.subcommand)).exists()

    def _take_reports(self, folder: Path) -> None:
        """Only those that this machine has not: its own are newer."""
        for report in sorted(folder.glob("gpu-*.json")):
            if (self._reports / report.name).exists():
                continue
            try:
                found = read_json(report)
            except FolderError as error:
                self._tell(f"not taken: {error}")
                continue
            if differs(found, self._arguments.small, self._arguments.device):
                self._tell(f"not taken: {report} is of another device or size")
            else:
                self._tell(*write_file(report.name, report.read_bytes(), self._reports))

    def _take_cache(self, packed: Path) -> None:
        """Of kernels, if this machine has none."""
        if not packed.exists() or self._cache.exists():
            return
        unfinished = self._cache.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            with tarfile.open(packed) as archive:
                archive.extractall(unfinished, filter="data")
            unfinished.rename(self._cache)
        except Exception as error:  # they are compiled again
            self._tell(f"{packed.parent.name}: {CACHE}: {type(error).__name__}: {error}")

    def _tell(self, *problems: str) -> None:
        """What is wrong with a file or folder, once; what does not need it is still measured."""
        for problem in problems:
            if problem and problem not in self._problems:
                self._problems.append(problem)
                print(f"problem: {problem}", flush=True)

    def run(self, part: Part, limit_s: float) -> None:
        """Run it, or go on with it, if there is anything left to do, and time for it."""
        state = self.parts[part.name]
        is_another_try = state["failed"] and state.get("commit") != self._commit
        if state["ending"] == ENDED and not state["missing"] and not is_another_try:
            return
        if part.name in self._lacking:
            return
        lacking = [name for name in part.needs if not (self._carried / name).exists()]
        if lacking:
            self._change(part, ending=f"waits: not carried: {', '.join(lacking)}")
            return
        call_s = self._end_s - time.monotonic() - OVERHEAD_S
        left_s = min(part.limit_s if is_another_try else limit_s, call_s)
        if left_s < _LEAST_S:
            return
        self._change(part, ending="running", commit=self._commit)
        log = self._arguments.work / f"{part.name}.log"
        log.unlink(missing_ok=True)
        start_s = time.monotonic()
        ending = run_subcommand(
            part.subcommand, left_s,
            argparse.Namespace(**vars(self._arguments) | {"out": self._reports}),
            {"--carried": self._carried if self._carried.exists() else None,
             "--keep": self._arguments.out, "--only": ",".join(part.only)},
            {"TRITON_CACHE_DIR": str(self._cache), "PYTHONPATH": self._path(),
             _WORK_VARIABLE: str(self._arguments.work)},
            log,
        )  # fmt: skip
        self._note(part, ending, time.monotonic() - start_s, log)

    def pack_cache(self) -> None:
        """Triton's compiled kernels, the oldest first, as far as they may travel."""
        packed = pack(self._cache)
        if packed is not None:
            self._tell(*write_file(CACHE, packed, self._arguments.out))
            self._write()

    def summarize(self) -> int:
        """A line for each part; 0 if none misses anything, and nothing failed."""
        for name, state in self.parts.items():
            counts = f"{len(state['failed'])} failed, {len(state['missing'])} missing"
            print(f"{name:14}{state['used_s']:6.0f} s  {state['ending']}; {counts}", flush=True)
        is_complete = all(
            state["ending"] == ENDED and not state["missing"] and not state["failed"]
            for state in self.parts.values()
        )
        return 0 if is_complete else 1

    def _note(self, part: Part, ending: str, seconds: float, log: Path) -> None:
        """What a part has come to."""
        report = read_json(self._reports / report_name(part.subcommand))

        def own(names: Sequence[str]) -> list[str]:
            return [name for name in names if not part.only or name.startswith(part.only)]

        output = log.read_text(errors="replace")[-_LOG_CHARS:]
        print(output, flush=True)
        skipped = report.get("skipped", {})
        self._change(
            part,
            ending=ending,
            used_s=round(self.parts[part.name]["used_s"] + seconds, 1),
            missing=own(report["missing"]) if report else ["all of it"],
            failed=own(report.get("errors", {})),
            skipped={name: skipped[name] for name in own(skipped)},
            output="" if ending == ENDED else output,
        )
        state = self.parts[part.name]
        if ending == ENDED and state["missing"] and {*state["missing"]} <= state["skipped"].keys():
            self._lacking.add(part.name)

    def _path(self) -> str:
        return os.pathsep.join(filter(None, [str(self._site), os.environ.get("PYTHONPATH")]))

    def _change(self, part: Part, **changes: Any) -> None:
        self.parts[part.name] |= changes
        self._write()

    def _write(self) -> None:
        state = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": self._commit,
                 "small": self._arguments.small, "device": {"name": self._arguments.device},
                 "problems": self._problems, "parts": self.parts}  # fmt: skip
        problems = write_json(STATE, state, self._reports, self._arguments.out)
        if not {*problems} <= {*self._problems}:
            self._tell(*problems)
            self._write()


def pack(cache: Path, limit_bytes: int = CACHE_LIMIT_BYTES) -> bytes | None:
    """What a hit in the cache reads: binaries and their descriptions, kernel by kernel.

    None if there is nothing, or if that is larger than may travel.
    """
    buffer, num_bytes = io.BytesIO(), 0
    kernels = [folder for folder in cache.glob("*") if folder.is_dir()] if cache.exists() else []
    with tarfile.open(fileobj=buffer, mode="w:xz", preset=1) as archive:
        for kernel in sorted(kernels, key=lambda folder: folder.stat().st_mtime):
            files = [*kernel.glob("*.json"), *kernel.glob("*.cubin"), *kernel.glob("*.so")]
            num_bytes += sum(file.stat().st_size for file in files)
            if num_bytes > _CACHE_RAW_BYTES:
                break
            for file in files:
                archive.add(file, file.relative_to(cache))
    packed = buffer.getvalue()
    return packed if num_bytes and len(packed) <= limit_bytes else None


if __name__ == "__main__":
    sys.exit(main())
