"""The goals on one H100 and one H200, and what a report says of them: README.md's table.

    python -m benchmarks.gpu.goals FOLDER/gpu.json ...

Limits are computed at the rates of `shapes.CARDS`; goals are shares of them, and are shown as an
H100's figures. What was measured is beside its share of the limit at the rates of the very card
that it was measured on. A figure that the report does not hold is "not measured yet"; a rehearsal's
report is refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.gpu.shapes import CARDS, MODELS, Model, Rates, rates_of
from benchmarks.report import table
from benchmarks.workloads import nano_vllm_workload

NOT_MEASURED: Final = "not measured yet"
_HEADING: Final = ["measure (bfloat16, random weights)", "limit H100", "limit H200", "goal H100",
                   "stretch H100"]  # fmt: skip
_FORMATS: Final = {
    "ms": "{:.3g} ms", "tok/s": "{:,.0f} tok/s", "TB/s": "{:.2f} TB/s", "x": "{:.2f}x"
}  # fmt: skip
_SMALL, _LARGE = MODELS


class Goal(NamedTuple):
    """A figure of the report, and what it should be.

    limit: the best that a card of these rates can do, in this unit; None where another program is
    what it is compared with. goals: the goal and a further one, as shares of the limit, or as text.
    value: of its measurement, in this unit. note: what is said beside it.
    """

    measure: str
    limit: Callable[[Rates], float] | None
    unit: str
    goals: tuple[float | str, float | str]
    measurement: str
    value: Callable[[dict[str, Any]], float]
    note: Callable[[dict[str, Any]], str] = lambda _: ""

    def row(self, reports: Sequence[dict[str, Any]]) -> list[str]:
        """Of the table, with a cell for each report."""
        limits = ["-" if self.limit is None else self._format(self.limit(CARDS[card]))
                  for card in ("H100", "H200")]  # fmt: skip
        measured = map(self._measured, reports)
        return [self.measure, *limits, *map(self._describe_goal, self.goals), *measured]

    def _measured(self, report: dict[str, Any]) -> str:
        if found := report["figures"].get(self.measurement):
            return self._describe(found, rates_of(report["figures"], report["device"]["name"]))
        return "failed" if self.measurement in report["errors"] else NOT_MEASURED

    def _describe(self, found: dict[str, Any], rates: Rates) -> str:
        """What was measured, and its share of what this card can do."""
        value = self.value(found)
        text = self._format(value)
        if self.limit is not None:
            limit = self.limit(rates)
            text += f" ({limit / value if self.unit == 'ms' else value / limit:.0%})"
        return text + self.note(found)

    def _describe_goal(self, goal: float | str) -> str:
        if isinstance(goal, str):
            return goal
        assert self.limit is not None
        limit = self.limit(CARDS["H100"])
        value = limit / goal if self.unit == "ms" else limit * goal
        return f"{self._format(value)} ({goal:.0%})"

    def _format(self, value: float) -> str:
        return _FORMATS[self.unit].format(value)


def _decode_ms(model: Model, batch: int, rates: Rates) -> float:
    """Least milliseconds of a step of so many rows, each with a context of 1,024 tokens."""
    return 1e3 * model.decode_step_s(batch, batch * 1024, rates)


def _prompt_rate(model: Model, rates: Rates) -> float:
    return 1024 / model.prefill_s([1024], rates)


def _workload_rate(model: Model, rates: Rates) -> float:
    requests = nano_vllm_workload(model.shape.vocab_size)
    num_outputs = sum(request.num_output_tokens for request in requests)
    return num_outputs / model.workload_s(requests, rates)


def _step_ms(found: dict[str, Any]) -> float:
    return float(found["step_ms"]["median"])


def _our_rate(found: dict[str, Any]) -> float:
    return float(found["nanocore"]["output_tokens_per_s"]["median"])


def _tokens_per_s(found: dict[str, Any]) -> float:
    return float(found["tokens_per_s"])


def _beside_fa3(found: dict[str, Any]) -> float:
    return float(found["others"].get("fa3", {}).get("times_of_ours", "nan"))


def _fa3_note(found: dict[str, Any]) -> str:
    return f", {_beside_fa3(found):.2f}x FA3"


def _ratio(found: dict[str, Any]) -> float:
    return float(found["times_slower_than_ours"]["median"])


def _ratio_note(found: dict[str, Any]) -> str:
    ratio = found["times_slower_than_ours"]
    if len(ratio["values"]) == 1:
        return ", one round"
    return f" ({ratio['min']:.2f}-{ratio['max']:.2f})"


def _decode_goal(model: Model, batch: int, part: str, goal: float, stretch: float) -> Goal:
    name = model.name.removeprefix("qwen3-").upper()
    return Goal(
        f"{name}: a step, B {batch}, context 1k", partial(_decode_ms, model, batch), "ms",
        (goal, stretch), f"{part}/{model.name}/decode/b{batch}/ctx1024", _step_ms,
    )  # fmt: skip


GOALS: Final = (
    Goal("decode attention, B 256, context 1k", lambda rates: rates.bytes / 1e12, "TB/s",
         (0.8, 0.88), "attention/decode/g2/b256/ctx1024", lambda found: found["gb_per_s"] / 1e3,
         _fa3_note),
    Goal("prefill attention, 4k, causal, beside FA3", None, "x", ("0.6x", "0.75x"),
         "attention/prefill/g2/4x4096", _beside_fa3),
    _decode_goal(_SMALL, 1, "speed", 0.36, 0.5),
    _decode_goal(_SMALL, 32, "speed", 0.59, 0.68),
    _decode_goal(_SMALL, 256, "speed", 0.77, 0.84),
    Goal("0.6B: nano-vllm's benchmark", partial(_workload_rate, _SMALL), "tok/s", (0.61, 0.7),
         "bench/qwen3-0.6b", _our_rate),
    Goal("0.6B: 16k tokens of 1k prompts", partial(_prompt_rate, _SMALL), "tok/s", (0.5, 0.6),
         "speed/qwen3-0.6b/prefill/1024", _tokens_per_s),
    Goal("0.6B: GPU idle in a decode step, B 32", None, "ms", ("< 0.1 ms", "0"),
         "speed/qwen3-0.6b/idle/b32", lambda found: max(0.0, found["idle_ms"])),
    _decode_goal(_LARGE, 1, "large", 0.81, 0.87),
    _decode_goal(_LARGE, 32, "large", 0.78, 0.85),
    Goal("8B: nano-vllm's benchmark", partial(_workload_rate, _LARGE), "tok/s", (0.7, 0.77),
         "bench-large/qwen3-8b", _our_rate),
    Goal("8B: 16k tokens of 1k prompts", partial(_prompt_rate, _LARGE), "tok/s", (0.72, 0.8),
         "large/qwen3-8b/prefill/1024", _tokens_per_s),
    Goal("time of nano-vllm over ours, FA3 under it", None, "x", (">= 1.3x", "1.5x"),
         "nano-vllm/qwen3-0.6b", _ratio, _ratio_note),
    Goal("0.6B: time of vLLM over ours", None, "x", (">= 1x", "1.2x"),
         "vllm-inductor/qwen3-0.6b", _ratio, _ratio_note),
    Goal("8B: time of vLLM over ours", None, "x", (">= 1x", "1.05x"),
         "vllm-inductor/qwen3-8b", _ratio, _ratio_note),
    Goal("0.6B: time of vLLM without Inductor over ours", None, "x", (">= 1x", "1.2x"),
         "vllm/qwen3-0.6b", _ratio, _ratio_note),
    Goal("8B: time of vLLM without Inductor over ours", None, "x", (">= 1x", "1.05x"),
         "vllm/qwen3-8b", _ratio, _ratio_note),
    Goal("time of transformers, sdpa, over ours", None, "x", ("12x", ""),
         "transformers/qwen3-0.6b", _ratio, _ratio_note),
)  # fmt: skip


def goals_table(*reports: dict[str, Any]) -> str:
    """Markdown."""
    cards = [report["device"]["name"].removeprefix("NVIDIA ").split()[0] for report in reports]
    heading = [*_HEADING, *(f"measured {card}" for card in cards)]
    return table([heading, *(goal.row(reports) for goal in GOALS)])


def main(argv: list[str]) -> int:
    """Print the table; 2 if one of them is no report of a GPU."""
    reports = []
    for path in argv:
        try:
            reports.append(json.loads(Path(path).read_text()))
            is_of_gpu = not reports[-1]["small"] and reports[-1]["device"]["name"] != "cpu"
        except (OSError, ValueError, LookupError, TypeError) as error:
            print(f"{path}: {type(error).__name__}: {error}", file=sys.stderr)
            is_of_gpu = False
        if not is_of_gpu:
            reports = []
            break
    if not reports:
        print(
            "usage: python -m benchmarks.gpu.goals FOLDER/gpu.json ..., each of a GPU",
            file=sys.stderr,
        )
        return 2
    print(goals_table(*reports))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
