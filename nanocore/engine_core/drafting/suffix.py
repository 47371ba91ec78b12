"""Suffixes as drafts: what most often followed the longest run of last tokens that is known.

Runs are looked up in suffix automata (kernels/cpu/suffix_automaton.h): one of each row's own
tokens, and others of finished outputs, which only rows with the same salt see. A draft follows the
most frequent continuations while it is probable enough, and is as long as the match is. A prompt is
read over several calls if it is long; until then the row gets no drafts.

Evidence: the class of the match's length at a draft times 8, plus the class of how often, and in
which share of cases, the draft followed.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from ctypes import c_void_p
from typing import Final

import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.drafting.proposer import NativeLibrary, NativeProposer

MAX_SALTS: Final = 256
"""Salts whose outputs are kept; `SuffixDrafts` in kernels/cpu/drafts.h keeps as many."""
DEFAULT_MAX_BYTES: Final = 256 * 2**20


class SuffixProposer(NativeProposer):
    """Looks up the last tokens of a row in itself and in finished outputs.

    Args:
        library: compiled functions.
        token_ids: the scheduler's table, int32 [rows, tokens].
        max_drafts: of a row in a call.
        suffix_decoding_max_tree_depth: match length beyond which drafts get no longer.
        suffix_decoding_max_cached_requests: finished outputs that are kept; 0: none.
        suffix_decoding_max_spec_factor: drafts per token of the match.
        suffix_decoding_min_token_prob: estimated probability of a whole draft, at least.
        max_bytes: of all automata. When they are full, the oldest outputs are dropped first, and
            then rows get no automaton.

    Raises:
        MemoryError: there is none for the proposer itself.
    """

    def __init__(
        self,
        library: NativeLibrary,
        token_ids: NDArray[np.int32],
        max_drafts: int,
        *,
        suffix_decoding_max_tree_depth: int,
        suffix_decoding_max_cached_requests: int,
        suffix_decoding_max_spec_factor: float,
        suffix_decoding_min_token_prob: float,
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        self._functions = functions = library.functions
        self._drafts = functions["suffix_new"](
            token_ids.ctypes.data, token_ids.shape[1], len(token_ids),
            suffix_decoding_max_tree_depth, suffix_decoding_max_cached_requests,
            suffix_decoding_max_spec_factor, suffix_decoding_min_token_prob, max_bytes,
        )  # fmt: skip
        if not self._drafts:
            raise MemoryError(f"no memory for the suffix automata of {len(token_ids)} rows")
        weakref.finalize(self, functions["suffix_free"], self._drafts)
        settings = (c_void_p(self._drafts),)
        super().__init__(functions["suffix_propose"], settings, token_ids, max_drafts)
        self._salt_ids: dict[Hashable, int] = {}
        self._num_salts = 0

    def begin(self, row: int, salt: Hashable) -> None:
        """Follow a request that takes a row."""
        known = self._salt_ids.pop(salt, None)
        if known is None:
            known = self._num_salts = self._num_salts + 1
        self._salt_ids[salt] = known  # the latest last; a forgotten salt begins anew
        if len(self._salt_ids) > MAX_SALTS:
            del self._salt_ids[next(iter(self._salt_ids))]
        self._functions["suffix_begin"](self._drafts, row, known)

    def end(self, row: int, num_prompt: int, num_tokens: int, has_finished: bool) -> None:
        """Forget a row; what a finished request wrote is kept for others with its salt."""
        self._functions["suffix_end"](self._drafts, row, num_prompt, num_tokens, has_finished)

    @property
    def num_bytes(self) -> int:
        """Memory that is held now."""
        num_bytes: int = self._functions["suffix_bytes"](self._drafts)
        return num_bytes
