"""Structured outputs as the scheduler and the step loop see them: a matcher for each sample.

A matcher follows the delivered tokens and nothing else. So it stays with its request through
preemption, and a resumed sample has the same state after the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nanocore.protocol.errors import EngineOverloadedError, InvalidRequestError
from nanocore.protocol.structured_outputs import StructuredOutputs


class NoGrammars:
    """Implements `GrammarSource`: refuses every structured output, with this reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def find(self, wanted: StructuredOutputs, client: int = 0) -> InvalidRequestError:
        return InvalidRequestError(self._reason)

    def compile(
        self,
        wanted: StructuredOutputs,
        done: Callable[[Compiled], None],
        client: int = 0,
        output: Sequence[int] = (),
    ) -> Callable[[], None]:
        done(self.find(wanted))
        return lambda: None

    def close(self) -> None:
        pass


class Matcher(Protocol):
    """One sample's state in its grammar. One thread at a time uses it.

    failure: why it cannot go on, for whoever reads the ERROR; None while it can.
    """

    failure: str | None

    def append(self, token_ids: Iterable[int]) -> None:
        """Note delivered output tokens, in order; takes almost no time."""

    def fill(self, words_W: NDArray[np.int32]) -> bool:
        """Write the mask of tokens that may follow, in the layout of `TokenMask.words_MW`'s rows.

        Returns False if every token may: what is written then means nothing. EOS may follow where
        the output can end; where it must, nothing else may. May take milliseconds.
        """

    def fill_behind(self, words_DW: NDArray[np.int32], drafts: Sequence[int]) -> bool:
        """Write the masks behind these drafts, one behind each; after a `fill` that did not fail.

        They are masks of what may never be delivered, so nothing that goes wrong is a failure:
        no token may follow then, as the failure would have it if the output came there.
        """

    def draft(self, proposed: Sequence[int], most: int) -> Sequence[int]:
        """Return drafts, up to so many: of those proposed what may follow, then what must.

        Takes microseconds a token.
        """


class Grammar(Protocol):
    """A compiled structured output; it serves any number of samples.

    not_held: JSON pointers of what was left out of its lenient parts.
    """

    not_held: Sequence[str]

    def matcher(self) -> Matcher:
        """Return a new matcher, at the grammar's beginning."""


Compiled: TypeAlias = "Grammar | InvalidRequestError | EngineOverloadedError"


class GrammarSource(Protocol):
    """Compiles and caches structured outputs outside the step loop."""

    def find(self, wanted: StructuredOutputs, client: int = 0) -> Compiled | None:
        """Return the cached result, if there is one; never waits. client: who wants it."""

    def compile(
        self,
        wanted: StructuredOutputs,
        done: Callable[[Compiled], None],
        client: int = 0,
        output: Sequence[int] = (),
    ) -> Callable[[], None]:
        """Start a compilation; done is called once, from another thread.

        output: of its one sample, tokens that an earlier run has produced, which the grammar's one
        matcher is to have taken in. Clients are served by turns. Returns what withdraws it: done
        need not be called then.
        """

    def close(self) -> None:
        """Stop compiling; done may not be called for pending compilations."""
