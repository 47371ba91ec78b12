"""The goals on one H200, and what a report says of them: README.md's table.

    python -m benchmarks.gpu.goals FOLDER/gpu.json

Limits are computed at 4.3 TB/s and 790 TFLOP/s. A figure that the report does not hold is "not
measured yet"; a rehearsal's report is refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.report import table

NOT_MEASURED: Final = "not measured yet"
_HEADING: Final = ["measure (H200, bfloat16, random weights)", "limit", "first goal", "goal",
                   "stretch", "measured"]  # fmt: skip


class Goal(NamedTuple):
    """A figure of the report, and what it should be. describe: from its measurement."""

    measure: str
    limit: str
    goals: tuple[str, str, str]
    measurement: str
    describe: Callable[[dict[str, Any]], str]

    def row(self, report: dict[str, Any]) -> list[str]:
        """Of the table."""
        if found := report["figures"].get(self.measurement):
            measured = self.describe(found)
        else:
            measured = "failed" if self.measurement in report["errors"] else NOT_MEASURED
        return [self.measure, self.limit, *self.goals, measured]


def _step(found: dict[str, Any]) -> str:
    return f"{found['step_ms']['median']:.2f} ms ({found['share_of_limit']:.0%})"


def _throughput(found: dict[str, Any]) -> str:
    found = found["nanocore"]
    return f"{found['output_tokens_per_s']['median']:,.0f} tok/s ({found['share_of_limit']:.0%})"


def _prefill(found: dict[str, Any]) -> str:
    return f"{found['tokens_per_s']:,.0f} tok/s ({found['share_of_limit']:.0%})"


def _against_fa3(found: dict[str, Any]) -> str:
    other = found["others"].get("fa3", {})
    beside = f", {other['times_of_ours']:.2f}x FA3" if "times_of_ours" in other else ""
    return f"{found['share_of_limit']:.0%} of the limit{beside}"


def _idle(found: dict[str, Any]) -> str:
    return f"{found['idle_ms']:.2f} ms"


def _ratio(found: dict[str, Any]) -> str:
    ratio = found["times_slower_than_ours"]
    return f"{ratio['median']:.2f}x ({ratio['min']:.2f}-{ratio['max']:.2f})"


GOALS: Final = (
    Goal("decode attention, B 256, context 1k", "4.3 TB/s", ("70 %", "80 %, >= 0.95x FA3", "88 %"),
         "attention/decode/g2/b256/ctx1024", _against_fa3),
    Goal("prefill attention, 4k, causal, beside FA3", "1.0", ("0.5x", "0.6x", "0.75x"),
         "attention/prefill/g2/4x4096", _against_fa3),
    Goal("0.6B: a step, B 1, context 1k", "0.305 ms", ("1.5 ms", "1.1 ms (28 %)", "0.8 ms"),
         "speed/qwen3-0.6b/decode/b1/ctx1024", _step),
    Goal("0.6B: a step, B 32, context 1k", "1.15 ms", ("2.6 ms", "2.0 ms (57 %)", "1.7 ms"),
         "speed/qwen3-0.6b/decode/b32/ctx1024", _step),
    Goal("0.6B: a step, B 256, context 1k", "7.4 ms", ("11.5 ms", "9.6 ms (77 %)", "8.8 ms"),
         "speed/qwen3-0.6b/decode/b256/ctx1024", _step),
    Goal("0.6B: nano-vllm's benchmark", "36.2k tok/s", ("16k (44 %)", "22k (61 %)", "25k (70 %)"),
         "bench/qwen3-0.6b", _throughput),
    Goal("8B: a step, B 1, context 1k", "3.56 ms", ("4.9 ms", "4.4 ms (81 %)", "4.1 ms"),
         "matrix/qwen3-8b/decode/b1/ctx1024", _step),
    Goal("8B: nano-vllm's benchmark", "12.7k tok/s", ("7.5k", "8.9k (70 %)", "9.8k"),
         "bench/qwen3-8b", _throughput),
    Goal("0.6B: 16k tokens of 1k prompts", "791k tok/s", ("35 %", "50 %", "60 %"),
         "speed/qwen3-0.6b/prefill/1024", _prefill),
    Goal("8B: 16k tokens of 1k prompts", "55.7k tok/s", ("60 %", "72 %", "80 %"),
         "matrix/qwen3-8b/prefill/1024", _prefill),
    Goal("0.6B: GPU idle in a decode step, B 32", "0", ("1.5 ms", "< 0.1 ms", "0"),
         "speed/qwen3-0.6b/idle/b32", _idle),
    Goal("time of nano-vllm over ours, FA3 under it", "-", ("1.0x", ">= 1.3x", "1.5x"),
         "nano-vllm/qwen3-0.6b", _ratio),
    Goal("time of transformers, sdpa, over ours", "-", ("8x", "12x", ""),
         "transformers/qwen3-0.6b", _ratio),
)  # fmt: skip


def goals_table(report: dict[str, Any]) -> str:
    """Markdown."""
    return table([_HEADING, *(goal.row(report) for goal in GOALS)])


def main(argv: list[str]) -> int:
    """Print the table; 2 if that is no report of a GPU."""
    report = json.loads(Path(argv[0]).read_text()) if len(argv) == 1 else {}
    if not report or report["small"] or report["device"]["name"] == "cpu":
        print("usage: python -m benchmarks.gpu.goals FOLDER/gpu.json, of a GPU", file=sys.stderr)
        return 2
    print(goals_table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
