"""Proposers of speculative decoding that run in the engine's process, one a file."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.drafting.ngram import NgramProposer
from nanocore.engine_core.drafting.proposer import NativeLibrary, Proposer
from nanocore.engine_core.drafting.suffix import SuffixProposer
from nanocore.worker.config.speculative_config import SpeculativeConfig


def make_proposer(
    config: SpeculativeConfig,
    library: NativeLibrary,
    shares_outputs: bool,
    token_ids: NDArray[np.int32],
) -> Proposer:
    """Make the proposer of a configuration, whose method is no worker's.

    shares_outputs: whether requests with the same salt may see each other's finished outputs.
    token_ids: the scheduler's table.
    """
    most = config.num_speculative_tokens
    if config.method == "ngram":
        return NgramProposer(
            library,
            token_ids,
            most,
            prompt_lookup_min=config.prompt_lookup_min,
            prompt_lookup_max=config.prompt_lookup_max,
        )
    kept = config.suffix_decoding_max_cached_requests if shares_outputs else 0
    return SuffixProposer(
        library,
        token_ids,
        most,
        suffix_decoding_max_tree_depth=config.suffix_decoding_max_tree_depth,
        suffix_decoding_max_cached_requests=kept,
        suffix_decoding_max_spec_factor=config.suffix_decoding_max_spec_factor,
        suffix_decoding_min_token_prob=config.suffix_decoding_min_token_prob,
    )
