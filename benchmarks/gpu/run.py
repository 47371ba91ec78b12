"""All measurements on a machine with one GPU, each bounded in time.

    python -m benchmarks.gpu.run env ceilings kernels=240 --out FOLDER

Each subcommand runs in a process of its own, so that a kernel that breaks the CUDA context, or an
engine that hangs, costs its own figures only; NAME=SECONDS bounds one of them. Reports are
FOLDER/gpu-NAME.json, written after every measurement, and continued if they are there. Nothing has
to be installed but torch, triton, numpy, safetensors, msgspec and pyzmq. `plan` runs all of it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
SUBCOMMANDS: Final = {
    "env": ("environment", "env"),
    "tests": ("gpu_tests", "tests"),
    "ceilings": ("ceilings", "env"),
    "kernels": ("kernel_times", "kernels"),
    "engine": ("engine_report", "engine"),
    "peers": ("peer_report", "peers"),
    "tune": ("tune", "tune"),
    "table": ("goals", "table"),
}
"""Name of each: the module whose `measure(session)` it is, and the report that it writes."""
ENDED: Final = "ended"
GRACE_S: Final = 20.0
"""What a subcommand may take beyond its limit, to finish what it is at."""
_FAMILY_VARIABLE: Final = "NANOCORE_GPU_BENCHMARK_FAMILY"


def main(argv: list[str] | None = None) -> int:
    """Run what is asked for; the exit code is 0 if all of it ended by itself."""
    arguments = parse_arguments(argv)
    if arguments.child:
        return _run_child(arguments)
    end_s = time.monotonic() + arguments.limit_s
    failed = []
    for name, limit_s in arguments.subcommands:
        left_s = min(end_s - time.monotonic(), limit_s)
        flags = {"--carried": arguments.carried, "--keep": arguments.keep, "--only": arguments.only}
        ending = run_subcommand(name, left_s, arguments, flags)
        if ending != ENDED:
            failed.append(f"{name}: {ending}")
        elif missing := read_json(arguments.out / report_name(name)).get("missing"):
            failed.append(f"{name}: missing: {', '.join(missing)}")
    if failed:
        print(f"not complete: {'; '.join(failed)}", flush=True)
    return 1 if failed else 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu.run",
        description=(__doc__ or "").partition("\n")[0],
        epilog=f"Subcommands: {', '.join(SUBCOMMANDS)}.",
    )
    parser.add_argument("subcommands", nargs="+", type=_subcommand, metavar="NAME[=SECONDS]")
    add_flags(parser)
    parser.add_argument("--limit-s", type=float, default=540.0, help="of the whole call")
    parser.add_argument("--carried", type=Path, help="what carry.py prepared, unpacked here")
    parser.add_argument("--keep", type=Path, help="a second folder for the reports")
    parser.add_argument("--only", default="", help="prefixes of measurements, by commas")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.carried is not None and not arguments.carried.is_dir():
        parser.error(f"--carried {arguments.carried}: not a folder")
    return arguments


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What a plan is told, too."""
    parser.add_argument("--out", type=Path, required=True, help="folder of the reports")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny shapes: a rehearsal")
    parser.add_argument("--commit", help="what is measured, where there is no repository; a file "
                        "that holds it will do")  # fmt: skip


def report_name(subcommand: str) -> str:
    """The file of its report."""
    return f"gpu-{SUBCOMMANDS[subcommand][1]}.json"


def _subcommand(text: str) -> tuple[str, float]:
    name, _, seconds = text.partition("=")
    if name not in SUBCOMMANDS:
        raise argparse.ArgumentTypeError(f"{name}: choose from {', '.join(SUBCOMMANDS)}")
    return name, float(seconds) if seconds else float("inf")


def run_subcommand(
    name: str,
    limit_s: float,
    arguments: argparse.Namespace,
    flags: dict[str, Any],
    changes: dict[str, str] | None = None,
    log: Path | None = None,
) -> str:
    """In a process of its own, started again if it broke in a measurement; says how it ended.

    arguments: see `add_flags`. flags: others. changes: to the environment. log: of its output.
    """
    end_s, broke = time.monotonic() + limit_s, None
    report = report_name(name)
    flags = {"--out": arguments.out, "--device": arguments.device, "--commit": arguments.commit,
             **flags}  # fmt: skip
    words = [str(word) for flag, value in flags.items() if value for word in (flag, value)]
    words += ["--small"] if arguments.small else []
    while (left_s := end_s - time.monotonic()) > 1:
        print(f"== {name}: {left_s:.0f} s", flush=True)
        command = [sys.executable, "-m", "benchmarks.gpu.run", name, "--child"]
        command += ["--limit-s", f"{left_s:.1f}", *words]
        code = run_bounded(command, left_s + GRACE_S, child_environment(changes), log)
        found = read_json(arguments.out / report)
        begun = found.get("begun")
        if code is None:
            if begun:  # not its fault: it can be tried again
                write_json(report, found | {"begun": None}, arguments.out, flags.get("--keep"))
            return "killed at its time limit"
        if code == 0 or begun is None or begun == broke:
            return f"ended with exit code {code}" if code else ENDED
        broke = begun  # another process records that, and goes on behind it
    return "its time is up"


def run_bounded(
    command: list[str], limit_s: float, environment: dict[str, str], log: Path | None = None
) -> int | None:
    """Exit code of a command; None if it was killed at the limit.

    What it started ends with it, in whatever process group or session that is.
    """
    family = f"{_FAMILY_VARIABLE}={uuid.uuid4().hex}"
    environment = environment | dict([family.split("=")])
    with log.open("ab") if log else nullcontext() as output:
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=output, stderr=output, process_group=0
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:  # of an interrupt, too
            _kill_family(family.encode())
            process.kill()
            process.wait()


def _kill_family(mark: bytes) -> None:
    """All processes that were started with this in their environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def child_environment(changes: dict[str, str] | None = None) -> dict[str, str]:
    """Ours, with the repository on the path and output that is not held back."""
    environment = os.environ | (changes or {})
    path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    return environment | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def read_json(path: Path) -> dict[str, Any]:
    """A report, empty if there is none."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write_json(name: str, data: dict[str, Any], *folders: Path | None) -> None:
    """A report in these folders: all of it or nothing."""
    for folder in filter(None, folders):
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f".{name}.{os.getpid()}"
        unfinished.write_text(json.dumps(data, indent=1) + "\n")
        unfinished.replace(folder / name)


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
        keep=arguments.keep.absolute() if arguments.keep else None,
        small=arguments.small,
        carried=arguments.carried.absolute() if arguments.carried else None,
        commit=commit,
        deadline_s=time.monotonic() + arguments.limit_s,
        only=tuple(filter(None, arguments.only.split(","))),
    )
    if session.on_gpu and not torch.cuda.is_available():
        print(f"{name}: torch sees no CUDA device; --device cpu --small rehearses", flush=True)
        return 2
    module = importlib.import_module(f"benchmarks.gpu.{SUBCOMMANDS[name][0]}")
    try:
        module.measure(session)
    except sessions.BrokenContextError as error:
        sessions.exit_broken(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
