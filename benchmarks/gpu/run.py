"""All measurements on a machine with one GPU, each bounded in time.

    python -m benchmarks.gpu.run env ceilings kernels=240 --out FOLDER

Each subcommand runs in a process of its own, so that a kernel that breaks the CUDA context, or an
engine that hangs, costs its own figures only; NAME=SECONDS bounds one of them. Reports are
FOLDER/gpu-NAME.json, written after every measurement. Nothing has to be installed but torch,
triton, numpy, safetensors, msgspec and pyzmq; see README.md for what can be carried.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from benchmarks.gpu.restarts import CONTINUE_VARIABLE, RESTART

ROOT: Final = Path(__file__).resolve().parents[2]
SUBCOMMANDS: Final = {
    "env": "environment",
    "ceilings": "ceilings",
    "kernels": "kernel_times",
    "engine": "engine_report",
    "offline": "offline_report",
    "peers": "peer_report",
    "tune": "tune",
    "table": "goals",
}
"""Name of each, and the module whose `measure(session)` it is."""
_GRACE_S: Final = 20.0
"""What a subcommand may take beyond its limit, to finish what it is at."""


def main(argv: list[str] | None = None) -> int:
    """Run what is asked for; the exit code is 0 if all of it ended by itself."""
    arguments = parse_arguments(argv)
    if arguments.child:
        return _run_child(arguments)
    end_s = time.monotonic() + arguments.limit_s
    failed = []
    for name, limit_s in arguments.subcommands:
        left_s = min(end_s - time.monotonic(), limit_s)
        if left_s < 1:
            print(f"{name}: not begun, the time is up", flush=True)
            failed.append(name)
        elif not _run_subcommand(name, left_s, arguments):
            failed.append(name)
    if failed:
        print(f"not complete: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu.run",
        description=(__doc__ or "").partition("\n")[0],
        epilog=f"Subcommands: {', '.join(SUBCOMMANDS)}.",
    )
    parser.add_argument("subcommands", nargs="+", type=_subcommand, metavar="NAME[=SECONDS]")
    parser.add_argument("--out", type=Path, required=True, help="folder of the reports")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny shapes: a rehearsal")
    parser.add_argument("--limit-s", type=float, default=540.0, help="of the whole call")
    parser.add_argument("--carried", type=Path, help="what carry.py prepared, unpacked here")
    parser.add_argument("--commit", help="what is measured, where there is no repository; a file "
                        "that holds it will do")  # fmt: skip
    parser.add_argument("--only", default="", help="prefixes of measurements, by commas")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.carried is not None and not arguments.carried.is_dir():
        parser.error(f"--carried {arguments.carried}: not a folder")
    return arguments


def _subcommand(text: str) -> tuple[str, float]:
    name, _, seconds = text.partition("=")
    if name not in SUBCOMMANDS:
        raise argparse.ArgumentTypeError(f"{name}: choose from {', '.join(SUBCOMMANDS)}")
    return name, float(seconds) if seconds else float("inf")


def _run_subcommand(name: str, limit_s: float, arguments: argparse.Namespace) -> bool:
    """In a process of its own, started again where the device was lost; True if it ended well."""
    end_s, environment = time.monotonic() + limit_s, child_environment()
    while (left_s := end_s - time.monotonic()) > 1:
        print(f"== {name}: {left_s:.0f} s", flush=True)
        command = [
            sys.executable, "-m", "benchmarks.gpu.run", name, "--child",
            "--out", str(arguments.out), "--device", arguments.device,
            "--limit-s", f"{left_s:.1f}", "--only", arguments.only,
        ]  # fmt: skip
        command += ["--small"] if arguments.small else []
        command += ["--carried", str(arguments.carried)] if arguments.carried else []
        command += ["--commit", arguments.commit] if arguments.commit else []
        code = run_bounded(command, left_s + _GRACE_S, environment)
        if code != RESTART:
            if code:
                print(f"{name}: ended with {code}", flush=True)
            return code == 0
        environment = child_environment() | {CONTINUE_VARIABLE: name}
    return False


def run_bounded(command: list[str], limit_s: float, environment: dict[str, str]) -> int:
    """Exit code of a command; at the limit it is killed with all of its process group."""
    process = subprocess.Popen(command, env=environment, cwd=ROOT, process_group=0)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"killed after {limit_s:.0f} s", flush=True)
        return -signal.SIGKILL
    finally:  # of an interrupt, too
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def child_environment() -> dict[str, str]:
    """Ours, with the repository on the path and output that is not held back."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _run_child(arguments: argparse.Namespace) -> int:
    import torch

    from benchmarks.gpu import session as sessions

    ((name, _),) = arguments.subcommands
    commit = arguments.commit
    if commit and Path(commit).is_file():
        commit = Path(commit).read_text().strip()
    session = sessions.Session(
        out=arguments.out.absolute(),
        device=torch.device(arguments.device),
        small=arguments.small,
        carried=arguments.carried.absolute() if arguments.carried else None,
        commit=commit,
        deadline_s=time.monotonic() + arguments.limit_s,
        only=tuple(filter(None, arguments.only.split(","))),
    )
    if session.on_gpu and not torch.cuda.is_available():
        print(f"{name}: torch sees no CUDA device; --device cpu --small rehearses", flush=True)
        return 2
    module = importlib.import_module(f"benchmarks.gpu.{SUBCOMMANDS[name]}")
    try:
        module.measure(session)
    except sessions.BrokenContextError as error:
        sessions.exit_if_broken(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
