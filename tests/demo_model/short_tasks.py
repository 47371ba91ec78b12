"""The one-turn tasks of the demo model: sums, copying, reversing, sorting, counting.

Each generator draws one `Turn`: a prompt in one of several phrasings and its only right answer.
The `key` of a turn says what is asked whatever the phrasing; the held-out split is a hash of it.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from tests.demo_model.words import CONTENT_WORDS, COUNTABLE, UNICODE_WORDS

PHRASES: dict[str, tuple[str, ...]] = {
    "sum": (
        "{a} + {b}",
        "{a}+{b}",
        "{a} + {b} =",
        "What is {a} + {b}?",
        "How much is {a} + {b}?",
        "What is {a} plus {b}?",
        "Add {a} and {b}.",
        "Compute {a} + {b}.",
    ),
    "copy_words": ("Repeat: {x}", "Copy: {x}", "Say: {x}", "Repeat these words: {x}"),
    "reverse_words": (
        "Reverse these words: {x}",
        "Reverse the words: {x}",
        "Say these words backwards: {x}",
        "Reverse the order of: {x}",
    ),
    "reverse_letters": (
        "Reverse the word {x}.",
        "Reverse the letters of {x}.",
        "Spell {x} backwards.",
        "Write the word {x} backwards.",
    ),
    "sort_words": (
        "Sort: {x}",
        "Sort these words: {x}",
        "Sort the words: {x}",
        "Put these words in order: {x}",
    ),
    "sort_numbers": (
        "Sort: {x}",
        "Sort these numbers: {x}",
        "Sort the numbers: {x}",
        "Put these numbers in order: {x}",
    ),
    "count": (
        "How many {p} are there in: {x}?",
        "How many {p} are in: {x}?",
        "Count the {p}: {x}",
    ),
    "count_word": ("Count the word {w}: {x}",),
    "compare": (
        "Which is {c}, {a} or {b}?",
        "Which number is {c}: {a} or {b}?",
        "What is {c}, {a} or {b}?",
    ),
    "count_up": ("Count from {a} to {b}.", "Count up from {a} to {b}.", "Count from {a} to {b}"),
}

COMPARISONS = ("larger", "smaller")
ANSWERS = {
    "sum": "{a} + {b} = {y}",
    "copy_words": "You said: {y}",
    "reverse_words": "Reversed: {y}",
    "reverse_letters": 'The word "{x}" reversed is "{y}".',
    "sort_words": "Sorted: {y}",
    "sort_numbers": "Sorted: {y}",
    "count": "There are {y} {p}.",
    "count_one": "There is 1 {w}.",
    "count_word": "There are {y}.",
    "count_word_one": "There is 1.",
    "compare": "{a} is {c} than {b}.",
    "count_up": "{y}",
}


@dataclass(frozen=True)
class Turn:
    """One question with its answer; `key` says what is asked, for the held-out split."""

    task: str
    prompt: str
    answer: str
    key: str


def is_held_out(key: str) -> bool:
    """Whether this content belongs to the twentieth that is never trained on."""
    return zlib.crc32(key.encode()) % 20 == 0


def _turn(rng: random.Random, task: str, key: str, **fields: object) -> Turn:
    prompt = rng.choice(PHRASES[task]).format(**fields)
    return Turn(task, prompt, ANSWERS[task].format(**fields), f"{task}|{key}")


def _number(rng: random.Random) -> int:
    """Up to three digits, with the longer numbers more often because there are more of them."""
    digits = rng.choices((1, 2, 3), (1, 2, 4))[0]
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def _random_word(rng: random.Random, low: int, high: int) -> str:
    letters = rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(low, high))
    return "".join(letters)


def _sum(rng: random.Random) -> Turn:
    a, b = _number(rng), _number(rng)
    return _turn(rng, "sum", f"{a}+{b}", a=a, b=b, y=a + b)


def _copy_words(rng: random.Random) -> Turn:
    words = rng.choices(CONTENT_WORDS, k=rng.randint(1, 8))
    if rng.random() < 0.4:  # words outside the vocabulary: copied letter by letter, byte by byte
        for _ in range(rng.randint(1, 2)):
            odd = _random_word(rng, 2, 7) if rng.random() < 0.6 else rng.choice(UNICODE_WORDS)
            words[rng.randrange(len(words))] = odd
    text = " ".join(words)
    return _turn(rng, "copy_words", text, x=text, y=text)


def _reverse_words(rng: random.Random) -> Turn:
    words = rng.choices(CONTENT_WORDS, k=rng.randint(2, 7))
    text = " ".join(words)
    return _turn(rng, "reverse_words", text, x=text, y=" ".join(reversed(words)))


def _reverse_letters(rng: random.Random) -> Turn:
    known = rng.random() < 0.5
    word = rng.choice(CONTENT_WORDS) if known else _random_word(rng, 2, 8)
    phrase = rng.choice(PHRASES["reverse_letters"])
    answer = ANSWERS["reverse_letters"].format(x=word, y=word[::-1])
    if rng.random() < 0.5:  # in quotes, every word is spelled in letters by the tokenizer
        return Turn("reverse_letters", phrase.format(x=f'"{word}"'), answer, f"letters|{word}")
    # A bare known word is one token whose spelling must have been learned: the split is then
    # over the whole prompt, as a word of the held-out part could not be spelled at all.
    prompt = phrase.format(x=word)
    return Turn("reverse_letters", prompt, answer, f"letters|{prompt if known else word}")


def _sort_words(rng: random.Random) -> Turn:
    words = rng.sample(CONTENT_WORDS, k=rng.randint(2, 6))
    text = " ".join(words)
    return _turn(rng, "sort_words", text, x=text, y=" ".join(sorted(words)))


def _sort_numbers(rng: random.Random) -> Turn:
    numbers = list({_number(rng): None for _ in range(rng.randint(2, 5))})
    text = " ".join(map(str, numbers))
    return _turn(rng, "sort_numbers", text, x=text, y=" ".join(map(str, sorted(numbers))))


def _count(rng: random.Random) -> Turn:
    kinds = rng.sample(COUNTABLE, k=rng.randint(1, 4))
    words = rng.choices(kinds, k=rng.randint(1, 9))
    target, text = rng.choice(kinds), " ".join(words)
    n = words.count(target)
    # With the very word in the question, counting is learned sooner than with its plural alone.
    kind = rng.choice(("count", "count_word"))
    fields = {"w": target, "p": target + "s", "x": text, "y": n}
    answer = ANSWERS[f"{kind}_one" if n == 1 else kind].format(**fields)
    prompt = rng.choice(PHRASES[kind]).format(**fields)
    return Turn("count", prompt, answer, f"count|{target}|{text}")


def _compare(rng: random.Random) -> Turn:
    a, b = _number(rng), _number(rng)
    while a == b:
        b = _number(rng)
    kind = rng.choice(COMPARISONS)
    first, second = (max(a, b), min(a, b)) if kind == "larger" else (min(a, b), max(a, b))
    prompt = rng.choice(PHRASES["compare"]).format(c=kind, a=a, b=b)
    answer = ANSWERS["compare"].format(a=first, c=kind, b=second)
    return Turn("compare", prompt, answer, f"compare|{kind}|{a}|{b}")


def _count_up(rng: random.Random) -> Turn:
    a = rng.choice((1, _number(rng)))
    b = a + rng.randint(1, 20)
    return _turn(rng, "count_up", f"{a}-{b}", a=a, b=b, y=" ".join(map(str, range(a, b + 1))))


SHORT_TASKS: dict[str, tuple[Callable[[random.Random], Turn], float]] = {
    "sum": (_sum, 5.0),
    "copy_words": (_copy_words, 1.5),
    "reverse_words": (_reverse_words, 1.5),
    "reverse_letters": (_reverse_letters, 2.5),
    "sort_words": (_sort_words, 2.5),
    "sort_numbers": (_sort_numbers, 2.5),
    "count": (_count, 1.5),
    "compare": (_compare, 1.5),
    "count_up": (_count_up, 0.7),
}
