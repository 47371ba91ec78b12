"""Sampling from logits whose vocabulary is split over ranks.

Greedy rows, and rows with nothing but a temperature, need each rank's best token: adding Gumbel
noise, a pure function of (seed, position, token id), turns sampling into a maximum. So ranks
exchange candidates, a number each. Rows with top_k, top_p or min_p exchange their logits, for a cut
depends on all of them, and every rank then samples the whole row: all see the same and decide alike
without another word, and nothing here waits for a device. One rank has nothing to exchange.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanocore.kernels.interface import Filters, Kernels, Noise
from nanocore.kernels.step_rows import TokenPlaces
from nanocore.worker.communication.communicator import Communicator
from nanocore.worker.sampling.candidates import best_candidate, sampled_token_ids
from nanocore.worker.sampling.sampling_metadata import SamplingMetadata


class TokenSampler:
    """Samples from this rank's columns of the logits; all ranks of a stage get the same tokens.

    Args:
        first_token: of this rank's columns, which may be none. vocab_size: of all ranks, split as
        by `layers.embedding`. tp: the ranks, in the order of their tokens.
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
            return self.sample_filtered(logits_RV, noise, filters)
        token_ids_R = torch.empty_like(position_R)
        token_ids_R[others] = self.sample_plain(logits_RV[others], noise.of_rows(others))
        token_ids_R[filtered] = self.sample_filtered(
            logits_RV[filtered], noise.of_rows(filtered), filters.of_rows(filtered)
        )
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

    def sample_filtered(self, logits_RV: Tensor, noise: Noise, filters: Filters) -> Tensor:
        """Of rows with temperatures and filters, int64 [R]."""
        logits_RV = self._whole_rows(logits_RV)
        return self._kernels.best_filtered_token(logits_RV, noise, filters)[1]

    def _whole_rows(self, logits_RV: Tensor) -> Tensor:
        """Logits of the whole vocabulary, of which every rank has a range; the last has less."""
        if self._tp.size == 1:
            return logits_RV
        range_size = -(-self.vocab_size // self._tp.size)
        assert self._first_token == min(self._tp.rank * range_size, self.vocab_size)
        sent_RW = F.pad(logits_RV, (0, range_size - logits_RV.shape[1]), value=-torch.inf)
        gathered = self._tp.all_gather(sent_RW)
        # Of single columns a reshape would be a view, of another order in memory.
        rows_RSW = gathered.transpose(0, 1).contiguous()
        return rows_RSW.view(len(logits_RV), -1)[:, : self.vocab_size]
