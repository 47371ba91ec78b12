"""Sampling in plain torch: edits of logits, noise, filters, log probabilities.

Nothing here waits for a device: shapes follow from what the host knows. Forbidding a token is
adding minus infinity, so a logit that is not a number stays one, and the row has no token. Adding
-0.0 changes nothing, not even a zero. Filters sort the whole row; their rules are
`sampling.Filters`, weights are float32 and their sums float64. Shape suffixes: see `interface` and
`logit_edits`; further, C some of R.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from nanocore.kernels.candidates import NO_TOKEN, logits_of, make_candidates, token_ids_of
from nanocore.kernels.gumbel_noise import best_with_noise, cached_rows
from nanocore.kernels.logit_edits import LogitEdits, TokenLists, TokenMask
from nanocore.kernels.sampling import Filters, LogprobTensors, Noise, TokenPlaces

_SLICE_VALUES: Final = 1 << 22
"""Logits, or tokens of rows, that penalties are worked out for at a time: about 150 MB."""

_FORBIDDEN: Final = -torch.inf
_KEPT: Final = -0.0


def edit_logits(logits_RV: Tensor, edits: LogitEdits) -> None:
    _allow(logits_RV, edits.lists)
    _add(logits_RV, edits)
    width = max(logits_RV.shape[1], edits.token_table.shape[1])
    step = max(1, _SLICE_VALUES // width)
    for start in range(0, len(logits_RV), step):
        _penalise(logits_RV[start : start + step], edits, slice(start, start + step))


def _rows_of(starts_A: Tensor, num_entries: int) -> Tensor:
    """The row that each entry of a list belongs to, int64 [N]."""
    entries_N = torch.arange(num_entries, dtype=starts_A.dtype, device=starts_A.device)
    return torch.searchsorted(starts_A[1:], entries_N, right=True)


def _allow(logits_RV: Tensor, lists: TokenLists) -> None:
    if len(lists.allowed_N) == 0:
        return
    places = _rows_of(lists.allowed_starts_A, len(lists.allowed_N)), lists.allowed_N.long()
    allowed_N = logits_RV[places]
    logits_RV += _forbid(lists.allowed_starts_A.diff() > 0)[:, None]
    logits_RV[places] = allowed_N


def _add(logits_RV: Tensor, edits: LogitEdits) -> None:
    """Biases, stops and bad words: however the additions to a token are ordered, they are one
    finite number at most, and perhaps minus infinity."""
    lists = edits.lists
    if len(lists.biased_N):
        rows_N = _rows_of(lists.bias_starts_A, len(lists.biased_N))
        logits_RV.index_put_((rows_N, lists.biased_N.long()), lists.biases_N, accumulate=True)
    if len(lists.stops_N):
        is_early_R = edits.num_tokens_R - edits.num_prompt_tokens_R < edits.min_tokens_R
        rows_N = _rows_of(lists.stop_starts_A, len(lists.stops_N))
        places = rows_N, lists.stops_N.long()
        logits_RV.index_put_(places, _forbid(is_early_R[rows_N]), accumulate=True)
    if len(lists.bad_N):
        rows_W, last_W, is_due_W = _bad_tokens(edits)
        logits_RV.index_put_((rows_W, last_W), _forbid(is_due_W), accumulate=True)


def _forbid(is_forbidden: Tensor) -> Tensor:
    kept = torch.full(is_forbidden.shape, _KEPT, device=is_forbidden.device)
    return kept.masked_fill_(is_forbidden, _FORBIDDEN)


def _bad_tokens(edits: LogitEdits) -> tuple[Tensor, Tensor, Tensor]:
    """Row and last token of each bad sequence, and whether the output ends with the others."""
    starts, bad_N = edits.lists.bad_starts, edits.lists.bad_N
    num_sequences = len(starts) - 1
    rows_W = _rows_of(edits.lists.sequence_starts_A, num_sequences)
    sequence_N = _rows_of(starts, len(bad_N))
    rows_N = rows_W[sequence_N]
    last_W = starts[1:].long() - 1
    ahead_N = last_W[sequence_N] - torch.arange(len(bad_N), device=bad_N.device)
    place_N = edits.num_tokens_R[rows_N] - ahead_N
    most = edits.token_table.shape[1] - 1
    found_N = edits.token_table[edits.rows_R[rows_N], place_N.clamp(0, most)]
    is_output_N = place_N >= edits.num_prompt_tokens_R[rows_N]
    differs_N = (ahead_N > 0) & ~(is_output_N & (found_N == bad_N))
    num_different_W = torch.zeros_like(last_W).index_add_(0, sequence_N, differs_N.long())
    return rows_W, bad_N[last_W].long(), num_different_W == 0


def _penalise(logits_CV: Tensor, edits: LogitEdits, some: slice) -> None:
    width = logits_CV.shape[1]
    token_ids_CL = edits.token_table[edits.rows_R[some]].long()
    places_L = torch.arange(token_ids_CL.shape[1], device=logits_CV.device)
    is_known_CL = (places_L < edits.num_tokens_R[some, None]) & (token_ids_CL >= 0)
    # Where there is none, a column behind the last.
    token_ids_CL = token_ids_CL.where(is_known_CL, width)
    is_seen_CV = torch.zeros(
        len(logits_CV), width + 1, dtype=torch.bool, device=logits_CV.device
    ).scatter_(1, token_ids_CL, True)[:, :width]  # fmt: skip
    penalty_C1 = edits.repetition_penalty_R[some, None]
    repeated_CV = torch.where(logits_CV > 0, logits_CV / penalty_C1, logits_CV * penalty_C1)
    logits_CV.copy_(repeated_CV.where(is_seen_CV, logits_CV))

    is_output_CL = places_L >= edits.num_prompt_tokens_R[some, None]
    token_ids_CL = token_ids_CL.where(is_output_CL, width)
    counts_CV = torch.zeros(len(logits_CV), width + 1, device=logits_CV.device).scatter_add_(
        1, token_ids_CL, torch.ones_like(token_ids_CL, dtype=torch.float32)
    )[:, :width]
    less_CV = logits_CV - edits.frequency_penalty_R[some, None] * counts_CV
    less_CV -= edits.presence_penalty_R[some, None]
    logits_CV.copy_(less_CV.where(counts_CV > 0, logits_CV))


def best_token(
    logits_RV: Tensor,
    first_token: int,
    noise: Noise | None = None,
    places: TokenPlaces | None = None,
    mask: TokenMask | None = None,
) -> tuple[Tensor, Tensor]:
    logits_RV = allowed_logits(logits_RV, first_token, mask)
    if noise is None:
        value_R, column_R = logits_RV.max(dim=1)
    else:
        value_R, column_R = best_with_noise(logits_RV, first_token, noise)
    column_R = column_R.masked_fill(~value_R.isfinite(), NO_TOKEN)
    if places is not None:
        places.write(column_R)
    return value_R, column_R


def best_filtered_token(
    logits_RV: Tensor, noise: Noise, filters: Filters, mask: TokenMask | None = None
) -> tuple[Tensor, Tensor]:
    logits_RV = allowed_logits(logits_RV, 0, mask)
    return best_token(filtered(logits_RV, noise, filters), 0, noise)


def allowed_logits(logits_RV: Tensor, first_token: int, mask: TokenMask | None) -> Tensor:
    """A copy that has minus infinity for what the mask forbids; without one the same."""
    if mask is None:
        return logits_RV
    allowed_RV = torch.empty_like(logits_RV)
    for rows in cached_rows(logits_RV):
        of_rows = TokenMask(mask.words_MW, mask.index_R[rows])
        is_allowed_CV = of_rows.is_allowed(first_token, logits_RV.shape[1])
        allowed_RV[rows] = logits_RV[rows].masked_fill(~is_allowed_CV, -torch.inf)
    return allowed_RV


def filtered(logits_RV: Tensor, noise: Noise, filters: Filters) -> Tensor:
    """The logits of tokens that stay, and minus infinity in place of the others', [R, V].

    A row's NaN stays, if there is one.
    """
    filtered_RV = torch.empty_like(logits_RV)
    for rows in cached_rows(logits_RV):
        # 0.0 and -0.0 are equal, which a sort by bits would not see.
        scaled_CV = logits_RV[rows] / noise.temperature_R[rows, None] + 0.0
        order_CV, num_kept_C = _order(scaled_CV, filters.of_rows(rows))
        ranks_V = torch.arange(order_CV.shape[1], device=order_CV.device)
        is_dropped_CV = torch.empty_like(order_CV, dtype=torch.bool)
        is_dropped_CV.scatter_(1, order_CV, ranks_V >= num_kept_C[:, None])
        filtered_RV[rows] = logits_RV[rows].masked_fill(is_dropped_CV, -torch.inf)
    return filtered_RV


def _order(scaled_RV: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """(columns from the best on, [R, V]; how many of the first stay, [R])."""
    sorted_RV, order_RV = scaled_RV.sort(dim=1, descending=True, stable=True)
    best_R1 = sorted_RV[:, :1]
    gaps_RV = (best_R1 - sorted_RV).masked_fill_(sorted_RV == best_R1, 0.0)  # inf - inf is NaN
    ranks_V = torch.arange(scaled_RV.shape[1], device=scaled_RV.device)
    allowed_RV = gaps_RV <= -filters.min_p_R.log()[:, None]
    allowed_RV &= ranks_V < filters.top_k_R[:, None]
    sums_RV = (gaps_RV.neg().exp_() * allowed_RV).cumsum(dim=1, dtype=torch.float64)
    limit_R = filters.top_p_R * sums_RV[:, -1]
    limit_R = torch.where(filters.top_p_R < 1.0, limit_R, torch.inf)
    num_below_R = torch.searchsorted(sums_RV, limit_R[:, None])[:, 0]
    return order_RV, torch.minimum(allowed_RV.sum(dim=1), 1 + num_below_R).clamp_(min=1)


_MAX_VALUES: Final = 1 << 23
"""Logits that are ordered at once, which takes 16 bytes for each."""


def logprobs(
    logits_RV: Tensor, token_ids_N: Tensor, num_top: int, index_N: Tensor | None = None
) -> LogprobTensors:
    logits_NV = logits_RV if index_N is None else logits_RV[index_N]
    num_rows, width = logits_NV.shape
    size = max(1, _MAX_VALUES // width)
    parts = [
        _of_few(logits_NV[start : start + size], token_ids_N[start : start + size], num_top)
        for start in range(0, max(1, num_rows), size)
    ]
    if len(parts) == 1:
        return LogprobTensors(*parts[0])
    return LogprobTensors(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _of_few(logits_RV: Tensor, token_ids_R: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    width = logits_RV.shape[1]
    best_R1 = logits_RV.amax(dim=1, keepdim=True)
    log_sum_R1 = (logits_RV - best_R1).exp_().sum(dim=1, keepdim=True, dtype=torch.float64).log_()
    all_RV = make_candidates(logits_RV, torch.arange(width, device=logits_RV.device))
    own_R1 = all_RV.gather(1, token_ids_R.clamp(min=0)[:, None])
    rank_R = (all_RV > own_R1).sum(dim=1).add_(1).int()
    if num_top < width:
        top_RK = all_RV.topk(num_top, dim=1).values
    else:
        top_RK = all_RV.sort(dim=1, descending=True).values
    chosen_RC = torch.cat((own_R1, top_RK), dim=1)
    # The best one's distance is 0 and its logarithm alone is left, whose digits are all kept so.
    logprobs_RC = logits_of(chosen_RC).double().sub_(best_R1).sub_(log_sum_R1).float()
    return token_ids_of(chosen_RC).int(), logprobs_RC, rank_R


class TorchSampling:
    """Implements `SamplingKernels`."""

    best_token = staticmethod(best_token)
    edit_logits = staticmethod(edit_logits)
    best_filtered_token = staticmethod(best_filtered_token)
    logprobs = staticmethod(logprobs)
