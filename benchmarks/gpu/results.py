"""What is measured on a GPU, as records in a file: a line of JSON before and after everything.

Time on a GPU is rare, so nothing that was measured may be lost, or measured twice. A process says
who it is (`head`), what it will measure (`planned`), what it begins (`begun`), and what came of it:
`figures`, an `error`, or why it was `skipped`. Whoever comes later leaves out what has figures. A
process that the device is lost to, or that hangs, ends itself; day.py blames what was begun.
Rehearsals have a file of another name, so that they are never taken for what a GPU did.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.report import describe_run

if TYPE_CHECKING:
    import torch  # day.py does without

NO_GRAPH: Final = "WorkerError: no graph of"
"""In the error of an engine's start that could not record one."""
LOST: Final = "the device is lost to this process: another one goes on"
LOST_CODE: Final = 75
"""Exit code of a process that the device is lost to."""
TRITON_CACHE: Final = Path(tempfile.gettempdir()) / "nanocore-triton"
"""Folder of compiled kernels; the same one wherever they are made or used: its files name it."""
PDL_VARIABLE: Final = "NANOCORE_PDL"
PACKAGES: Final = ("torch", "triton", "numpy", "transformers", "safetensors", "msgspec", "pyzmq")
Measurements = dict[str, Callable[[], dict[str, Any]]]


class UnavailableError(Exception):
    """It cannot be measured here, or not yet: says why. The next call tries again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What a part is given.

    folders: where records are written; the first one's are continued. small: tiny shapes, for a
    rehearsal. carried: folder of what the machine lacked (other engines, libraries), or None.
    deadline_s: on the monotonic clock. only: prefixes of what to measure; all if it is empty.
    summary_fd: file descriptor that gets a line for each measurement.
    """

    folders: tuple[Path, ...]
    device: torch.device
    small: bool = False
    carried: Path | None = None
    deadline_s: float = float("inf")
    only: tuple[str, ...] = ()
    summary_fd: int = 1

    @property
    def remaining_s(self) -> float:
        """Seconds until the time limit; not below 0."""
        return max(0.0, self.deadline_s - time.monotonic())

    @property
    def on_gpu(self) -> bool:
        """Whether this is more than a rehearsal."""
        return self.device.type == "cuda"


class Records:
    """The file, in one or more folders, and what it comes to by now.

    figures, errors, skipped: by name of a measurement. missing: names that were planned. begun: the
    one that has not ended. endings: how each part ended, by its name.
    """

    def __init__(self, name: str, folders: tuple[Path, ...]) -> None:
        self._paths = [folder / name for folder in folders]
        self.head: dict[str, Any] = {}
        self.figures: dict[str, Any] = {}
        self.errors: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self.missing: list[str] = []
        self.endings: dict[str, str] = {}
        self.begun: str | None = None
        self.read()

    def read(self) -> None:
        """What others have written, from the start."""
        for found in (self.head, self.figures, self.errors, self.skipped, self.endings):
            found.clear()
        self.missing = []
        path = self._paths[0]
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        for line in filter(None, lines):
            with suppress(ValueError):  # cut short when its process was killed: as if not written
                if isinstance(record := json.loads(line), dict):
                    self._take(record)

    def add(self, **record: Any) -> None:
        """One more record, on disk when this returns."""
        for path in self._paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write("\n" + json.dumps(record))  # so that the end of a line cut short is told
        self._take(record)

    def _take(self, record: dict[str, Any]) -> None:
        if head := record.get("head"):
            if head["commit"] != self.head.get("commit"):
                self.errors.clear()  # perhaps this commit repairs them
            self.head |= head
        for part, names in record.get("planned", {}).items():
            others = [name for name in self.missing if not name.startswith(f"{part}/")]
            self.missing = [*others, *names]
        self.endings |= record.get("endings", {})
        self.begun = record.get("begun")
        if name := record.get("name"):
            for found in (self.figures, self.errors, self.skipped):
                found.pop(name, None)
            if figures := record.get("figures"):
                self.figures[name] = {**figures, "commit": self.head.get("commit")}
            elif error := record.get("error"):
                self.errors[name] = error
            else:
                self.skipped[name] = record["skipped"]
            if name in self.missing:
                self.missing.remove(name)

    def of_part(self, part: str, names: Iterable[str]) -> list[str]:
        """Those that are a part's."""
        return [name for name in names if name.startswith(f"{part}/")]

    def report(self) -> dict[str, Any]:
        """All of it, as JSON for people."""
        kinds = ("endings", "missing", "errors", "skipped", "figures")
        return self.head | {kind: getattr(self, kind) for kind in kinds}


class Results:
    """The records of a part's process."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.records = Records(file_name(session.device.type, session.small), session.folders)
        head = describe_run(PACKAGES) | {"device": describe_device(session.device)}
        self.records.add(head=head | {"small": session.small, "pdl": uses_pdl()})

    def add(self, name: str, **record: Any) -> None:
        """Keep figures, an error or a reason to skip, and say so in a line."""
        self.records.add(name=name, **record)
        self.say(summary(name, record))

    def say(self, line: str) -> None:
        """Write a line to the day's output, which the log is no part of."""
        os.write(self.session.summary_fd, f"{line}\n".encode())

    def run(
        self, measurements: Mapping[str, Callable[[], Any]], needs_s: float = 5, hangs_s: float = 90
    ) -> None:
        """Make those that are wanted and not yet made, in this order, while there is time.

        needs_s: what must be left for one to be begun. hangs_s: after so long it is given up.
        """
        only, done = self.session.only, {*self.records.figures, *self.records.errors}
        todo = [n for n in measurements if n not in done and (not only or n.startswith(only))]
        part = next(iter(measurements)).partition("/")[0]
        self.records.add(planned={part: todo})
        for name in todo:
            if self.session.remaining_s < needs_s:
                break
            self.records.add(begun=name)
            faulthandler.dump_traceback_later(hangs_s, exit=True, file=sys.__stderr__)
            record, is_lost = self._measure(measurements[name])
            faulthandler.cancel_dump_traceback_later()
            if "error" in record and self.session.remaining_s == 0:
                record = {}  # no time was left for it: it stays missing
            if record:
                self.add(name, **record)
            else:
                self.records.add()  # it is begun no more
            if is_lost:
                sys.stdout.flush()
                os._exit(LOST_CODE)  # destructors would wait for the device

    def _measure(self, measurement: Callable[[], Any]) -> tuple[dict[str, Any], bool]:
        """A record of what came of it, and whether nothing more can be run in this process."""
        try:
            return {"figures": measurement()}, False
        except (UnavailableError, ModuleNotFoundError) as error:  # it may be carried later
            return {"skipped": str(error)}, False
        except Exception as error:  # whatever it is, the others can still be measured
            text = "".join(traceback.format_exception(error))[-10000:]
        is_lost = self._is_lost(text)
        return {"error": f"{text}\n{LOST}" if is_lost else text}, is_lost

    def _is_lost(self, error: str) -> bool:
        """A kernel that broke the CUDA context broke it for good; so did a recording cut short."""
        if NO_GRAPH in error:
            return True
        if not self.session.on_gpu:
            return False
        import torch

        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception:
            return True
        return False


def uses_pdl() -> bool:
    """Whether launches may be dependent ones, see `nanocore.kernels.triton.launch`."""
    return os.environ.get(PDL_VARIABLE) != "0"


def summary(name: str, record: Mapping[str, Any], width: int = 110) -> str:
    """A line of at most `width` characters: as many numbers as fit, or what went wrong."""
    if "figures" in record:
        words = " ".join(_numbers(record["figures"]))
    elif "error" in record:
        lines = [line for line in record["error"].splitlines() if line.strip() and line != LOST]
        words = f"ERROR {lines[-1] if lines else ''}"
    else:
        words = f"skipped: {record['skipped']}"
    line = f"{name}: {words}"
    return line if len(line) <= width else f"{line[: width - 1]}~"


def _numbers(figures: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Each number as key=value; of what has a spread, the median."""
    for key, value in figures.items():
        if isinstance(value, Mapping):
            if "median" in value:
                yield f"{prefix}{key}={value['median']:.5g}"
            else:
                yield from _numbers(value, f"{key}.")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            continue
        else:
            yield f"{prefix}{key}={value:.5g}"


def file_name(device: str, small: bool) -> str:
    """Of a session's records."""
    return "gpu.jsonl" if device == "cuda" and not small else "rehearsal.jsonl"


def describe_device(device: torch.device) -> dict[str, Any]:
    """The accelerator, by what torch says of it."""
    if device.type != "cuda":
        return {"name": device.type}
    import torch

    return {"name": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
