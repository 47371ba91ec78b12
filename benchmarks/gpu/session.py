"""One process of the driver: its device, its time limit, and results that survive being killed.

Time on a GPU is rare, so nothing that was measured may be lost. A report names at first all that is
to be measured, as `missing`, and is written before and after every measurement. What failed is
recorded and the next one tried. A process that continues a report (of the same device) skips what
is in it, but for errors of another commit. What was `begun` and did not end is tried once more, for
the process may have been killed from outside; it is an error at once where it ended the process: a
crash, a kernel that broke the CUDA context for good, or a watchdog.
measured_before: commits of what was measured with another one than the last.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.gpu.reports import read_json, take_over, write_json
from benchmarks.machine import (
    describe_command,
    describe_commit,
    describe_host,
    describe_versions,
)

COMMIT_VARIABLE: Final = "NANOCORE_COMMIT"
NO_GRAPH: Final = "WorkerError: no graph of"
"""In the error of an engine's start that could not record one."""
PACKAGES: Final = ("torch", "triton", "numpy", "transformers", "safetensors", "msgspec", "pyzmq")


class UnavailableError(Exception):
    """A measurement that cannot be made here; says why, and is recorded as skipped."""


class LackingError(Exception):
    """It lacks what a later call may bring; it stays missing, and this is why."""


class BrokenContextError(Exception):
    """Nothing more can run on the device in this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What every subcommand is given.

    out: folder of the reports. keep: another one, for a copy of each. small: tiny shapes, to
    rehearse. carried: folder of what is not in the repository (libraries, other engines), or None.
    commit: what is measured, where there is no repository. deadline_s: on the monotonic clock.
    only: prefixes of measurements to make, all if it is empty.
    """

    out: Path
    device: torch.device
    keep: Path | None = None
    small: bool = False
    carried: Path | None = None
    commit: str | None = None
    deadline_s: float = float("inf")
    only: tuple[str, ...] = ()

    @property
    def remaining_s(self) -> float:
        """Seconds until the time limit; not below 0."""
        return max(0.0, self.deadline_s - time.monotonic())

    @property
    def on_gpu(self) -> bool:
        """Whether this is more than a rehearsal."""
        return self.device.type == "cuda"

    def wants(self, name: str) -> bool:
        """Whether a measurement was asked for."""
        return not self.only or name.startswith(self.only)

    def carried_path(self, name: str) -> Path | None:
        """A file or folder that was carried, if it was."""
        if self.carried is None or not (self.carried / name).exists():
            return None
        return self.carried / name


@dataclass(slots=True)
class Results:
    """A report, on disk after every change.

    needs_s: what a measurement must have left to be begun. hangs_s: after so long it hangs.
    """

    session: Session
    name: str
    needs_s: float = 5.0
    hangs_s: float = 120.0
    data: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        session, file = self.session, f"gpu-{self.name}.json"
        head = {**describe_run(session), "small": session.small}
        self.data = found = {
            "begun": None, "missing": [], "measurements": {}, "skipped": {}, "errors": {},
            "measured_before": {}, "tried": [], "problems": [],
        }  # fmt: skip
        problems = []
        for folder in filter(None, (session.keep, session.out)):
            report, problem = take_over(folder / file, session.small, head["device"]["name"])
            found |= report
            problems += [problem] if problem else []
        found["problems"] += problems
        if begun := found["begun"]:
            if begun in found["tried"]:
                found["errors"].setdefault(begun, "the process ended in it: it crashed or hung")
            else:  # perhaps that was not its fault
                found["tried"].append(begun)
            self._end(begun)
        if found.get("commit") != head["commit"]:
            earlier = dict.fromkeys(self.measurements, found.get("commit"))
            found["measured_before"] = earlier | found["measured_before"]
            found["errors"], found["tried"] = {}, []  # perhaps this commit repairs them
        self.data = head | found | {"commit": head["commit"]}
        self.write()

    @property
    def measurements(self) -> dict[str, Any]:
        """What was measured so far, by name."""
        found: dict[str, Any] = self.data["measurements"]
        return found

    def run(self, measurements: Mapping[str, Callable[[], Any]]) -> None:
        """Make those that are wanted and not yet made, in this order.

        Raises:
            BrokenContextError: the device cannot be used any more.
        """
        self.expect(measurements)
        for name, measurement in measurements.items():
            if name not in self.data["missing"] or not self.session.wants(name):
                continue
            if self.session.remaining_s < self.needs_s:
                break
            self._measure(name, measurement)
        if self.data["missing"]:
            say(f"{self.name}: missing: {', '.join(self.data['missing'])}")

    def expect(self, names: Iterable[str]) -> None:
        """Say what is wanted, so that what is never reached is known."""
        known = {*self.measurements, *self.data["errors"], *self.data["missing"]}
        self.data["missing"] += [n for n in names if self.session.wants(n) and n not in known]
        self.write()

    def begin(self, name: str) -> None:
        """From here on it is this measurement that hangs, or ends the process."""
        self.data["begun"] = name
        self.write()
        faulthandler.dump_traceback_later(self.hangs_s, exit=True, file=sys.__stderr__)

    def put(self, name: str, value: Any) -> None:
        """Record a measurement."""
        self.measurements[name] = value
        self.data["skipped"].pop(name, None)
        self._end(name)
        say(f"{self.name}: {name}: {_brief(value)}")

    def skip(self, name: str, reason: str) -> None:
        """Record that something cannot be measured here; it is tried again where this continues."""
        self.forget(name)
        self.data["skipped"][name] = reason
        self._end(name)
        say(f"{self.name}: {name}: skipped, {reason}")

    def lack(self, name: str, reason: str) -> None:
        """Record why it stays missing for now."""
        self.forget(name)
        self.data["skipped"][name] = reason
        self.data["missing"].append(name)
        self._end(name)
        say(f"{self.name}: {name}: missing, {reason}")

    def forget(self, name: str) -> None:
        """Nothing is to be said of it any more."""
        self.data["missing"] = [other for other in self.data["missing"] if other != name]
        self.data["skipped"].pop(name, None)
        self.data["errors"].pop(name, None)

    def fail(self, name: str, error: BaseException | str) -> None:
        """Record an error; or that a module was not there, or the time limit in the way.

        Raises:
            BrokenContextError: the device cannot be used any more.
        """
        text = error if isinstance(error, str) else "".join(traceback.format_exception(error))
        last = (text.strip().splitlines() or [""])[-1][:300]
        if "ModuleNotFoundError" in last:  # it can be carried to a later call
            self.lack(name, last)
            return
        if self.session.remaining_s > 0:
            self.data["errors"][name] = text[-10000:]
            self.data["skipped"].pop(name, None)
        say(f"{self.name}: {name}: FAILED: {last}")
        if NO_GRAPH in text:
            # A recording that could not end leaves torch's allocator in the midst of it.
            self.write()
            raise BrokenContextError(name)
        del error  # frames hold tensors
        if self.session.on_gpu:
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except Exception as broken:
                self.write()  # with `begun`: another process goes on
                raise BrokenContextError(name) from broken
        self._end(name)

    def write(self) -> None:
        """All of it or nothing."""
        folders = self.session.out, self.session.keep
        problems = write_json(f"gpu-{self.name}.json", self.data, *folders)
        known = self.data["problems"]
        known += [problem for problem in problems if problem not in known]

    def _measure(self, name: str, measurement: Callable[[], Any]) -> None:
        self.begin(name)
        try:
            self.put(name, measurement())
        except UnavailableError as error:
            self.skip(name, str(error))
        except LackingError as error:
            self.lack(name, str(error))
        except Exception as error:  # whatever it is, the others can still be measured
            self.fail(name, error)

    def _end(self, name: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.data["begun"] = None
        if name in self.data["missing"] and (
            name in self.measurements or name in self.data["errors"]
        ):
            self.data["missing"].remove(name)
        self.write()


def read_report(folder: Path, name: str) -> dict[str, Any]:
    """A report; empty if there is none.

    Raises:
        FolderError: it is damaged.
    """
    return read_json(folder / f"gpu-{name}.json")


def say(line: str) -> None:
    """A line of progress, at once."""
    print(line, flush=True)


def describe_run(session: Session) -> dict[str, Any]:
    """Which code ran where, when and how: the head of every report."""
    commit = session.commit or os.environ.get(COMMIT_VARIABLE)
    known = {"commit": commit, "dirty": None} if commit else describe_commit()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": describe_command(),
        **known,
        "host": describe_host(),
        "device": describe_device(session.device),
        "versions": describe_versions(PACKAGES),
    }


def describe_device(device: torch.device) -> dict[str, Any]:
    """The accelerator, by what torch says of it."""
    if device.type != "cuda":
        return {"name": device.type}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": round(properties.L2_cache_size / 2**20, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }


def exit_broken(error: BrokenContextError) -> None:
    """End this process so that another one goes on."""
    say(f"the device is lost to this process since {error}")
    sys.stdout.flush()
    os._exit(1)  # destructors would wait for the device


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 160 else text[:157] + "..."
