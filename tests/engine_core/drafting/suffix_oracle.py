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
        found.evidence.append(8 * size_class(len(run)) + support_class(times, total))
        found.sum += probability
        run = [*run, seen.best]
    return found


def size_class(size: int) -> int:
    return min(7, (size - 1).bit_length())


def support_class(times: int, total: int) -> int:
    if times == total:
        return [0, 1, 2, 3][(total > 1) + (total > 2) + (total > 7)]
    share = times / total
    return 7 - (share >= 0.5) - (share >= 0.75) - (share >= 0.875)
