"""Score a demo model folder on the held-out tasks: python tools/demo_model/score.py FOLDER.

Answers are generated greedily through transformers, in batches of one length. `exact_match` and
`format_report` know nothing of transformers: any engine that turns messages into answers can be
scored with them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.demo_model.tasks import TASKS, Example, Message, held_out

Answerer = Callable[[Sequence[list[Message]]], list[str]]


@dataclass(frozen=True)
class TaskScore:
    """How many answers of a task are right to the letter, and the first ones that are not."""

    task: str
    count: int
    right: int
    mistakes: list[dict[str, str]]

    @property
    def accuracy(self) -> float:
        return self.right / self.count


def exact_match(
    examples: Iterable[Example], answers: Iterable[str], keep: int = 3
) -> list[TaskScore]:
    """Compare answers with the examples they belong to, task by task."""
    pairs: dict[str, list[tuple[Example, str]]] = defaultdict(list)
    for example, answer in zip(examples, answers, strict=True):
        pairs[example.task].append((example, answer))
    scores = []
    for task, group in pairs.items():
        wrong = [
            {"prompt": e.messages[-1]["content"][-200:], "answer": a, "expected": e.answer}
            for e, a in group
            if a != e.answer
        ]
        scores.append(TaskScore(task, len(group), len(group) - len(wrong), wrong[:keep]))
    return scores


def format_report(scores: Iterable[TaskScore]) -> str:
    """A table with a line for each task, as Markdown."""
    lines = ["| task | n | right | accuracy |", "|---|---:|---:|---:|"]
    lines += [f"| {s.task} | {s.count} | {s.right} | {100 * s.accuracy:.1f} % |" for s in scores]
    return "\n".join(lines)


def transformers_answerer(folder: Path, dtype: str, batch_tokens: int = 24000) -> Answerer:
    """Greedy answers through transformers, with the weights of the folder in this type."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def generate(prompts: list[list[int]]) -> list[str]:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        output = model.generate(ids, attention_mask=mask, max_new_tokens=200, do_sample=False)
        return tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)

    def answer(chats: Sequence[list[Message]]) -> list[str]:
        prompts = [
            tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False)
            for c in chats
        ]
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, prompt in enumerate(prompts):
            by_length[len(prompt)].append(index)
        answers = [""] * len(prompts)
        for length, indices in sorted(by_length.items()):
            size = max(1, batch_tokens // length)
            for start in range(0, len(indices), size):
                group = indices[start : start + size]
                for index, text in zip(group, generate([prompts[i] for i in group]), strict=True):
                    answers[index] = text
        return answers

    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=200, help="examples of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--json", type=Path, help="also write the scores to this file")
    args = parser.parse_args()
    examples = [e for task in args.tasks for e in held_out(task, args.count, args.seed)]
    started = time.monotonic()
    answers = transformers_answerer(args.folder, args.dtype)([e.messages for e in examples])
    scores = exact_match(examples, answers)
    print(format_report(scores))
    print(f"{args.dtype}, {len(examples)} answers in {time.monotonic() - started:.0f} s")
    for score in scores:
        for mistake in score.mistakes:
            print(score.task, json.dumps(mistake, ensure_ascii=False))
    if args.json:
        args.json.write_text(json.dumps([asdict(s) for s in scores], indent=2) + "\n")


if __name__ == "__main__":
    main()
