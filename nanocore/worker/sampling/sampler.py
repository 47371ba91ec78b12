"""Sampling from logits whose vocabulary is split over ranks: they exchange candidates, not logits.

Greedy rows, and rows with nothing but a temperature, need each rank's best token: adding Gumbel
noise, a pure function of (seed, position, token id), turns sampling into a maximum. Rows with
top_k, top_p or min_p need the best C tokens of all ranks in order. Where their cut lies further
down, the same is done again for those rows alone with a larger C. All ranks see the same
candidates, so all decide alike without another word. One rank is the case of nothing to exchange.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanocore.kernels.backend import Filters, Kernels, Noise
from nanocore.kernels.gumbel_noise import cached_rows, gumbel_noise
from nanocore.kernels.step_rows import TokenPlaces
from nanocore.worker.communication.communicator import Communicator
from nanocore.worker.sampling.candidates import (
    best_candidate,
    best_first,
    logits_of,
    make_candidates,
    nan_candidates,
    no_candidates,
    sampled_token_ids,
    token_ids_of,
)
from nanocore.worker.sampling.sampling_metadata import SamplingMetadata

_NUM_CANDIDATES = 256
_WIDENING = 32


class TokenSampler:
    """Samples from this rank's columns of the logits; all ranks of a stage get the same tokens.

    Args:
        first_token: of this rank's columns, which may be none. vocab_size: of all ranks.
        tp: the ranks, in the order of their tokens.
    """

    def __init__(
        self, first_token: int, vocab_size: int, tp: Communicator, kernels: Kernels
    ) -> None:
        self._first_token, self.vocab_size = first_token, vocab_size
        self._tp, self._kernels = tp, kernels

    def sample(self, logits_RV: Tensor, metadata: SamplingMetadata, position_R: Tensor) -> Tensor:
        """One token id per row, int64 [R]; NO_TOKEN of a row without a finite best logit.

        Args:
            logits_RV: float32. metadata: how each row samples. position_R: int64, where the sampled
            tokens will be.
        """
        if metadata.all_greedy:
            return self.sample_plain(logits_RV, None)
        noise = Noise(metadata.temperature_R, metadata.seed_R, position_R)
        filtered, others = metadata.filtered_rows, metadata.unfiltered_rows
        if len(filtered) == 0:
            return self.sample_plain(logits_RV, noise)
        filters = Filters(metadata.top_k_R, metadata.top_p_R, metadata.min_p_R)
        if len(others) == 0:
            return self.sample_filtered(logits_RV, noise, filters, metadata.max_top_k)
        token_ids_R = torch.empty_like(position_R)
        token_ids_R[others] = self.sample_plain(logits_RV[others], noise.of_rows(others))
        token_ids_R[filtered] = self.sample_filtered(
            logits_RV[filtered], noise.of_rows(filtered), filters.of_rows(filtered),
            metadata.max_top_k,
        )  # fmt: skip
        return token_ids_R

    def sample_plain(
        self, logits_RV: Tensor, noise: Noise | None, places: TokenPlaces | None = None
    ) -> Tensor:
        """Of rows without filters, int64 [R]; without noise the most likely tokens.

        places: where the tokens are to be written, too.
        """
        if self._tp.size == 1:
            return self._kernels.best_token(logits_RV, self._first_token, noise, places)[1]
        best_R = best_candidate(logits_RV, self._first_token, self._kernels, noise)
        token_ids_R = sampled_token_ids(self._tp.all_gather(best_R).amax(dim=0))
        if places is not None:
            places.write(token_ids_R)
        return token_ids_R

    def sample_filtered(
        self, logits_RV: Tensor, noise: Noise, filters: Filters, max_top_k: int
    ) -> Tensor:
        """Of rows with temperatures and filters, int64 [R]. max_top_k: the largest of them."""
        if self._tp.size == 1:
            best = self._kernels.best_filtered_token(logits_RV, noise, filters)
            if best is not None:
                return best[1]
        chosen_R = _sample_filtered(
            logits_RV, noise, filters, max_top_k, self._first_token, self.vocab_size, self._tp,
        )  # fmt: skip
        return sampled_token_ids(chosen_R)


def _sample_filtered(
    logits_FV: Tensor,
    noise: Noise,
    filters: Filters,
    max_top_k: int,
    first_token: int,
    vocab_size: int,
    tp: Communicator,
) -> Tensor:
    """The chosen candidates [F] of rows with top_k, top_p or min_p, the same on every rank."""
    logits_FV = logits_FV / noise.temperature_R[:, None]
    num_candidates = min(max_top_k, _NUM_CANDIDATES)
    chosen_F = torch.empty(len(logits_FV), dtype=torch.int64, device=logits_FV.device)
    undecided = torch.arange(len(logits_FV), device=logits_FV.device)
    # Rows that all have top_k need only the sums over their candidates.
    mass_F = None if max_top_k == vocab_size else torch.zeros_like(chosen_F, dtype=torch.float64)
    while True:
        candidates_FC, bound_F = _exchange(logits_FV, first_token, num_candidates, tp)
        if mass_F is None:
            mass_F = _mass(logits_FV, candidates_FC[:, 0], filters.min_p_R, tp)
        needed_F = torch.empty_like(bound_F)
        for chunk in cached_rows(candidates_FC):
            candidates_CC = candidates_FC[chunk]
            num_kept_C, needed_F[chunk] = _cut(
                candidates_CC, bound_F[chunk], mass_F[chunk], filters.of_rows(chunk), vocab_size
            )
            # Without a token, as the best candidate tells, there is nothing to choose or to widen.
            best_C = candidates_CC[:, 0]
            has_token_C = logits_of(best_C).isfinite()
            chosen_C = _choose(candidates_CC, num_kept_C, noise.of_rows(chunk))
            chosen_F[undecided[chunk]] = torch.where(has_token_C, chosen_C, best_C)
            needed_F[chunk] *= has_token_C
        # With the best max_top_k of every row at hand there is no need to look.
        if max_top_k <= num_candidates:
            return chosen_F
        open_rows = needed_F.nonzero()[:, 0]
        if len(open_rows) == 0:
            return chosen_F
        undecided = undecided[open_rows]
        noise, filters = noise.of_rows(open_rows), filters.of_rows(open_rows)
        logits_FV, mass_F = logits_FV[open_rows], mass_F[open_rows]
        widths = tp.all_gather(torch.tensor([logits_FV.shape[1]], device=logits_FV.device))
        num_candidates = min(
            max(_WIDENING * num_candidates, -(-int(needed_F.max()) // tp.size)), int(widths.max())
        )


def _exchange(
    logits_FV: Tensor, first_token: int, num_candidates: int, tp: Communicator
) -> tuple[Tensor, Tensor]:
    """(candidates [F, C], bound [F]): the best of every rank, best first.

    Of tokens not below the bound none is missing. The bound is the least int64 where no rank has
    any more. Where a logit is NaN so is that of the best candidate.
    """
    num_rows, width = logits_FV.shape
    num_sent = min(num_candidates, width)
    sent_FC = no_candidates((num_rows, num_candidates + 1), logits_FV.device)
    nan_candidate = nan_candidates((), logits_FV.device)
    token_ids_V = _token_ids(logits_FV, first_token)
    for chunk in cached_rows(logits_FV):
        candidates_CV = make_candidates(logits_FV[chunk], token_ids_V)
        sent_FC[chunk, :num_sent] = best_first(candidates_CV, num_sent)
        if width:
            is_spoilt_C = logits_FV[chunk].amax(dim=1).isnan()
            sent_FC[chunk, 0].masked_fill_(is_spoilt_C, nan_candidate)
    all_sent = num_sent == width
    sent_FC[:, -1] = torch.iinfo(torch.int64).min if all_sent else sent_FC[:, num_sent - 1]
    gathered = tp.all_gather(sent_FC)
    bound_F = gathered[:, :, -1].amax(dim=0)
    if tp.size == 1:
        return gathered[0, :, :-1], bound_F
    merged_FC = gathered[:, :, :-1].transpose(0, 1).reshape(num_rows, -1)
    return best_first(merged_FC, merged_FC.shape[1]), bound_F


def _mass(logits_FV: Tensor, best_F: Tensor, min_p_F: Tensor, tp: Communicator) -> Tensor:
    """Weights exp(logit - best logit) of the tokens that pass min_p, summed; float64 [F]."""
    mass_F = torch.zeros(len(logits_FV), dtype=torch.float64, device=logits_FV.device)
    best_F1, floor_F1 = logits_of(best_F)[:, None], min_p_F.log()[:, None]
    for chunk in cached_rows(logits_FV):
        below_CV = logits_FV[chunk] - best_F1[chunk]
        weights_CV = below_CV.exp() * (below_CV >= floor_F1[chunk])
        mass_F[chunk] = weights_CV.sum(dim=1, dtype=torch.float64)
    # Added one after the other: the same bits on every rank.
    masses = tp.all_gather(mass_F)
    for other_F in masses[1:]:
        masses[0] += other_F
    return masses[0]


def _cut(
    candidates_FC: Tensor, bound_F: Tensor, mass_F: Tensor, filters: Filters, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """(how many candidates are kept, how many are needed to tell or 0 if it is certain), both [F].

    The rules, in this order: a token stays if its weight, as a share of the best token's, reaches
    min_p; if fewer than top_k are before it; if the weight of those before it, as a share of all
    that stayed so far, is below top_p. The best always stays.
    """
    logits_FC = logits_of(candidates_FC)
    gaps_FC = logits_FC[:, :1] - logits_FC  # ascending, as are the sums
    sums_FC = gaps_FC.neg().exp_().cumsum(dim=1, dtype=torch.float64)
    num_sure_F = (candidates_FC >= bound_F[:, None]).sum(dim=1)
    have_all_F = bound_F == torch.iinfo(torch.int64).min
    has_top_k_F = filters.top_k_R < vocab_size

    num_min_p_F = _num_below(gaps_FC, -filters.min_p_R.log(), right=True)
    num_allowed_F = torch.minimum(num_min_p_F, filters.top_k_R).clamp_(min=1)
    allowed_sum_F = sums_FC.gather(1, num_allowed_F[:, None] - 1)[:, 0]
    limit_F = filters.top_p_R * torch.where(has_top_k_F, allowed_sum_F, mass_F)
    limit_F = torch.where(filters.top_p_R < 1.0, limit_F, torch.inf)
    num_kept_F = torch.minimum(num_allowed_F, 1 + _num_below(sums_FC, limit_F, right=False))

    # The first two rules cut among the tokens that are known for sure, or there are no others.
    bounded_F = have_all_F | (filters.top_k_R <= num_sure_F) | (num_allowed_F < num_sure_F)
    is_sure_F = bounded_F | (~has_top_k_F & (num_kept_F < num_sure_F))
    # No token that is missing outweighs the last one that is not, so top_p needs this many more,
    # and one after the cut to see that it is the cut.
    last_F1 = (num_sure_F - 1).clamp_(min=0)[:, None]
    lacking_F = torch.minimum(limit_F, mass_F) - sums_FC.gather(1, last_F1)[:, 0]
    needed_F = num_sure_F + 1 + lacking_F * gaps_FC.gather(1, last_F1)[:, 0].exp()
    needed_F = torch.where(has_top_k_F, filters.top_k_R, needed_F).nan_to_num_(vocab_size)
    needed_F = needed_F.clamp_(1, vocab_size).long()
    return num_kept_F, needed_F.masked_fill_(is_sure_F, 0)


def _num_below(ascending_FC: Tensor, limit_F: Tensor, right: bool) -> Tensor:
    """How many of each row are below its limit, or with `right` not above it; int64 [F]."""
    return torch.searchsorted(ascending_FC, limit_F[:, None], right=right)[:, 0]


def _choose(candidates_FC: Tensor, num_kept_F: Tensor, noise: Noise) -> Tensor:
    """Of each row's kept candidates, which come first, the one to sample; [F]."""
    token_ids_FC = token_ids_of(candidates_FC)
    noisy_FC = gumbel_noise(noise.seed_R, noise.position_R, token_ids_FC)
    noisy_FC += logits_of(candidates_FC)
    index_C = torch.arange(noisy_FC.shape[1], device=noisy_FC.device)
    noisy_FC.masked_fill_(index_C >= num_kept_F[:, None], -torch.inf)
    return make_candidates(noisy_FC, token_ids_FC).amax(dim=1)


def _token_ids(logits_RV: Tensor, first_token: int) -> Tensor:
    """int32 [V]: the tokens of this rank's columns."""
    last_token = first_token + logits_RV.shape[1]
    return torch.arange(first_token, last_token, dtype=torch.int32, device=logits_RV.device)
