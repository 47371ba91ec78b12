"""The tasks of the demo model: seeded generators of chats with exactly determined answers.

`training_examples(seed)` is an endless stream of chats of one or more turns;
`held_out(task, count, seed)` gives examples of one task that training never contains. The two
are told apart by a hash of what a turn asks for (the operands of a sum, the words to sort, the
name and value to recall), whatever the phrasing. Only the standard library is used, so tests can
import this module at no cost.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.demo_model import recall, short_tasks
from tests.demo_model.json_sums import json_sum
from tests.demo_model.recall import FACT_TOKENS, recall_chat
from tests.demo_model.short_tasks import SHORT_TASKS, Turn, is_held_out
from tests.demo_model.words import SMALL_TALK

Message = dict[str, str]

TASKS = (*SHORT_TASKS, "recall", "recall_turns")
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are nanocore.")
MAX_CONTEXT = 1024
LAYOUTS = ("same", "first", "spread", "system")


@dataclass(frozen=True)
class Example:
    """A chat that ends with a user message, and the only right answer to that message."""

    task: str
    messages: list[Message]
    answer: str


@dataclass(frozen=True)
class Mix:
    """What training chats are like: `max_context` bounds the facts stated, in tokens.

    Of the chats, `recall_share` are about facts; of these, `word_share` are about words instead
    of digits. The number of facts is log-uniform: the most that fit, to a power from `least_power`
    to 1. A task is drawn twice as often for each time that it is named in `focus`. Of the turns
    of the short tasks, `json_share` are sums that are answered in JSON.
    """

    max_context: int = MAX_CONTEXT
    recall_share: float = 0.25
    word_share: float = 0.15
    least_power: float = 0.15
    focus: tuple[str, ...] = ()
    json_share: float = 0.0


def phrases() -> list[str]:
    """Every fixed text of the tasks, for the tokenizer to find its words in."""
    short = [p for group in short_tasks.PHRASES.values() for p in group]
    facts = [*recall.FACTS, *recall.INTROS, recall.NOTED, *recall.FOLLOW_UPS, recall.ANSWER]
    fillers = (*recall.NUMBER_ATTRIBUTES, *recall.WORD_ATTRIBUTES, *short_tasks.COMPARISONS)
    talk = [*SYSTEM_PROMPTS, *(text for pair in SMALL_TALK for text in pair)]
    return [*short, *short_tasks.ANSWERS.values(), *facts, *talk, *(f" {w}" for w in fillers)]


def _chat(messages: Sequence[Message], turns: Sequence[Turn], task: str) -> Example:
    """The messages, then the turns with their answers, up to the last user message."""
    chat = list(messages)
    for turn in turns:
        chat.append({"role": "user", "content": turn.prompt})
        chat.append({"role": "assistant", "content": turn.answer})
    return Example(task, chat[:-1], turns[-1].answer)


def _short_turn(
    rng: random.Random, task: str | None = None, held: bool = False, focus: Sequence[str] = ()
) -> Turn:
    names = tuple(SHORT_TASKS)
    weights = [weight * 2 ** focus.count(n) for n, (_, weight) in SHORT_TASKS.items()]
    draw = SHORT_TASKS[task or rng.choices(names, weights)[0]][0]
    while is_held_out((turn := draw(rng)).key) != held:
        pass
    return turn


def _small_talk(rng: random.Random) -> Turn:
    prompt, answer = rng.choice(SMALL_TALK)
    return Turn("small_talk", prompt, answer, prompt)


def _system(rng: random.Random) -> list[Message]:
    if rng.random() < 0.85:
        return []
    return [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}]


def _mixed_turn(rng: random.Random, mix: Mix) -> Turn:
    if rng.random() < 0.02:
        return _small_talk(rng)
    if mix.json_share and rng.random() < mix.json_share:
        return json_sum(rng)
    return _short_turn(rng, focus=mix.focus)


def _short_chat(rng: random.Random, mix: Mix) -> Example:
    """One to six turns of the short tasks, so that a task is met at many positions."""
    count = rng.choices((1, 2, 3, 4, 6), (4, 2, 2, 1, 1))[0]
    turns = [_mixed_turn(rng, mix) for _ in range(count)]
    return _chat(_system(rng), turns, "mixed")


def _recall_chat(rng: random.Random, mix: Mix) -> Example:
    """Facts and many questions on them, with a turn of another task now and then."""
    most = max(4, (mix.max_context - 64) // FACT_TOKENS)
    count = max(1, min(most, round(most ** rng.uniform(mix.least_power, 1.0))))
    questions = rng.randint(1, 4 + min(count // 5, 12))
    layout = rng.choice(LAYOUTS)
    messages, asked = recall_chat(rng, count, questions, layout, word_share=mix.word_share)
    turns = list(asked)
    if rng.random() < 0.3:
        turns.insert(rng.randint(1, len(turns)), _short_turn(rng, focus=mix.focus))
    return _chat(messages, turns, "recall")


def training_examples(seed: int, mix: Mix | None = None) -> Iterator[Example]:
    """An endless stream of training chats, the same for the same arguments.

    Every assistant message of a chat is worth training on, as well as the final answer.
    """
    rng = random.Random(f"train-{seed}")
    mix = mix or Mix()
    while True:
        recall_next = rng.random() < mix.recall_share
        yield _recall_chat(rng, mix) if recall_next else _short_chat(rng, mix)


def recall_example(seed: int, num_facts: int, layout: str = "same", questions: int = 1) -> Example:
    """A held-out recall chat of `num_facts` facts that asks for `questions` of them in turn.

    The last question is of the held-out part; the answers to those before it are in the chat.
    """
    rng = random.Random(f"recall-{seed}-{num_facts}-{layout}-{questions}")
    messages, turns = recall_chat(rng, num_facts, questions, layout, held_out=True)
    return _chat(messages, turns, "recall" if questions == 1 else "recall_turns")


def held_out(task: str, count: int, seed: int = 0, max_context: int = MAX_CONTEXT) -> list[Example]:
    """`count` examples of one of `TASKS` that training never contains.

    "recall" asks one question in the message that states the facts; "recall_turns" states them
    in any layout and asks up to three more questions first. Both draw the number of facts
    evenly from 1 to what `max_context` tokens hold.
    """
    rng = random.Random(f"held-out-{task}-{seed}")
    if task in SHORT_TASKS:
        return [_chat([], [_short_turn(rng, task, held=True)], task) for _ in range(count)]
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; the tasks are {', '.join(TASKS)}")
    examples = []
    for _ in range(count):
        # Follow-up questions and their answers take up to 40 tokens each beside the facts.
        turns = rng.randint(2, 4) if task == "recall_turns" else 1
        num_facts = rng.randint(turns, (max_context - 40 * turns - 20) // FACT_TOKENS)
        layout = rng.choice(LAYOUTS) if task == "recall_turns" else "same"
        messages, asked = recall_chat(rng, num_facts, turns, layout, held_out=True)
        examples.append(_chat(messages, asked, task))
    return examples
