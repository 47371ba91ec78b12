"""Lists of tokens that rows name, such as those that they may sample, on the host.

A row keeps its own for as long as its request runs. Those of a step's rows are packed into one
column, as `TokenLists` has them, when its rows are not those of the step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nanocore.protocol.fields import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_BAD_WORDS_TOKENS,
    MAX_LOGIT_BIASES,
)
from nanocore.worker.plan import NewRow

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RowLists:
    """One row's. biases: the bits of float32. bad: tokens of sequences of these lengths."""

    allowed: Ints
    biased: Ints
    biases: Ints
    stops: Ints
    bad_lengths: Ints
    bad: Ints

    @classmethod
    def of(cls, new: NewRow) -> RowLists | None:
        """What a new row names; None: nothing. Stops are named if there are min_tokens."""
        sampling = new.sampling
        stops = new.stop_token_ids if sampling.min_tokens else []
        bad = sampling.bad_words_token_ids
        if not (sampling.allowed_token_ids or sampling.logit_bias or stops or bad):
            return None
        biases = np.array([bias for _, bias in sampling.logit_bias], np.float32)
        return cls(
            allowed=_ints(sampling.allowed_token_ids or ()),
            biased=_ints([token_id for token_id, _ in sampling.logit_bias]),
            biases=biases.view(np.int32),
            stops=_ints(stops),
            bad_lengths=_ints([len(sequence) for sequence in bad]),
            bad=_ints([token_id for sequence in bad for token_id in sequence]),
        )


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int32)


NO_LISTS: Final = RowLists(*[_ints(())] * 6)


@dataclass(frozen=True, slots=True)
class PackedLists:
    """Lists of some rows. column: int32; sizes: of its parts, see `TokenLists.of`."""

    column: Ints
    sizes: list[int]

    @classmethod
    def of(cls, rows: Sequence[RowLists]) -> PackedLists:
        """In the order of rows, of which there is one at least."""
        allowed, biased, biases, stops, bad_lengths, bad = (
            [getattr(row, name) for row in rows] for name in RowLists.__slots__
        )
        parts = [
            _starts(allowed), *allowed,
            _starts(biased), *biased, *biases,
            _starts(stops), *stops,
            _starts(bad_lengths), _cumulated(np.concatenate(bad_lengths)), *bad,
        ]  # fmt: skip
        num_starts = len(rows) + 1
        num_biases, num_sequences = _total(biased), _total(bad_lengths)
        sizes = [num_starts, _total(allowed), num_starts, num_biases, num_biases]
        sizes += [num_starts, _total(stops), num_starts, num_sequences + 1, _total(bad)]
        return cls(np.concatenate(parts), sizes)


def _total(lists: list[Ints]) -> int:
    return sum(map(len, lists))


def _starts(lists: list[Ints]) -> Ints:
    return _cumulated(np.array([len(one) for one in lists]))


def _cumulated(lengths: NDArray[np.integer]) -> Ints:
    """0, and the sums of the first, the first two and so on."""
    sums = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=sums[1:])
    return sums


def longest_lists(vocab_size: int) -> dict[str, Any]:
    """Sampling parameters that take as much memory as any."""
    biased = range(min(vocab_size, MAX_LOGIT_BIASES))
    return {
        "allowed_token_ids": [0] * MAX_ALLOWED_TOKEN_IDS,
        "logit_bias": [(token_id, 1.0) for token_id in biased],
        "bad_words_token_ids": [[0] * (MAX_BAD_WORDS_TOKENS // MAX_BAD_WORDS)] * MAX_BAD_WORDS,
    }
