"""Sums whose answer is JSON, as structured outputs ask for it: the demo model's second schooling.

`json_sum` draws one for training: any name and any white space that a grammar may force, other
members before or after, or the explicit question of `ASKS_JSON`. `held_out_sums` are the operands
that training never contains, the same as those of the plain task; `SUM_SCHEMA` is the form that
they are measured in.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any, Final

from tests.demo_model.short_tasks import PHRASES, SHORT_TASKS, Turn, is_held_out

ASKS_JSON: Final = " Answer as JSON."
SUM_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}
NAMES: Final = ("sum", "answer", "result", "total", "value", "number", "n", "x", "y", "out")
AFTER: Final = (', "ok": true', ', "words": []', ', "even": false', ', "note": ""', ', "x": null')
WHITE_SPACE: Final = ("", "", " ", "\n", "\n  ", "  ")
NUMBERS: Final = re.compile(r'\d(?:[\d +=]*\d)?"?[,}]?|\}$')
"""What is learned of a JSON answer: its numbers, what ends them, and its end."""


@dataclass(frozen=True)
class Sum:
    """Two operands and a question in one of the plain task's phrasings."""

    a: int
    b: int
    prompt: str


def draw_sum(rng: random.Random, held: bool) -> Sum:
    """A sum of the held-out part, or not of it."""
    while is_held_out((turn := SHORT_TASKS["sum"][0](rng)).key) != held:
        pass
    a, b = map(int, turn.key.removeprefix("sum|").split("+"))
    return Sum(a, b, turn.prompt)


def held_out_sums(count: int, seed: int = 0) -> list[Sum]:
    """`count` sums that training never contains, the phrasings in turn."""
    rng = random.Random(f"held-out-json-{seed}")
    drawn = [draw_sum(rng, held=True) for _ in range(count)]
    phrasings = PHRASES["sum"]
    return [
        Sum(s.a, s.b, phrasings[i % len(phrasings)].format(a=s.a, b=s.b))
        for i, s in enumerate(drawn)
    ]


def json_sum(rng: random.Random) -> Turn:
    """A sum for training that is answered in JSON."""
    drawn = draw_sum(rng, held=False)
    if rng.random() < 0.2:
        answer = f'{{"sum": {drawn.a + drawn.b}}}'
        return Turn("json_sum", drawn.prompt + ASKS_JSON, answer, "")
    return Turn("json_sum", drawn.prompt, _answer(rng, drawn.a, drawn.b), "")


def _answer(rng: random.Random, a: int, b: int) -> str:
    value = f'"{a} + {b} = {a + b}"' if rng.random() < 0.1 else str(a + b)
    name = rng.choice(NAMES) if rng.random() < 0.4 else "sum"
    if rng.random() < 0.15:
        name = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz_", k=rng.randint(1, 8)))
    members = [(name, value)]
    if rng.random() < 0.15:
        members = [("a", str(a)), ("b", str(b)), *members]
    # Half of the forms are the two usual ones; the others have white space anywhere.
    if rng.random() < 0.5:
        space = rng.choice(("", " "))
        inside, before, after, end = "", "", space, ""
    else:
        inside, before, after, end = (rng.choice(WHITE_SPACE) for _ in range(4))
    text = f",{after}{inside}".join(f'"{n}"{before}:{after}{v}' for n, v in members)
    text += rng.choice(AFTER) if rng.random() < 0.15 else ""
    return f"{{{inside}{text}{end}}}"


def learned_characters(question: str, answer: str) -> list[bool]:
    """For each character of an answer, whether it is to be learned.

    All of them, but of a JSON answer that the question does not ask for only what no grammar
    forces; so the model never begins one by itself.
    """
    if not answer.startswith("{") or question.endswith(ASKS_JSON):
        return [True] * len(answer)
    learned = [False] * len(answer)
    for match in NUMBERS.finditer(answer):
        learned[match.start() : match.end()] = [True] * len(match[0])
    return learned
