"""What the scheduler and the step loop know of a structured output: a matcher for each sample.

A matcher follows the tokens that were delivered, and nothing else; so it stays with its request
through preemption, and a resumed one is the same after the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nanocore.protocol.errors import EngineOverloadedError, InvalidRequestError
from nanocore.protocol.structured_outputs import StructuredOutputs


class Matcher(Protocol):
    """One sample's place in its grammar. One thread at a time uses it.

    failure: why it cannot go on, for whoever reads the ERROR; None while it can.
    """

    failure: str | None

    def append(self, token_ids: Iterable[int]) -> None:
        """Take in output tokens that were delivered, in their order; costs next to nothing."""
        ...

    def fill(self, words_W: NDArray[np.int32]) -> bool:
        """Write which tokens may follow, as `TokenMask.words_MW` has a row.

        Returns False if every token may: what is written then means nothing. EOS may follow where
        the output can end; where it must, nothing else may. May take milliseconds.
        """
        ...


class Grammar(Protocol):
    """What a structured output was compiled to; it serves any number of samples.

    not_held: JSON pointers of what was left out of its lenient parts.
    """

    not_held: Sequence[str]

    def matcher(self) -> Matcher:
        """A new one, at its beginning."""
        ...


Compiled: TypeAlias = "Grammar | InvalidRequestError | EngineOverloadedError"


class GrammarSource(Protocol):
    """Compiles what requests want, beside the step loop, and keeps what it compiled."""

    def find(self, wanted: StructuredOutputs, client: int = 0) -> Compiled | None:
        """What this came to before, if it is still known; at once. client: who wants it."""
        ...

    def compile(
        self,
        wanted: StructuredOutputs,
        done: Callable[[Compiled], None],
        client: int = 0,
        output: Sequence[int] = (),
    ) -> Callable[[], None]:
        """Begin to compile it; done is called once, from another thread.

        output: of its one sample, tokens that an earlier run has produced, which the grammar's one
        matcher is to have taken in. Clients are served by turns. Returns what withdraws it: done
        need not be called then.
        """
        ...

    def close(self) -> bool:
        """Compile no more; done may not be called for what was begun.

        Returns False if a thread is still compiling: the process cannot end in order then.
        """
        ...
