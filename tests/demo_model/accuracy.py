"""Accuracy of the demo model by task, through the engine, under several ways of scheduling.

    python -m tests.demo_model.accuracy [--count 1000] [--model FOLDER] [--json FILE]

Each condition is an engine process of its own: default settings; small steps, so that prompts are
chunked; few KV blocks, so that requests are preempted; a second round on a warm prefix cache;
quantized weights; and a quantized KV cache. An answer counts only if it is exactly right. The
prompts are held out from training.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import describe_run, write_report
from nanocore.client import LLM, SamplingParams
from nanocore.client.arguments import EngineArgument
from nanocore.protocol.metrics import Stats
from tests.demo_model.tasks import TASKS, Example, held_out

MAX_ANSWER_TOKENS = 160
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_ANSWER_TOKENS)


@dataclass(frozen=True)
class Condition:
    """One way to run the engine. rounds: the last one counts."""

    name: str
    engine_args: dict[str, EngineArgument] = field(default_factory=dict)
    rounds: int = 1


CONDITIONS = (
    Condition("default"),
    Condition("chunked", {"max_num_batched_tokens": 48, "max_num_seqs": 16}),
    Condition("preempted", {"num_gpu_blocks_override": 80, "max_num_seqs": 64}),
    Condition("prefix hits", rounds=2),
    Condition("int8 weights", {"quantization": "int8"}),
    Condition("int4 weights", {"quantization": "int4"}),
    Condition(
        "int4, activations kept", {"quantization": "int4", "activation_quantization": "none"}
    ),
    Condition("int8 KV cache", {"kv_cache_dtype": "int8"}),
    Condition("int4, int8 KV cache", {"quantization": "int4", "kv_cache_dtype": "int8"}),
)


@dataclass(frozen=True)
class Outcome:
    """What a condition came to. accuracy: by task, 0 to 1."""

    accuracy: dict[str, float]
    num_preemptions: int
    hit_rate: float
    tokens_per_step: float


def evaluate(
    condition: Condition, examples: Sequence[Example], model: str | None = None
) -> Outcome:
    """Run all examples in one engine and count exact answers."""
    conversations = [example.messages for example in examples]
    with LLM(model, **condition.engine_args) as llm:
        for _ in range(condition.rounds):
            before = llm.stats()
            outputs = llm.chat(conversations, GREEDY)
        after = llm.stats()
    right: dict[str, list[bool]] = {}
    for example, output in zip(examples, outputs, strict=True):
        right.setdefault(example.task, []).append(output.outputs[0].text == example.answer)
    return Outcome(
        accuracy={task: sum(marks) / len(marks) for task, marks in right.items()},
        num_preemptions=after.num_preemptions - before.num_preemptions,
        hit_rate=_delta(before, after, "prefix_cache_hits")
        / _delta(before, after, "prefix_cache_queries"),
        tokens_per_step=(
            _delta(before, after, "prefix_cache_queries")
            - _delta(before, after, "prefix_cache_hits")
            + _delta(before, after, "generation_tokens")
        )
        / _delta(before, after, "num_steps"),
    )


def _delta(before: Stats, after: Stats, name: str) -> int:
    delta: int = getattr(after, name) - getattr(before, name)
    return delta


def table(outcomes: dict[str, Outcome]) -> str:
    """The outcomes as a Markdown table, in percent."""
    names = list(outcomes)
    lines = ["| task | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for task in TASKS:
        cells = (f"{outcomes[name].accuracy[task]:.1%}" for name in names)
        lines.append(f"| {task} | " + " | ".join(cells) + " |")
    for label, value in (
        ("preemptions", lambda o: str(o.num_preemptions)),
        ("prefix-cache hit rate", lambda o: f"{o.hit_rate:.0%}"),
        ("tokens per step", lambda o: f"{o.tokens_per_step:.0f}"),
    ):
        cells = (value(outcomes[name]) for name in names)
        lines.append(f"| *{label}* | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Evaluate all conditions; exit with 1 if two differ by more than a point somewhere.

    Four bits may: they cost what the table says.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=1000, help="examples per task")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", help="model folder (default: the bundled one)")
    parser.add_argument("--json", type=Path, help="write the accuracies here, too")
    args = parser.parse_args()
    examples = [example for task in TASKS for example in held_out(task, args.count, args.seed)]
    outcomes = {c.name: evaluate(c, examples, args.model) for c in CONDITIONS}
    print(f"{args.count} held-out examples per task, exact answers\n\n{table(outcomes)}")
    if args.json:
        accuracy = {name: outcome.accuracy for name, outcome in outcomes.items()}
        write_report(args.json, {**describe_run(), "count": args.count, **accuracy})
    worst = max(spread({k: o for k, o in outcomes.items() if "int4" not in k}).values())
    print(f"\nlargest difference between conditions without int4: {100 * worst:.1f} points")
    sys.exit(worst > 0.0101)


def spread(outcomes: dict[str, Outcome]) -> dict[str, float]:
    """By task, the largest difference in accuracy between two conditions."""
    by_task = {task: [o.accuracy[task] for o in outcomes.values()] for task in TASKS}
    return {task: max(values) - min(values) for task, values in by_task.items()}


if __name__ == "__main__":
    main()
