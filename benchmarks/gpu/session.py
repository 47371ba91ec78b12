"""One run of the driver: its device, its time limit, and results that survive being killed.

Time on a GPU is rare, so nothing that was measured may be lost: a report is written after every
measurement, a failing measurement is recorded and the next one tried, and what the time limit cut
off is listed. A CUDA context that is broken for good ends the process with `RESTART`; the process
that is started then skips what its predecessor has recorded.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.gpu.restarts import CONTINUE_VARIABLE, RESTART
from benchmarks.machine import describe_command, describe_commit, describe_host

TIME_LIMIT: Final = "time limit"
"""Why something was skipped that another call can still measure."""
COMMIT_VARIABLE: Final = "NANOCORE_COMMIT"
PACKAGES: Final = (
    "torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "msgspec", "pyzmq",
    "vllm", "flash-attn", "flash-attn-3", "flashinfer-python",
)  # fmt: skip


class BrokenContextError(Exception):
    """Nothing more can run on the device in this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What every subcommand is given.

    out: folder of the reports. small: tiny shapes, to rehearse. carried: folder of what is not in
    the repository (libraries, other engines), or None. commit: what is measured, where there is no
    repository. deadline_s: on the monotonic clock. only: parts to measure, all if it is empty.
    """

    out: Path
    device: torch.device
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

    def wants(self, part: str) -> bool:
        """Whether a part of a subcommand, or anything within it, was asked for."""
        return not self.only or any(
            part.startswith(prefix) or prefix.startswith(part) for prefix in self.only
        )

    def carried_path(self, name: str) -> Path | None:
        """A file or folder that was carried, if it was."""
        if self.carried is None or not (self.carried / name).exists():
            return None
        return self.carried / name


@dataclass(slots=True)
class Results:
    """The report of one subcommand, on disk after every change.

    needs_s: what a measurement must have left to be begun.
    """

    session: Session
    name: str
    data: dict[str, Any] = field(init=False)
    needs_s: float = 5.0

    def __post_init__(self) -> None:
        self.data = self._unfinished() or {
            **describe_run(self.session),
            "small": self.session.small,
            "complete": False,
            "measurements": {},
            "skipped": {},
            "errors": {},
        }
        self.write()

    @property
    def path(self) -> Path:
        """Where the report is."""
        return report_path(self.session.out, self.name)

    @property
    def measurements(self) -> dict[str, Any]:
        """What was measured so far, by name."""
        found: dict[str, Any] = self.data["measurements"]
        return found

    def measure(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Record what the function returns for the arguments, or why there is nothing; or None.

        Raises:
            BrokenContextError: the device cannot be used any more.
        """
        if not self.session.wants(name):
            return None
        if name in self.measurements:
            return self.measurements[name]
        if name in self.data["errors"]:
            return None
        if self.session.remaining_s < self.needs_s:
            return self.skip(name, TIME_LIMIT)
        start_s = time.monotonic()
        try:
            value = function(*arguments)
        except Exception as error:  # whatever it is, the others can still be measured
            self.fail(name, error)
            return None
        self.put(name, value)
        say(f"{self.name}: {name}: {_brief(value)} ({time.monotonic() - start_s:.1f} s)")
        return value

    def put(self, name: str, value: Any) -> None:
        """Record a measurement."""
        self.measurements[name] = value
        self.data["skipped"].pop(name, None)
        self.write()

    def skip(self, name: str, reason: str) -> None:
        """Record that something was not measured."""
        self.data["skipped"][name] = reason
        self.write()
        say(f"{self.name}: {name}: skipped, {reason}")

    def fail(self, name: str, error: Exception) -> None:
        """Record an error.

        Raises:
            BrokenContextError: the device cannot be used any more.
        """
        lines = traceback.format_exception(error)
        self.data["errors"][name] = "".join(lines)[-10000:]
        self.write()
        say(f"{self.name}: {name}: FAILED: {type(error).__name__}: {str(error)[:300]}")
        del error, lines  # frames hold tensors
        if self.session.on_gpu:
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except Exception as broken:
                raise BrokenContextError(name) from broken

    def finish(self) -> None:
        """All that was asked for was measured, failed or skipped."""
        self.data["complete"] = TIME_LIMIT not in self.data["skipped"].values()
        self.write()

    def write(self) -> None:
        """All of it or nothing."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(self.data, indent=1) + "\n")
        unfinished.replace(self.path)

    def _unfinished(self) -> dict[str, Any] | None:
        """What a predecessor of this process left, if this one continues it."""
        if os.environ.get(CONTINUE_VARIABLE) != self.name or not self.path.exists():
            return None
        found: dict[str, Any] = json.loads(self.path.read_text())
        return found


def report_path(folder: Path, name: str) -> Path:
    """The file of a subcommand's report."""
    return folder / f"gpu-{name}.json"


def read_report(folder: Path, name: str) -> dict[str, Any] | None:
    """A report of an earlier subcommand, if there is one."""
    path = report_path(folder, name)
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found


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
        "versions": describe_versions(),
    }


def describe_versions() -> dict[str, str | None]:
    """Versions of what decides speed; None where a package is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


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


def exit_if_broken(error: BrokenContextError) -> None:
    """End this process so that another one goes on."""
    say(f"the device is lost to this process since {error}")
    sys.stdout.flush()
    os._exit(RESTART)  # destructors would wait for the device


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 160 else text[:157] + "..."
