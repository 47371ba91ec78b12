"""What every benchmark reports: which code ran where, its figures with their spread, as JSON.

    report = {**describe_run(), "figures": {"wall_s": spread(values)}}
    write_report(path, report)
    print(table([["", "wall s"], ["W1", with_range(report["figures"]["wall_s"])]]))

The one owner of what results/*.json have in common. It imports nothing beyond the standard library,
so that every interpreter and every folder of benchmarks can use it. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, Final

COMMIT_VARIABLE: Final = "NANOCORE_COMMIT"
"""Names the commit where the code that runs is no repository."""

_REPOSITORY = Path(__file__).resolve().parent.parent


def positive(text: str) -> int:
    """A count of a command line, from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above 0")
    return number


def describe_run(packages: Sequence[str] = ("nanocore", "torch", "numpy")) -> dict[str, Any]:
    """Which code ran where, when, and how: the head of every report.

    packages: whose versions decide speed; None where one is not installed. `nice` and
    `load_average` say how quiet the machine was when it began.
    """
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        versions[name] = None
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    host = {
        "cpu": _proc_value("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "memory_gib": round(int(_proc_value("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "nice": os.nice(0),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "load_average": os.getloadavg(),
    }
    # Absolute paths are cut to their last component.
    words = [re.sub(r"(^|[=\s])/(?:[^/\s]*/)*(?=[^/])", r"\1", word) for word in sys.argv]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python {shlex.join(words)}",
        **describe_commit(),
        "host": host,
        "versions": versions,
    }


def describe_commit() -> dict[str, Any]:
    """The commit, and whether the code that was measured differs from it.

    Where COMMIT_VARIABLE is set, or the code is no repository, though its folder may be within
    another one, the commit is what the variable says, and nothing is known of changes. (A copy of
    a working tree may have a repository whose last commit is an older one.)
    """
    named = os.environ.get(COMMIT_VARIABLE) or None
    top = _git("rev-parse", "--show-toplevel")
    if named or top is None or Path(top).resolve() != _REPOSITORY:
        return {"commit": named, "dirty": None}
    changed = _git("status", "--porcelain", "--", "nanocore", "benchmarks", ":!benchmarks/results")
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if changed is None else changed != "",
    }


def spread(values: Sequence[float], digits: int = 4) -> dict[str, Any]:
    """Median and range of one figure, and its repetitions; all rounded."""
    kept = [round(value, digits) for value in values]
    middle = round(median(kept), digits)
    return {"median": middle, "min": min(kept), "max": max(kept), "values": kept}


def with_range(figure: dict[str, Any], digits: int | None = None) -> str:
    """A figure of `spread` for people: the median, and the range where there is one."""
    if digits is None:
        digits = 2 if figure["max"] < 20 else 0
    middle, low, high = (f"{figure[key]:,.{digits}f}" for key in ("median", "min", "max"))
    return middle if low == high else f"{middle} ({low}-{high})"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown of a head and rows, aligned: the first column to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        lines.append(f"| {' | '.join(cells)} |")
    lines.insert(1, f"|{'---|' * len(widths)}")
    return "\n".join(lines)


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write what was measured as JSON, all of it or nothing; makes the folder.

    Raises:
        OSError: the folder or the file cannot be written; what was there is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(report, indent=1) + "\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)  # there only if it failed


def _proc_value(path: str, key: str) -> str:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return "unknown"


def _git(*arguments: str) -> str | None:
    """Output of a git command; None where there is no repository, or no git."""
    command = ["git", "-C", str(_REPOSITORY), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
