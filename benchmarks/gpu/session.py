"""One process of the driver: its device, its time limit, and results that survive being killed.

Time on a GPU is rare, so nothing that was measured may be lost. A report names at first all that is
to be measured, as `missing`, and is written before and after every measurement. What failed is
recorded and the next one tried. A process that continues a report (of the same device) skips what
is in it, but for errors of another commit; what was `begun` when its predecessor ended is an error,
for it ended the process: a crash, a kernel that broke the CUDA context for good, or a watchdog.
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

from benchmarks.gpu.run import read_json, write_json
from benchmarks.machine import (
    describe_command,
    describe_commit,
    describe_host,
    describe_versions,
)

COMMIT_VARIABLE: Final = "NANOCORE_COMMIT"
PACKAGES: Final = ("torch", "triton", "numpy", "transformers", "safetensors", "msgspec", "pyzmq")


class UnavailableError(Exception):
    """A measurement that cannot be made here; says why, and is recorded as skipped."""


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
        head = {**describe_run(self.session), "small": self.session.small}
        found = read_report(self.session.out, self.name)
        if any(found.get(key) != head[key] for key in ("small", "device")):
            found = {"begun": None, "missing": [], "measurements": {}, "skipped": {}, "errors": {},
                     "measured_before": {}}  # fmt: skip
        self.data = found
        if begun := found["begun"]:
            found["errors"].setdefault(begun, "the process ended in it: it crashed or hung")
            self._end(begun)
        if found.get("commit") != head["commit"]:
            earlier = dict.fromkeys(self.measurements, found.get("commit"))
            found["measured_before"] = earlier | found["measured_before"]
            found["errors"] = {}  # perhaps this commit repairs what they tell of
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
        self.data["skipped"][name] = reason
        self._end(name)
        say(f"{self.name}: {name}: skipped, {reason}")

    def fail(self, name: str, error: BaseException | str) -> None:
        """Record an error, or that the time limit was in the way.

        Raises:
            BrokenContextError: the device cannot be used any more.
        """
        text = error if isinstance(error, str) else "".join(traceback.format_exception(error))
        last = (text.strip().splitlines() or [""])[-1][:300]
        if self.session.remaining_s > 0:
            self.data["errors"][name] = text[-10000:]
        say(f"{self.name}: {name}: FAILED: {last}")
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
        write_json(f"gpu-{self.name}.json", self.data, self.session.out, self.session.keep)

    def _measure(self, name: str, measurement: Callable[[], Any]) -> None:
        self.begin(name)
        try:
            self.put(name, measurement())
        except UnavailableError as error:
            self.skip(name, str(error))
        except Exception as error:  # whatever it is, the others can still be measured
            self.fail(name, error)

    def _end(self, name: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.data["begun"] = None
        recorded = name in self.measurements or name in self.data["errors"]
        if name in self.data["missing"] and (recorded or name in self.data["skipped"]):
            self.data["missing"].remove(name)
        self.write()


def read_report(folder: Path, name: str) -> dict[str, Any]:
    """A report; empty if there is none."""
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
