"""The recall task of the demo model: facts stated earlier in a chat, then questions on them.

`recall_chat` states facts ("The code of Alice is 4817.") in the system message, in the first user
message or over several user messages, and asks for some of them in later turns. The number of
facts sets the length of the context: a fact takes about eleven tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.demo_model.short_tasks import Turn, is_held_out
from tests.demo_model.words import COLORS, FRUITS, NAMES

Message = dict[str, str]

NUMBER_ATTRIBUTES = ("code", "pin", "number", "key")
WORD_ATTRIBUTES = {"color": COLORS, "fruit": FRUITS}
FACTS = ("The {attr} of {n} is {v}.", "{n} has the {attr} {v}.")
INTROS = ("Remember: ", "Remember this: ", "Here are some facts. ")
NOTED = "I will remember that."
FIRST_QUESTIONS = (
    "What is the {attr} of {n}?",
    "What is the {attr} of {n}?",
    "Tell me the {attr} of {n}.",
    "Which {attr} does {n} have?",
)
FOLLOW_UPS = (*FIRST_QUESTIONS, "And the {attr} of {n}?", "And {n}?", "What about {n}?")
ANSWER = "The {attr} of {n} is {v}."

FACT_TOKENS = 11  # what "The code of Alice is 4817." takes, with the space before it


@dataclass(frozen=True)
class Facts:
    """One attribute of several people, in the order in which the facts are stated."""

    attribute: str
    values: dict[str, str]
    phrase: str

    def text(self, names: list[str]) -> str:
        """The facts about these names, as the text of a message."""
        sentence = self.phrase
        facts = (sentence.format(attr=self.attribute, n=n, v=self.values[n]) for n in names)
        return " ".join(facts)

    def question(self, rng: random.Random, name: str, first: bool) -> Turn:
        """A question on one fact; short forms ("And Bob?") only after another question."""
        prompt = rng.choice(FIRST_QUESTIONS if first else FOLLOW_UPS)
        fields = {"attr": self.attribute, "n": name, "v": self.values[name]}
        key = f"recall|{self.attribute}|{name}|{self.values[name]}"
        return Turn("recall", prompt.format(**fields), ANSWER.format(**fields), key)


def draw_facts(rng: random.Random, count: int, word_share: float = 0.15) -> Facts:
    """Facts about `count` different people: a word (in `word_share`) or four digits each."""
    names = rng.sample(NAMES, k=min(count, len(NAMES)))
    if rng.random() < word_share:
        attribute = rng.choice(tuple(WORD_ATTRIBUTES))
        values = [rng.choice(WORD_ATTRIBUTES[attribute]) for _ in names]
    else:
        attribute = rng.choices(NUMBER_ATTRIBUTES, (3, 1, 1, 1))[0]
        values = [f"{rng.randrange(10000):04d}" for _ in names]
    phrase = rng.choices(FACTS, (4, 1))[0]
    return Facts(attribute, dict(zip(names, values, strict=True)), phrase)


def state_facts(rng: random.Random, facts: Facts, layout: str) -> list[Message]:
    """The messages that state the facts; with "same" the question joins the last of them."""
    names = list(facts.values)
    intro = rng.choice(INTROS) if facts.phrase != FACTS[0] or rng.random() < 0.4 else ""
    if layout == "system":
        return [{"role": "system", "content": intro + facts.text(names)}]
    parts = min(len(names), rng.randint(2, 4)) if layout == "spread" else 1
    cuts = sorted(rng.sample(range(1, len(names)), k=parts - 1))
    messages = []
    for start, stop in zip([0, *cuts], [*cuts, len(names)], strict=True):
        messages.append({"role": "user", "content": intro + facts.text(names[start:stop])})
        messages.append({"role": "assistant", "content": NOTED})
    return messages[:-1] if layout == "same" else messages


def recall_chat(
    rng: random.Random,
    num_facts: int,
    questions: int,
    layout: str,
    held_out: bool = False,
    word_share: float = 0.15,
) -> tuple[list[Message], list[Turn]]:
    """Messages that state `num_facts` facts, and the turns that ask for some of them.

    Layouts: "same" (facts and first question in one message), "first" (facts in the first
    message), "spread" (over several user messages), "system" (in the system message). None of
    the questions is of the held-out part, except the last when `held_out` is asked for.
    """
    while True:
        facts = draw_facts(rng, num_facts, word_share)
        turns = [facts.question(rng, n, first=True) for n in facts.values]
        wanted = [t for t in turns if is_held_out(t.key) == held_out]
        if wanted:
            break
    by_prompt = {t.key: n for t, n in zip(turns, facts.values, strict=True)}
    asked = [by_prompt[t.key] for t in turns if not is_held_out(t.key)]
    asked = rng.sample(asked, k=min(len(asked), questions - held_out))
    if held_out:
        asked.append(by_prompt[rng.choice(wanted).key])
    turns = [facts.question(rng, n, first=i == 0) for i, n in enumerate(asked)]
    messages = state_facts(rng, facts, layout)
    if layout == "same":
        stated = messages.pop()["content"]
        first = turns[0]
        turns[0] = Turn(first.task, f"{stated} {first.prompt}", first.answer, first.key)
    return messages, turns
