"""What the engine costs beside the model, next to vLLM's cost where vLLM is installed.

    nice -n -15 python benchmarks/overhead.py [--vllm-python PATH] [--passes 3] [--repeats 5]

Runs ours and vLLM's measurements alternately, each in a process of its own, prints medians, goals
and ratios, and writes benchmarks/results/overhead.json. The keys are explained in
`overhead_engine.py` and `overhead_client.py`; `overhead_vllm.py` measures the same of vLLM.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from machine import describe_run, nice_sessions, spread, write_report
from overhead_client import both_processes, client_us_per_token, outputs_us, submit_us
from overhead_engine import admit_us, blocks_us, core_us, step_us
from sample_text import demo_folder

RESULTS: Final = Path(__file__).parent / "results" / "overhead.json"
Figures = dict[str, list[float]]


class Row(NamedTuple):
    """A line of the table. goal: microseconds on a two-core machine, at most."""

    key: str
    text: str
    goal: float


ROWS: Final = [
    Row("step_1", "schedule + update, steady decode step, 1 request", 23),
    Row("step_16", "16 requests", 40),
    Row("step_64", "64 requests", 90),
    Row("step_256", "256 requests", 250),
    Row("step_1024", "1024 requests", 800),
    Row("admit_128", "admission, 128-token prompt", 30),
    Row("admit_32768_cold", "admission, 32k-token prompt, cold", 1200),
    Row("admit_32768_hit", "admission, 32k-token prompt, cached", 1200),
    Row("blocks_8_cold", "allocate + free per block, 8 at a time", 0.6),
    Row("blocks_128_cold", "128 at a time", 0.3),
    Row("blocks_8_evict", "8 at a time, evicting", 0.7),
    Row("blocks_128_evict", "128 at a time, evicting", 0.4),
    Row("submit_2048", "request of 2,048 tokens: encode + decode", 10),
    Row("submit_32768", "request of 32,768 tokens: encode + decode", 60),
    Row("outputs_256", "outputs of a step, 256 requests: encode + decode", 10),
    Row("outputs_1024", "outputs of a step, 1024 requests: encode + decode", 20),
    Row("client_256", "client side per token, 256 streams, detokenized", 2.0),
    Row("core_256", "engine-core step without a model, 256 requests", 350),
    Row("both_core_cpu_256", "both processes, 256 streams: engine CPU per token", 1.2),
    Row("both_client_cpu_256", "both processes, 256 streams: client CPU per token", 2.5),
]


def measure(repeats: int, keys: list[str]) -> Figures:
    """Our figures."""
    simple: dict[str, Callable[[], list[float]]] = {
        **{f"step_{n}": lambda n=n: step_us(n, repeats) for n in (1, 16, 64, 256, 1024)},
        "admit_128": lambda: admit_us(128, repeats),
        "admit_32768_cold": lambda: admit_us(32768, repeats),
        "admit_32768_hit": lambda: admit_us(32768, repeats, cached=True),
        **{f"blocks_{n}_cold": lambda n=n: blocks_us(n, repeats) for n in (8, 128)},
        **{f"blocks_{n}_evict": lambda n=n: blocks_us(n, repeats, evict=True) for n in (8, 128)},
        **{f"submit_{n}": lambda n=n: submit_us(n, repeats) for n in (2048, 32768)},
        **{f"outputs_{n}": lambda n=n: outputs_us(n, repeats) for n in (256, 1024)},
        "client_256": lambda: client_us_per_token(256, repeats),
        "core_256": lambda: core_us(256, repeats),
    }  # type: ignore[misc]
    figures = {key: run() for key, run in simple.items() if key in keys}
    if "both_core_cpu_256" in keys or "both_client_cpu_256" in keys:
        both = both_processes(256, 128, repeats)
        figures["both_core_cpu_256"] = both["core_cpu_us_per_token"]
        figures["both_client_cpu_256"] = both["client_cpu_us_per_token"]
        figures["tokens_per_chunk"] = both["tokens_per_chunk"]
    return figures


def run_child(command: list[str]) -> dict[str, Any]:
    """The JSON that a measuring process prints."""
    answer: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=-1).stdout)
    return answer


def add(figures: Figures, more: Figures) -> None:
    """Pool the repeats of another pass."""
    for key, values in more.items():
        figures.setdefault(key, []).extend(values)


def summary(figures: Figures) -> dict[str, dict[str, Any]]:
    """Median and range of each."""
    return {key: spread([round(value, 4) for value in values]) for key, values in figures.items()}


def print_table(ours: Figures, peer: Figures) -> None:
    """Medians beside goals and the peer's."""
    print(f"{'median us (range)':52}{'nanocore':>24}{'goal':>8}{'vLLM':>10}{'ratio':>8}")
    for key, text, goal in ROWS:
        if key not in ours:
            continue
        median = statistics.median(ours[key])
        span = f"{median:.4g} ({min(ours[key]):.3g}-{max(ours[key]):.3g})"
        line = f"{text:52}{span:>24}{goal:>8g}"
        if key in peer:
            theirs = statistics.median(peer[key])
            line += f"{theirs:>10.4g}{theirs / median:>7.1f}x"
        print(line)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="cost beside the model, ours and vLLM's")
    parser.add_argument("--vllm-python", help="interpreter that has vLLM (this one, if it has)")
    parser.add_argument("--passes", type=int, default=3, help="ours and the peer's, alternately")
    parser.add_argument("--repeats", type=int, default=5, help="of each figure in a pass")
    parser.add_argument("--only", default="", help="keys, separated by commas")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--as-child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    keys = arguments.only.split(",") if arguments.only else [row.key for row in ROWS]
    if arguments.as_child:
        print(json.dumps({"figures": measure(arguments.repeats, keys)}))
        return

    options = ["--repeats", str(arguments.repeats), "--only", ",".join(keys)]
    vllm_python = arguments.vllm_python
    if vllm_python is None and importlib.util.find_spec("vllm"):
        vllm_python = sys.executable
    script = Path(__file__).resolve()
    peer_script = str(script.with_name("overhead_vllm.py"))
    ours: Figures = {}
    peer: Figures = {}
    peer_versions: dict[str, Any] = {}
    with nice_sessions():
        for number in range(arguments.passes):
            print(f"pass {number + 1} of {arguments.passes}", file=sys.stderr)
            add(ours, run_child([sys.executable, str(script), "--as-child", *options])["figures"])
            if vllm_python:
                model = ["--model", str(demo_folder())]
                answer = run_child([vllm_python, peer_script, *model, *options])
                add(peer, answer["figures"])
                peer_versions = answer["versions"]
    print_table(ours, peer)
    record = {
        **describe_run(),
        "vllm_versions": peer_versions,
        "unit": "microseconds; tokens_per_chunk is a count",
        "nanocore": summary(ours),
        "vllm": summary(peer),
    }
    write_report(arguments.out, record)


if __name__ == "__main__":
    main()
