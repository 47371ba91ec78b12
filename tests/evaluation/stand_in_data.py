"""Data sets of a few rows, of our own, in folders that are named as benchmarks name theirs.

`datasets.load_dataset("cais/mmlu")` takes a folder of that relative path for the data set, so the
benchmarks' own tasks run without a network, from the folder in which these are written. Nothing of
the real data sets is in them: a score on them says nothing of a model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

CODE_EVAL = '''
"""Stands in for the metric of this name, with its interface: the share of candidates that pass."""

import datasets
import evaluate


class CodeEval(evaluate.Metric):
    def _info(self):
        features = {
            "predictions": datasets.Sequence(datasets.Value("string")),
            "references": datasets.Value("string"),
        }
        return evaluate.MetricInfo(
            description="", citation="", features=datasets.Features(features)
        )

    def _compute(self, predictions, references, k=(1,)):
        passed = [
            [runs(candidate, test) for candidate in candidates]
            for candidates, test in zip(predictions, references, strict=True)
        ]
        share = sum(sum(one) / len(one) for one in passed) / len(passed)
        return {f"pass@{k[0]}": share}, passed


def runs(candidate, test):
    try:
        exec(candidate + "\\n" + test, {})
    except Exception:
        return False
    return True
'''


def write_benchmarks(folder: Path, mmlu_subjects: Iterable[str]) -> None:
    """Write MMLU with these subjects, GSM8K, HellaSwag and HumanEval, and HumanEval's metric."""
    mmlu = {"test": _questions(0, 4), "validation": _questions(4, 1), "dev": _questions(5, 5)}
    _write(folder / "cais" / "mmlu", mmlu, list(mmlu_subjects))
    gsm8k = {"train": _sums(20, 8), "test": _sums(0, 6)}
    _write(folder / "openai" / "gsm8k", gsm8k, ["main"])
    hellaswag = {split: _endings() for split in ("train", "validation", "test")}
    _write(folder / "Rowan" / "hellaswag", hellaswag, ["default"])
    _write(folder / "openai" / "openai_humaneval", {"test": _problems()}, ["default"])
    (folder / "code_eval").mkdir()
    (folder / "code_eval" / "code_eval.py").write_text(CODE_EVAL)


def _write(folder: Path, splits: dict[str, list[Row]], configs: Sequence[str]) -> None:
    """A file for each split, of which all configurations are made."""
    folder.mkdir(parents=True)
    lines = ["---", "configs:"]
    for config in configs:
        lines += [f"- config_name: {config}", "  data_files:"]
        for split in splits:
            lines += [f"  - split: {split}", f"    path: {split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _questions(start: int, count: int) -> list[Row]:
    return [
        {
            "question": f"What is {n} + {n + 11}?",
            "subject": "sums",
            "choices": [str(2 * n + 11 + (i - n % 4)) for i in range(4)],
            "answer": n % 4,
        }
        for n in range(10 + start, 10 + start + count)
    ]


def _sums(start: int, count: int) -> list[Row]:
    return [
        {"question": f"What is {n} + {n + 7}?", "answer": f"{n} + {n + 7} = {s}\n#### {s}"}
        for n, s in [(n, 2 * n + 7) for n in range(100 + start, 100 + start + count)]
    ]


def _endings() -> list[Row]:
    return [
        {
            "activity_label": "Counting",
            "ctx_a": f"Somebody counts from {n} to {n + 3}.",
            "ctx_b": "they say",
            "endings": [f"{n} {n + 1} {n + 2} {n + 3 + i}" for i in (1, 0, 5, 9)],
            "label": "1",
        }
        for n in range(5, 17)
    ]


def _problems() -> list[Row]:
    """The first is solved whatever a model says in its comment's line, the second by none."""
    return [
        {
            "task_id": f"ours/{i}",
            "prompt": f"def twice(n):\n    return {factor} * n\n\n\nTWICE = twice  # that is",
            "entry_point": "TWICE",
            "canonical_solution": "",
            "test": "def check(candidate):\n    assert candidate(4) == 8\n",
        }
        for i, factor in enumerate((2, 3))
    ]
