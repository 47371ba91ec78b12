"""What the engine costs beside the model, next to an older nanocore and next to vLLM.

    python benchmarks/overhead.py [--only step,admit] [--before DIR] [--vllm-python PATH]

Measures everything alternately, each side and pass in a process of its own, prints medians and
ratios, and writes benchmarks/results/overhead.json. What the keys measure is said in
`overhead_engine.py` and `overhead_wire.py`; `overhead_vllm.py` measures steps and admission of
vLLM. --before names a checkout of another commit, with its kernels compiled, whose own overhead.py
is run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from overhead_engine import admit_us, step_us
from overhead_wire import client_us_per_token, demo_folder, outputs_us, submit_us
from report import describe_run, positive, spread, table, with_range, write_report

RESULTS: Final = Path(__file__).parent / "results"
OURS: Final = "nanocore"
VLLM_KEYS: Final = ("step", "admit")
Figures = dict[str, list[float]]


class Case(NamedTuple):
    """A line of the table. measure: from the number of repeats to microseconds of each."""

    text: str
    measure: Callable[[int], list[float]]


CASES: Final = {
    "step_1": Case("schedule + update, steady decode step, 1 request", lambda n: step_us(1, n)),
    "step_16": Case("16 requests", lambda n: step_us(16, n)),
    "step_64": Case("64 requests", lambda n: step_us(64, n)),
    "step_256": Case("256 requests", lambda n: step_us(256, n)),
    "step_1024": Case("1024 requests", lambda n: step_us(1024, n)),
    "admit_128": Case("admission, 128-token prompt", lambda n: admit_us(128, n)),
    "admit_32768_cold": Case("32k-token prompt, cold", lambda n: admit_us(32768, n)),
    "admit_32768_hit": Case("32k-token prompt, cached", lambda n: admit_us(32768, n, cached=True)),
    "submit_2048": Case("request of 2,048 tokens: encode + decode", lambda n: submit_us(2048, n)),
    "submit_32768": Case("32,768 tokens", lambda n: submit_us(32768, n)),
    "outputs_256": Case("outputs of a step, 256 requests: encode + decode",
                        lambda n: outputs_us(256, n)),
    "outputs_1024": Case("1024 requests", lambda n: outputs_us(1024, n)),
    "client_256": Case("client side per token, 256 streams, to text",
                       lambda n: client_us_per_token(256, n)),
}  # fmt: skip


def main() -> None:
    """Measure, print and write."""
    arguments = _parse_arguments()
    if arguments.as_child:
        keys = [key for key in arguments.only if key in CASES]  # a later commit may ask for more
        figures = {key: CASES[key].measure(arguments.repeats) for key in keys}
        print(json.dumps({"figures": figures}))
        return
    sides = _sides(arguments)
    figures: dict[str, Figures] = {name: {} for name in sides}
    versions: dict[str, Any] = {}
    for number in range(arguments.passes):
        print(f"pass {number + 1} of {arguments.passes}", file=sys.stderr)
        for name, (command, environment) in sides.items():
            answer = _run_child(command, environment)
            versions[name] = answer.get("versions")
            for key, values in answer["figures"].items():
                figures[name].setdefault(key, []).extend(values)
    report = {
        **describe_run(),
        "vllm_versions": versions.get("vllm"),
        "unit": "microseconds; submit, outputs and client of CPU time, the others on the wall",
        **{name: {key: spread(values) for key, values in own.items()}
           for name, own in figures.items()},
    }  # fmt: skip
    print(_table(figures))
    write_report(arguments.out, report)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CASES),
                        metavar="A,B", help="beginnings of keys")  # fmt: skip
    parser.add_argument("--before", type=Path, metavar="DIR", help="a checkout to compare with")
    parser.add_argument("--vllm-python", metavar="PATH", help="interpreter that has vLLM")
    parser.add_argument("--passes", type=positive, default=3, help="of all sides, alternately")
    parser.add_argument("--repeats", type=positive, default=5, help="of each figure in a pass")
    parser.add_argument("--out", type=Path, default=RESULTS / "overhead.json")
    parser.add_argument("--as-child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.before and not (arguments.before / "benchmarks" / "overhead.py").exists():
        parser.error(f"--before {arguments.before}: no checkout of nanocore")
    if arguments.vllm_python and shutil.which(arguments.vllm_python) is None:
        parser.error(f"--vllm-python {arguments.vllm_python}: not an executable file")
    if not arguments.as_child:
        arguments.only = _keys(arguments.only, parser)
    return arguments


def _keys(names: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """The keys that are meant, in the table's order."""
    if unknown := [name for name in names if not any(_is_meant(key, name) for key in CASES)]:
        parser.error(f"--only: unknown {', '.join(unknown)}; known: {', '.join(CASES)}")
    return [key for key in CASES if any(_is_meant(key, name) for name in names)]


def _is_meant(key: str, name: str) -> bool:
    return f"{key}_".startswith(f"{name}_")


def _sides(arguments: argparse.Namespace) -> dict[str, tuple[list[str], dict[str, str]]]:
    """How each side is measured: a command, and what its environment has besides."""
    options = ["--repeats", str(arguments.repeats), "--only"]
    script = Path(__file__).resolve()

    def ours(folder: Path) -> list[str]:
        path = str(folder / "benchmarks" / script.name)
        return [sys.executable, path, "--as-child", *options, ",".join(arguments.only)]

    sides: dict[str, tuple[list[str], dict[str, str]]] = {OURS: (ours(script.parents[1]), {})}
    if arguments.before:
        other = arguments.before.resolve()
        sides["before"] = (ours(other), {"PYTHONPATH": str(other)})
    if arguments.vllm_python:
        shared = [key for key in arguments.only if any(_is_meant(key, n) for n in VLLM_KEYS)]
        command = [arguments.vllm_python, str(script.with_name("overhead_vllm.py"))]
        sides["vllm"] = (
            [*command, "--model", str(demo_folder()), *options, ",".join(shared)], {}
        )  # fmt: skip
    return sides


def _run_child(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """The JSON that a measuring process prints."""
    result = subprocess.run(command, check=False, stdout=-1, env=os.environ | environment)
    if result.returncode:
        sys.exit(f"overhead.py: {' '.join(command)} ended with exit code {result.returncode}")
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def _table(figures: dict[str, Figures]) -> str:
    """Medians with their range, and what the others take, as multiples of it."""
    others = [name for name in figures if name != OURS]
    rows = [["median us (range)", OURS, *(f"{name}, times" for name in others)]]
    for key, values in figures[OURS].items():
        ratios = [
            f"{median(figures[name][key]) / median(values):.2f}" if key in figures[name] else ""
            for name in others
        ]
        rows.append([CASES[key].text, with_range(spread(values)), *ratios])
    return table(rows)


if __name__ == "__main__":
    main()
