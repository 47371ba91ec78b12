"""N-grams as drafts: what followed the latest earlier occurrence of a row's last tokens.

Nothing is kept between calls: each one searches the row's tokens backwards, up to 65,536 of them.
The longest n-gram wins. Of its occurrences it is the latest with enough tokens behind it, or else
the latest one, which is then taken to repeat itself: in a loop the draft goes round.

Evidence: the class of the match's length (up to 65 tokens, so beyond `prompt_lookup_max`) times 8,
plus the class of the draft's place in its run.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.drafting.proposer import NativeLibrary, NativeProposer


class NgramProposer(NativeProposer):
    """Looks up the last tokens of a row in the row itself.

    Args:
        library: compiled functions.
        token_ids: the scheduler's table, int32 [rows, tokens].
        max_drafts: of a row in a call.
        prompt_lookup_min, prompt_lookup_max: tokens of an n-gram.
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
        settings = (
            token_ids.ctypes.data, token_ids.shape[1], prompt_lookup_min, prompt_lookup_max
        )  # fmt: skip
        super().__init__(library.functions["ngram_propose"], settings, token_ids, max_drafts)
