"""Log probabilities as users read them: for each token a dict of candidates by token id.

They are stored in growing columns. A caller gets a view of the first entries, so the cost of a
snapshot does not depend on the text's length. Dicts are built, and texts looked up, on reading.
"""

from __future__ import annotations

import builtins
from array import array
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar, overload

import msgspec

from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.codec import UnpackedLogprobs

Entry = TypeVar("Entry")


class Logprob(msgspec.Struct, frozen=True, gc=False, eq=False):
    """One candidate. logprob: natural logarithm of its probability. rank: 1 is the most likely."""

    logprob: float
    rank: int
    _token_id: int
    _tokenizer: Tokenizer | None

    @property
    def decoded_token(self) -> str | None:
        """The token's text, incomplete characters as U+FFFD; None without detokenization."""
        return None if self._tokenizer is None else self._tokenizer.token_text(self._token_id).text

    @property
    def bytes(self) -> builtins.bytes | None:
        """The token's bytes, which join to the text's bytes; None without detokenization."""
        return None if self._tokenizer is None else self._tokenizer.token_text(self._token_id).bytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Logprob) and self._numbers == other._numbers

    def __hash__(self) -> int:
        return hash(self._numbers)

    @property
    def _numbers(self) -> tuple[float, int, int]:
        return self.logprob, self.rank, self._token_id

    def __repr__(self) -> str:
        return (
            f"Logprob(logprob={self.logprob!r}, rank={self.rank!r}, "
            f"decoded_token={self.decoded_token!r})"
        )


class LogprobTable:
    """Log probabilities of successive tokens. tokenizer: for their texts; None: no texts."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._ranks = array("I")  # of each token
        self._starts = array("Q", [0])  # start of each token's candidates, and the end of the last
        self._sums = array("d", [0.0])  # cumulative sums of the tokens' logprobs
        self._token_ids = array("i")  # of the candidates, the token itself first
        self._logprobs = array("f")

    def __len__(self) -> int:
        return len(self._ranks)

    def append(self, message: UnpackedLogprobs, index: int, start: int) -> None:
        """Add a message's index-th token, whose candidates begin at start."""
        end = start + message.counts[index]
        self._ranks.append(message.ranks[index])
        self._token_ids += message.token_ids[start:end]
        self._logprobs += message.logprobs[start:end]
        self._starts.append(len(self._token_ids))
        self._sums.append(self._sums[-1] + message.logprobs[start])

    def sum(self, num_tokens: int) -> float:
        """Sum of the first num_tokens tokens' own log probabilities."""
        return self._sums[num_tokens]

    def candidates(self, index: int) -> dict[int, Logprob]:
        """Return a token's candidates: first itself, then the most likely ones in descending
        order."""
        start, end = self._starts[index], self._starts[index + 1]
        own_id, own_rank = self._token_ids[start], self._ranks[index]
        tokenizer = self._tokenizer
        found = {own_id: Logprob(self._logprobs[start], own_rank, own_id, tokenizer)}
        others = self._token_ids[start + 1 : end]
        logprobs = self._logprobs[start + 1 : end]
        for rank, (token_id, logprob) in enumerate(zip(others, logprobs, strict=True), 1):
            if token_id != own_id:
                found[token_id] = Logprob(logprob, rank, token_id, tokenizer)
        return found


class _View(Sequence[Entry], Generic[Entry]):
    """The first tokens of columns that may grow. Slices are lists."""

    def __init__(self, columns: LogprobTable, num_tokens: int) -> None:
        self._columns = columns
        self._num_tokens = num_tokens

    def __len__(self) -> int:
        return self._num_tokens

    def _entry(self, index: int) -> Entry:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Entry]:
        return map(self._entry, range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Entry: ...

    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...

    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        places = range(len(self))[index]
        return self._entry(places) if isinstance(places, int) else [*map(self._entry, places)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (list, type(self))) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr([*self])


class SampleLogprobs(_View[dict[int, Logprob]]):
    """Candidates of each output token."""

    def _entry(self, index: int) -> dict[int, Logprob]:
        return self._columns.candidates(index)

    @property
    def sum(self) -> float:
        """Log probability of the whole text."""
        return self._columns.sum(self._num_tokens)


class PromptLogprobs(_View[dict[int, Logprob] | None]):
    """Candidates of each prompt token; None for the first, which nothing precedes."""

    def __len__(self) -> int:
        return 1 + self._num_tokens

    def _entry(self, index: int) -> dict[int, Logprob] | None:
        return self._columns.candidates(index - 1) if index else None
