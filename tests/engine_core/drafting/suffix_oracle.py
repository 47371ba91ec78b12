"""Suffix drafts in plain Python: all occurrences are searched, each time anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

MAX_COUNT = 127


@dataclass(frozen=True)
class Settings:
    max_depth: int = 24
    max_factor: float = 1.0
    min_probability: float = 0.1


@dataclass
class Draft:
    token_ids: list[int] = field(default_factory=list)
    evidence: list[int] = field(default_factory=list)
    sum: np.float32 = np.float32(0)


class Continuations:
    """How often a run of tokens occurred in texts, and what followed it."""

    def __init__(self, texts: Sequence[Sequence[int]], run: Sequence[int]) -> None:
        self.num_occurrences, self.is_at_end = 0, False
        self.counts: dict[int, int] = {}
        self.best: int | None = None
        size = len(run)
        for text in texts:
            for end in range(size, len(text) + 1):
                if text[end - size : end] != run:
                    continue
                if self.num_occurrences < MAX_COUNT:
                    self.num_occurrences += 1
                    self.is_at_end = end == len(text)
                if end == len(text) or self.counts.get(text[end], 0) == MAX_COUNT:
                    continue
                token = text[end]
                self.counts[token] = self.counts.get(token, 0) + 1
                if self.best is None or self.counts[token] >= self.counts[self.best]:
                    self.best = token


def occurs(texts: Sequence[Sequence[int]], run: Sequence[int]) -> bool:
    size = len(run)
    return any(text[i : i + size] == run for text in texts for i in range(len(text) - size + 1))


def own_match(text: list[int]) -> list[int]:
    """The longest run at the end that ends elsewhere, too."""
    size = next(
        n for n in range(len(text) - 1, -1, -1) if occurs([text[:-1]], text[len(text) - n :])
    )
    return text[len(text) - size :]


def draft(
    texts: Sequence[list[int]], match: list[int], is_own: bool, most: int, settings: Settings
) -> Draft:
    found = Draft()
    factor = np.float32(settings.max_factor) * np.float32(min(len(match), settings.max_depth))
    probability, run = np.float32(1), match
    while match and len(found.token_ids) < min(most, int(factor)):
        seen = Continuations(texts, run)
        if seen.best is None and is_own:
            run = match  # the text's end, as it occurred earlier
            seen = Continuations(texts, run)
        if seen.best is None:
            break
        total = max(1, seen.num_occurrences - (is_own and seen.is_at_end))
        times = min(seen.counts[seen.best], total)
        probability *= np.float32(times) / np.float32(total)
        if probability < np.float32(settings.min_probability):
            break
        found.token_ids.append(seen.best)
        support = support_class(times, total)
        if total == 1:
            support = int(is_confirmed(texts, run, seen))
        found.evidence.append(8 * size_class(len(run)) + support)
        found.sum += probability
        run = [*run, seen.best]
    return found


def size_class(size: int) -> int:
    return min(7, (size - 1).bit_length())


def support_class(times: int, total: int) -> int:
    if times == total:
        return 2 + (total > 2) + (total > 7)
    return 7 - (times / total >= 0.5) - (times / total >= 0.75)


def is_confirmed(texts: Sequence[list[int]], run: list[int], seen: Continuations) -> bool:
    """Whether the next shorter run that occurred more often goes on the same way."""
    for start in range(1, len(run)):
        shorter = Continuations(texts, run[start:])
        if shorter.num_occurrences > seen.num_occurrences:
            return shorter.best == seen.best
    return False


@dataclass
class Generation:
    texts: list[list[int]] = field(default_factory=list)


@dataclass
class Group:
    young: Generation | None = None
    old: Generation | None = None
    last_used: int = 0


class SharedOutputs:
    """Finished outputs by salt, in two generations, and what rows match in them."""

    def __init__(self, max_cached: int, max_depth: int) -> None:
        self.max_cached, self.max_depth = max_cached, max_depth
        self.groups: dict[str, Group] = {}
        self.waiting: list[tuple[str, list[int]]] = []
        self.clock = 0
        self.seen: dict[tuple[int, int], tuple[int, int]] = {}
        self.kept: list[Generation] = []
        """So that no other one gets its number."""
        self.reached: set[str] = set()

    def begin(self, row: int, salt: str) -> None:
        self.seen = {key: value for key, value in self.seen.items() if key[0] != row}
        if salt in self.groups:
            self.clock += 1
            self.groups[salt].last_used = self.clock

    def add_waiting(self) -> None:
        for salt, text in self.waiting:
            group = self.groups.setdefault(salt, Group())
            self.clock += 1
            group.last_used = self.clock
            if group.young and len(group.young.texts) >= max(1, self.max_cached // 2):
                self.reached.add("rotated twice" if group.old else "rotated")
                group.old, group.young = group.young, None
            group.young = group.young or Generation()
            self.kept.append(group.young)
            group.young.texts.append(text)
            if self.num_outputs() > self.max_cached:
                self.drop_oldest(group.young)
        self.waiting = []

    def num_outputs(self) -> int:
        generations = [g for group in self.groups.values() for g in (group.young, group.old)]
        return sum(len(generation.texts) for generation in generations if generation)

    def drop_oldest(self, growing: Generation) -> None:
        for group in sorted(self.groups.values(), key=lambda group: group.last_used):
            if group.old:
                self.reached.add("dropped an old one")
                group.old = None
                return
            if group.young and group.young is not growing:
                self.reached.add("dropped a young one")
                group.young = None
                return

    def match(self, row: int, generation: Generation, text: list[int]) -> list[int]:
        """The longest run at the text's end that grew token by token."""
        key = row, id(generation)
        position, length = self.seen.get(key, (-1000, 0))
        if len(text) - position > 64:
            position, length = max(0, len(text) - self.max_depth), 0
        for end in range(position + 1, len(text) + 1):
            length += 1
            while not occurs(generation.texts, text[end - length : end]):
                length -= 1
        self.seen[key] = len(text), length
        return text[len(text) - length :]
