"""`nanocore bench startup`: how long an engine takes from its launch until it serves.

Cold: with empty caches of compiled kernels, and the model's files not in memory (where they are a
folder here; others of its processes may hold pages of them there). Warm: as the last one left it.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from nanocore.bench.offline import OwnEngine, build_parser, parse, percentiles_of, write_json
from nanocore.bench.parser import BenchParser, at_least
from nanocore.demo_model import demo_model_folder

CACHE_VARIABLES: Final = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
"""Where the libraries of an engine keep what they compile."""


def run(arguments: list[str]) -> int:
    """Measure and report; the exit code."""
    given, engine = parse(startup_parser(), arguments)
    cold = []
    for _ in tqdm(range(given.num_iters_cold), desc="Cold startup iterations"):
        with cold_caches(model_folder(engine.model)):
            cold.append(_start(engine))
    for _ in tqdm(range(given.num_iters_warmup), desc="Warmup iterations"):
        _start(engine)
    bar = tqdm(range(given.num_iters_warm), desc="Warm startup iterations")
    warm = [_start(engine) for _ in bar]
    result: dict[str, Any] = {}
    for phase, times in (("cold", cold), ("warm", warm)):
        if not times:
            continue
        found = percentiles_of(times)
        print(f"{phase.upper()} STARTUP:\nAvg startup time: {found.mean:.2f} seconds")
        print("Startup time percentiles:")
        for number, value in found.percentiles.items():
            print(f"  {number}%: {value:.2f} seconds")
        result[f"avg_{phase}_startup_time"] = found.mean
        result[f"{phase}_startup_times"] = times
        result[f"{phase}_startup_percentiles"] = found.percentiles
    write_json(given.output_json, result)
    return 0


def startup_parser() -> BenchParser:
    """The flags."""
    parser = build_parser("startup", "Measure how long an engine takes to start.")
    for flag, default, text in (
        ("--num-iters-cold", 3, "starts with cold caches"),
        ("--num-iters-warmup", 1, "starts between, which do not count"),
        ("--num-iters-warm", 3, "starts with warm caches"),
    ):
        parser.add_argument(flag, type=at_least(0), default=default, metavar="N",
                            help=f"{text} (default: {default})")  # fmt: skip
    return parser


def model_folder(model: str | None) -> Path | None:
    """Of a model that is a folder here, or of the demo model."""
    folder = demo_model_folder() if model is None else Path(model)
    return folder if folder.is_dir() else None


@contextmanager
def cold_caches(folder: Path | None) -> Iterator[None]:
    """Forget the folder's files, and let engines compile into empty folders within the block."""
    for path in sorted(folder.iterdir()) if folder is not None else ():
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = {name: os.environ.get(name) for name in CACHE_VARIABLES}
    with tempfile.TemporaryDirectory(prefix="nanocore-cold-") as empty:
        try:
            for name in CACHE_VARIABLES:
                os.environ[name] = str(Path(empty) / name.lower())
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def _start(engine: OwnEngine) -> float:
    start_s = time.perf_counter()
    with engine.launch():
        return time.perf_counter() - start_s
