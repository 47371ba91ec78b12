"""Sampling on whole rows with a full sort: slow, short, and what the sampler is compared with."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nanocore.kernels.gumbel_noise import gumbel_noise
from nanocore.worker.sampling.sampling_metadata import SamplingMetadata

Settings = tuple[float, int, float, float]
"""temperature (0 is greedy), top_k (0 is off), top_p, min_p"""


def make_metadata(
    rows: list[Settings], vocab_size: int, seeds: list[int] | None = None
) -> SamplingMetadata:
    """Metadata of these rows; their seeds are 0, 1, 2, ... if not given."""
    temperature, top_k, top_p, min_p = (np.array(column) for column in zip(*rows, strict=True))
    top_k = np.where(top_k > 0, np.minimum(top_k, vocab_size), vocab_size)
    has_filters = (top_k < vocab_size) | (top_p < 1.0) | (min_p > 0.0)
    return SamplingMetadata.of_rows(
        temperature.astype(np.float32),
        top_k.astype(np.int32),
        top_p.astype(np.float32),
        min_p.astype(np.float32),
        has_filters & (temperature != 0.0),
        np.arange(len(rows)) if seeds is None else np.array(seeds, np.int64),
    )


def sample_whole(logits_RV: Tensor, metadata: SamplingMetadata, position_R: Tensor) -> Tensor:
    """One token id per row, int64 [R]. Greedy rows take the first of the largest logits."""
    greedy_R = logits_RV.argmax(dim=-1)
    token_ids_V = torch.arange(logits_RV.shape[1])
    noise_RV = gumbel_noise(metadata.seed_R, position_R, token_ids_V)
    scaled_RV = logits_RV / metadata.temperature_R[:, None]
    filtered_RV = filter_logits(scaled_RV, metadata.top_k_R, metadata.top_p_R, metadata.min_p_R)
    token_ids_R = (scaled_RV + noise_RV).argmax(dim=-1)
    rows = metadata.filtered_rows
    token_ids_R[rows] = (filtered_RV + noise_RV).argmax(dim=-1)[rows]
    return greedy_R.where(metadata.temperature_R == 0, token_ids_R)


def filter_logits(logits_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """Logits with the tokens that min_p, top_k and top_p exclude at minus infinity, in that order.

    The most likely token always stays. Tokens of equal logits are kept in the order of their ids.
    """
    weights_RV = logits_RV.double()
    weights_RV = weights_RV - weights_RV.amax(dim=-1, keepdim=True)
    logits_RV = logits_RV.masked_fill(weights_RV < min_p_R.log()[:, None], -torch.inf)

    sorted_RV, order_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    drop_RV = ranks_V >= top_k_R[:, None]
    kept_probs_RV = sorted_RV.masked_fill(drop_RV, -torch.inf).double().softmax(dim=-1)
    before_RV = kept_probs_RV.cumsum(dim=-1) - kept_probs_RV
    drop_RV |= before_RV >= top_p_R.where(top_p_R < 1.0, torch.inf)[:, None]
    drop_RV[:, 0] = False
    return logits_RV.masked_fill(
        torch.empty_like(drop_RV).scatter_(1, order_RV, drop_RV), -torch.inf
    )
