"""One part of the day, in this process: what day.py starts, or somebody who wants that part alone.

    python -m benchmarks.gpu.part attention --out FOLDER --only attention/decode --limit-s 100

A part is a module's `measure(results, name)`; the names of what it measures begin with its own.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.gpu.results import Results, Session


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the day.

    limit_s: the most it may take. call: the first or the second one of the day; 0 is neither, so
    that it runs only where it is named. needs: archives that must have been carried, see carry.py.
    needs_engine: it says nothing where no engine starts.
    """

    name: str
    module: str
    limit_s: float
    call: int
    needs: tuple[str, ...] = ()
    needs_engine: bool = False


_VLLM: Final = ("base", "vllm-first", "vllm-second")
PARTS: Final = (
    Part("env", "environment", 40, 1),
    Part("smoke", "smoke", 45, 1),
    Part("speed", "engine_speed", 60, 1, needs_engine=True),
    Part("bench", "peers", 60, 1, needs_engine=True),
    Part("tests", "gpu_tests", 60, 1),
    Part("attention", "kernels", 40, 1),
    Part("check", "engine_checks", 45, 2, needs_engine=True),
    Part("nano-vllm", "peers", 130, 2, ("nano-vllm", "base"), needs_engine=True),
    Part("large", "engine_speed", 45, 2, needs_engine=True),
    Part("products", "kernels", 30, 2),
    Part("states", "kernels", 25, 2),
    Part("variants", "engine_speed", 45, 2, needs_engine=True),
    Part("bench-large", "peers", 60, 0, needs_engine=True),
    Part("tiles", "tile_shapes", 90, 0),
    Part("transformers", "peers", 130, 0, needs_engine=True),
    Part("vllm-inductor", "peers", 320, 0, _VLLM, needs_engine=True),
    Part("vllm", "peers", 300, 0, _VLLM, needs_engine=True),
)
"""In the order of what they tell. The two calls of a day: README.md says what they may take."""


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
    summary_help = "where a line is written for each measurement"
    parser.add_argument("--summary-fd", type=int, default=1, help=summary_help)
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
        summary_fd=arguments.summary_fd,
    )
    results, compiled = Results(session), count_compilations()
    module = importlib.import_module(f"benchmarks.gpu.{modules[arguments.part]}")
    module.measure(results, arguments.part)
    if compiled:
        results.say(f"{arguments.part}: Triton's kernels: {dict(compiled)}")
    return 0


def count_compilations() -> Counter[str]:
    """Counts this process's Triton kernels from now on, as "in the cache" and as "compiled"."""
    counts: Counter[str] = Counter()
    try:
        from triton import knobs
    except ImportError:
        return counts  # a CPU without Triton has nothing to compile

    def count(*, cache_hit: bool, **_: object) -> None:
        counts["in the cache" if cache_hit else "compiled"] += 1

    knobs.compilation.listener = count
    return counts


if __name__ == "__main__":
    sys.exit(main())
