"""From the start of a process to the first token, and where the time goes.

    nice -n -15 python benchmarks/startup.py [--starts 10]

Each start is a fresh Python process that imports the SDK, launches an engine with the demo model,
and asks for one token of a chat (`startup_client.py`). It tells when it is where; the engine's own
phases are known by the lines it logs, which it writes as each one ends. Beside each start, as the
part that is not ours, a fresh process imports torch and no more. One start warms up: it fills the
file cache, and writes the bytecode of our modules, even where the environment would not have it.
Writes benchmarks/results/startup.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from machine import describe_run, nice_sessions, spread, write_report

RESULTS: Final = Path(__file__).parent / "results" / "startup.json"
CLIENT: Final = Path(__file__).parent / "startup_client.py"
GOAL_S: Final = 3.0
WARM_UP: Final = 1  # starts that are not counted
PHASES: Final = {
    "imported": "interpreter, and import of the SDK",
    "engine runs": "engine: interpreter, and import of torch and the engine",
    "model known": "engine: endpoint, and the model's configuration",
    "loaded": "engine: build the model, and load",
    "allocated": "engine: allocate the KV cache",
    "ready": "engine: files for clients, threads",
    "connected": "client: connect",
    "first token": "tokenizer, prompt and first step",
}
"""What ends each phase, in the order in which they come, and what the phase is."""
ENGINE_LINES: Final = {
    "no --model given": "engine runs",
    "nanocore ": "model known",
    "load ": "loaded",
    "kv cache ": "allocated",
    "ready in ": "ready",
}
"""How the lines begin that the engine logs at these moments."""


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


def time_start() -> dict[str, float]:
    """Seconds of one start's phases, and in all ("first_token_s")."""
    start_s = time.monotonic()
    client = subprocess.Popen(
        [sys.executable, str(CLIENT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(),
    )
    assert client.stdout is not None
    assert client.stderr is not None
    times_s: dict[str, float] = {}
    log: list[str] = []

    def read_log() -> None:
        for line in client.stderr or ():
            now_s = time.monotonic()
            log.append(line)
            message = line.partition(") ")[2]  # after "(engine pid=1)"
            for beginning, event in ENGINE_LINES.items():
                if message.startswith(beginning):
                    times_s.setdefault(event, now_s)

    with client:
        reader = threading.Thread(target=read_log)
        reader.start()
        for line in client.stdout:
            told = json.loads(line)
            times_s[told["event"]] = told["time_s"]
        reader.join()
    missing = [event for event in PHASES if event not in times_s]
    if client.returncode or missing:
        raise RuntimeError(
            f"the start ended with exit code {client.returncode}, without {missing}:\n"
            + "".join(log)
        )
    moments = [start_s, *(times_s[event] for event in PHASES)]
    phases = {
        event: end_s - begin_s
        for event, (begin_s, end_s) in zip(PHASES, pairwise(moments), strict=True)
    }
    return {**phases, "first_token_s": moments[-1] - start_s}


def time_import(module: str) -> float:
    """Seconds of a process that imports this and ends."""
    start_s = time.monotonic()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True, env=_environment())
    return time.monotonic() - start_s


def measure(num_starts: int) -> dict[str, dict[str, Any]]:
    """Median and range of every phase, of the whole, and of importing torch alone."""
    figures: dict[str, list[float]] = {}
    for _ in range(WARM_UP):
        time_start()
    for _ in range(num_starts):
        for name, seconds in {**time_start(), "import_torch_s": time_import("torch")}.items():
            figures.setdefault(name, []).append(round(seconds, 4))
    return {name: spread(values) for name, values in figures.items()}


def table(summary: dict[str, dict[str, Any]]) -> str:
    """A line for each phase, and for the whole."""
    labels = {
        **PHASES,
        "first_token_s": "process start to first token",
        "import_torch_s": "beside it: a process that imports torch",
    }
    lines = ["| | ms, median | range |", "|---|---|---|"]
    for name, label in labels.items():
        middle, low, high = (summary[name][key] * 1e3 for key in ("median", "min", "max"))
        lines.append(f"| {label} | {middle:.0f} | {low:.0f}-{high:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.starts < 1:
        parser.error("--starts: at least 1")
    with nice_sessions():
        summary = measure(arguments.starts)
    print(table(summary))
    whole = summary["first_token_s"]["median"]
    print(f"goal: {GOAL_S} s, {'met' if whole <= GOAL_S else 'missed'}: {whole:.2f} s")
    head = {**describe_run(), "model": "demo", "goal_s": GOAL_S}
    write_report(arguments.out, {**head, "unit": "seconds", "phases": PHASES, "figures": summary})


if __name__ == "__main__":
    main()
