"""Sampling on whole rows with a full sort: slow, short, and what the sampler is compared with."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nanocore.kernels.gumbel_noise import gumbel_noise
from nanocore.kernels.sampling import TokenPlaces
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.sampling.columns import RowColumns, SampledRows, SamplingMetadata
from tests.step_plans import make_row

Settings = tuple[float, int, float, float]
"""temperature (0 is greedy), top_k (0 is off), top_p, min_p"""


def make_rows(rows: list[Settings], vocab_size: int, seeds: list[int] | None = None) -> SampledRows:
    """Rows that sample so; their seeds are 0, 1, 2, ... if not given."""
    columns = RowColumns(len(rows), vocab_size)
    for row, (temperature, top_k, top_p, min_p) in enumerate(rows):
        sampling = EngineSamplingParams(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
        )
        seed = row if seeds is None else seeds[row]
        columns.set_row(make_row(row, [], sampling, seed=seed))
    return columns.of_rows(np.arange(len(rows)))


def places_at(position_R: Tensor) -> TokenPlaces:
    """Of tokens that will be at these positions, each in a row of its own."""
    rows_R = torch.arange(len(position_R))
    table = torch.zeros(len(position_R), int(position_R.max()) + 1, dtype=torch.int32)
    return TokenPlaces(table, rows_R, position_R)


def make_metadata(rows: SampledRows, places: TokenPlaces | Tensor) -> SamplingMetadata:
    """How these rows sample tokens for these places, or positions."""
    fields = {name: torch.from_numpy(column) for name, column in rows.columns.items()}
    places = places if isinstance(places, TokenPlaces) else places_at(places)
    return SamplingMetadata(rows, fields, places)


def sample_whole(logits_RV: Tensor, rows: SampledRows, position_R: Tensor) -> Tensor:
    """One token id per row, int64 [R]. Greedy rows take the first of the largest logits."""
    names = "temperature", "top_k", "top_p", "min_p", "seed"
    temperature_R, top_k_R, top_p_R, min_p_R, seed_R = (
        torch.from_numpy(rows.columns[name]) for name in names
    )
    greedy_R = logits_RV.argmax(dim=-1)
    token_ids_V = torch.arange(logits_RV.shape[1])
    noise_RV = gumbel_noise(seed_R, position_R, token_ids_V)
    scaled_RV = logits_RV / temperature_R[:, None]
    filtered_RV = filter_logits(scaled_RV, top_k_R, top_p_R, min_p_R)
    token_ids_R = (scaled_RV + noise_RV).argmax(dim=-1)
    processed = rows.columns["processed_P"]
    token_ids_R[processed] = (filtered_RV + noise_RV).argmax(dim=-1)[processed]
    return greedy_R.where(temperature_R == 0, token_ids_R)


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
    # Not divided by their sum: of equal logits, where cuts may lie on a sum, these are exact.
    kept_RV = sorted_RV.masked_fill(drop_RV, -torch.inf).double()
    kept_RV = (kept_RV - kept_RV[:, :1]).exp()
    before_RV = kept_RV.cumsum(dim=-1) - kept_RV
    limit_R = top_p_R.where(top_p_R < 1.0, torch.inf) * kept_RV.sum(dim=-1)
    drop_RV |= before_RV >= limit_R[:, None]
    drop_RV[:, 0] = False
    return logits_RV.masked_fill(
        torch.empty_like(drop_RV).scatter_(1, order_RV, drop_RV), -torch.inf
    )
