"""A subcommand in a process of its own: bounded in time, and started again behind what broke it.

A kernel that breaks the CUDA context, or an engine that hangs, so costs its own figures only.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.reports import read_json, write_json
from benchmarks.gpu.run import ROOT, child_environment, report_name
from nanocore.system.lifeline import signal_at_parent_death

ENDED: Final = "ended"
GRACE_S: Final = 20.0
"""What a subcommand may take beyond its limit, to finish what it is at."""
_FAMILY_VARIABLE: Final = "NANOCORE_GPU_BENCHMARK_FAMILY"


def run_subcommand(
    name: str,
    limit_s: float,
    arguments: argparse.Namespace,
    flags: dict[str, Any],
    changes: dict[str, str],
    log: Path,
) -> str:
    """Says how it ended.

    arguments: see `add_flags`. flags: others. changes: to the environment. log: of its output.
    """
    end_s, broke = time.monotonic() + limit_s, None
    report = arguments.out / report_name(name)
    flags = {"--out": arguments.out, "--device": arguments.device, "--commit": arguments.commit,
             **flags}  # fmt: skip
    words = [str(word) for flag, value in flags.items() if value for word in (flag, value)]
    words += ["--small"] if arguments.small else []
    while (left_s := end_s - time.monotonic()) > 1:
        print(f"== {name}: {left_s:.0f} s", flush=True)
        command = [sys.executable, "-m", "benchmarks.gpu.run", name]
        command += ["--limit-s", f"{left_s:.1f}", *words]
        code = None
        try:
            code = run_bounded(command, left_s + GRACE_S, child_environment(changes), log)
        finally:
            found = read_json(report)
            begun = found.get("begun")
            if begun and code is None:  # killed, by an interrupt, too: it can be tried again
                write_json(report.name, found | {"begun": None}, report.parent, flags.get("--keep"))
        if code is None:
            return "killed at its time limit"
        if code == 0 or begun is None or begun == broke:
            return f"ended with exit code {code}" if code else ENDED
        broke = begun  # another process records that, and goes on behind it
        found["tried"] = [*found.get("tried", []), begun]
        write_json(report.name, found, report.parent, flags.get("--keep"))
    return "its time is up"


def run_bounded(
    command: list[str], limit_s: float, environment: dict[str, str], log: Path
) -> int | None:
    """Exit code of a command; None if it was killed at the limit.

    What it started ends with it, in whatever process group or session that is; it ends with us.
    """
    family = f"{_FAMILY_VARIABLE}={uuid.uuid4().hex}"
    environment = environment | dict([family.split("=")])
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=output, stderr=output, process_group=0,
            preexec_fn=partial(signal_at_parent_death, signal.SIGKILL),
        )  # fmt: skip
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:  # of an interrupt, too
            kill_family(family)
            process.kill()
            process.wait()


def kill_family(mark: str) -> None:
    """All processes that were started with this in their environment, NAME=VALUE."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
