"""N-grams as drafts: what followed the latest earlier occurrence of a row's last tokens.

Nothing is kept between calls: each one searches the row's tokens backwards, up to 65,536 of them.
The longest n-gram wins. Of its occurrences it is the latest with enough tokens behind it, or else
the latest one, which is then taken to repeat itself: in a loop the draft goes round.

Evidence: the class of the match's length (up to 65 tokens, so beyond `prompt_lookup_max`) times 8,
plus the class of the draft's place in its run.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.drafting.proposer import (
    IntArray,
    NativeLibrary,
    NativeProposer,
    Proposals,
)


class NgramProposer:
    """Looks up the last tokens of a row in the row itself. Implements `Proposer`.

    Args:
        library: compiled functions.
        token_ids: the scheduler's table, int32 [rows, tokens].
        max_drafts: of a row in a call.
        prompt_lookup_min, prompt_lookup_max: tokens of an n-gram.

    Raises:
        ValueError: the limits are below 1, or crossed.
    """

    def __init__(
        self,
        library: NativeLibrary,
        token_ids: NDArray[np.int32],
        max_drafts: int,
        *,
        prompt_lookup_min: int,
        prompt_lookup_max: int,
    ) -> None:
        if not 1 <= prompt_lookup_min <= prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min={prompt_lookup_min}, prompt_lookup_max={prompt_lookup_max}: "
                "give 1 <= min <= max"
            )
        settings = (
            token_ids.ctypes.data, token_ids.shape[1], prompt_lookup_min, prompt_lookup_max
        )  # fmt: skip
        function = library.functions["ngram_propose"]
        self._native = NativeProposer(function, settings, token_ids, max_drafts)

    def begin(self, row: int, salt: Hashable) -> None:
        """Do nothing: a row's tokens say it all."""

    def end(self, row: int, num_prompt: int, num_tokens: int, has_finished: bool) -> None:
        """Do nothing, likewise."""

    def propose(self, rows: IntArray, num_tokens: IntArray, most: IntArray) -> Proposals:
        """Guess up to most[i] tokens behind the first num_tokens[i] of each row."""
        return self._native.propose(rows, num_tokens, most)

    @property
    def num_bytes(self) -> int:
        """Memory that is held now: none but the results'."""
        return 0
