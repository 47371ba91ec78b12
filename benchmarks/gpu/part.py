"""One part of the day, in this process: what day.py starts, or somebody who wants that part alone.

    python -m benchmarks.gpu.part attention --out FOLDER --only attention/decode --limit-s 100

A part is a module's `measure(results, name)`; the names of what it measures begin with its own.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.gpu.results import Results, Session


@dataclass(frozen=True, slots=True)
class Part:
    """limit_s: of a day. needs: archives that must have been carried, see carry.py."""

    name: str
    module: str
    limit_s: float
    needs: tuple[str, ...] = ()


PARTS: Final = (
    Part("env", "environment", 60),
    Part("tests", "gpu_tests", 120),
    Part("speed", "engine_speed", 110),
    Part("check", "engine_checks", 130),
    Part("bench", "peers", 130),
    Part("attention", "kernels", 200),
    Part("matrix", "engine_speed", 300),
    Part("nano-vllm", "peers", 200, ("nano-vllm", "base")),
    Part("transformers", "peers", 150),
    Part("products", "kernels", 120),
)
"""In the order of what they tell."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What a day is told, too."""
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny shapes: a rehearsal")


def main(argv: Sequence[str] | None = None) -> int:
    """0 if it came to its end, whatever failed in it; 2 if there is no GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    modules = {part.name: part.module for part in PARTS}
    parser.add_argument("part", choices=modules)
    parser.add_argument("--out", type=Path, nargs="+", required=True, help="folders of the report")
    parser.add_argument("--carried", type=Path, help="what day.py unpacked")
    parser.add_argument("--limit-s", type=float, default=3600.0)
    parser.add_argument("--only", default="", help="prefixes of names, by commas")
    add_flags(parser)
    arguments = parser.parse_args(argv)
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA device; --device cpu --small rehearses", flush=True)
        return 2
    session = Session(
        folders=tuple(folder.absolute() for folder in arguments.out),
        device=torch.device(arguments.device),
        small=arguments.small,
        carried=arguments.carried.absolute() if arguments.carried else None,
        deadline_s=time.monotonic() + arguments.limit_s,
        only=tuple(filter(None, arguments.only.split(","))),
    )
    module = importlib.import_module(f"benchmarks.gpu.{modules[arguments.part]}")
    module.measure(Results(session), arguments.part)
    return 0


if __name__ == "__main__":
    sys.exit(main())
