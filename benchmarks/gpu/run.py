"""One subcommand of the measurements on a machine with one GPU.

    python -m benchmarks.gpu.run kernels --only attention --out FOLDER

The report is FOLDER/gpu-NAME.json, written after every measurement, and continued if it is there.
Nothing has to be installed but torch, triton, numpy, safetensors, msgspec and pyzmq. plan.py runs
all of them, each in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Final

from benchmarks.gpu.reports import FolderError

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


def main(argv: list[str] | None = None) -> int:
    """Run what is asked for, here; the exit code is 0 if it came to its end."""
    arguments = parse_arguments(argv)
    import torch

    from benchmarks.gpu import session as sessions

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
        print("torch sees no CUDA device; --device cpu --small rehearses", flush=True)
        return 2
    module = importlib.import_module(f"benchmarks.gpu.{SUBCOMMANDS[arguments.subcommand][0]}")
    try:
        module.measure(session)
    except sessions.BrokenContextError as error:
        sessions.exit_broken(error)
    except FolderError as error:
        print(f"benchmarks.gpu.run: {error}", flush=True)
        return 2
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu.run", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("subcommand", choices=SUBCOMMANDS)
    add_flags(parser)
    parser.add_argument("--limit-s", type=float, default=3600.0)
    parser.add_argument("--carried", type=Path, help="what carry.py prepared, unpacked here")
    parser.add_argument("--keep", type=Path, help="a second folder for the report")
    parser.add_argument("--only", default="", help="prefixes of measurements, by commas")
    arguments = parser.parse_args(argv)
    if arguments.carried is not None and not arguments.carried.is_dir():
        parser.error(f"--carried {arguments.carried}: not a folder")
    if arguments.subcommand == "table" and not arguments.out.is_dir():
        parser.error(f"--out {arguments.out}: not a folder; it has the reports")
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


def child_environment(changes: dict[str, str] | None = None) -> dict[str, str]:
    """Ours, with the repository on the path and output that is not held back."""
    environment = os.environ | (changes or {})
    path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    return environment | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


if __name__ == "__main__":
    sys.exit(main())
