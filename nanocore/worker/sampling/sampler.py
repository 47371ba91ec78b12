"""Sampling from logits whose vocabulary is split over ranks.

Plain rows, greedy or with nothing but a temperature, need each rank's best token: adding Gumbel
noise, a pure function of (seed, position, token id), turns sampling into a maximum. So ranks
exchange candidates, a number each. Rows that ask for more exchange their logits, for filters depend
on all of them, and every rank then edits and samples the whole row: all see the same and decide
alike without another word, and nothing here waits for a device. One rank has nothing to exchange.
Masks are looked at where a token is chosen: by each rank in its columns, or in whole rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanocore.kernels.candidates import best_candidate, sampled_token_ids
from nanocore.kernels.interface import Kernels
from nanocore.kernels.logit_edits import TokenMask
from nanocore.kernels.sampling import LogprobTensors, Noise, TokenPlaces
from nanocore.worker.communication.communicator import Communicator
from nanocore.worker.sampling.columns import SamplingMetadata


class TokenSampler:
    """Samples from this rank's columns of the logits; all ranks of a stage get the same tokens.

    Args:
        first_token: of this rank's columns, which may be none. vocab_size: of all ranks, split as
        by `layers.linear`. tp: the ranks, in the order of their tokens.
    """

    def __init__(
        self, first_token: int, vocab_size: int, tp: Communicator, kernels: Kernels
    ) -> None:
        self._first_token = first_token
        self.vocab_size = vocab_size
        self._tp = tp
        self._kernels = kernels

    def sample(
        self, logits_SV: Tensor, sampling: SamplingMetadata, mask: TokenMask | None = None
    ) -> Tensor:
        """One token id per sample slot, int64 [S]; NO_TOKEN of one without a finite best logit.

        logits_SV: float32, perhaps written over. sampling: how slots sample; the tokens are written
        to its places, too. mask: which tokens they may sample; None: all.
        """
        rows, places = sampling.rows, sampling.places
        if rows.num_processed == 0:
            noise = None if rows.all_greedy else sampling.noise
            return self.sample_plain(logits_SV, noise, places, mask)
        if rows.num_processed == len(logits_SV) and rows.sizes is None:
            token_ids_S = self.sample_processed(logits_SV, sampling, mask)
            places.write(token_ids_S)
            return token_ids_S
        # Slots with filters or edits are sampled apart, first those with lists, which are edits of
        # any length (logit bias, penalties). Nothing is written to the rows before: edits look at
        # the tokens there, and a row's drafts are among them.
        if rows.num_processed == len(logits_SV):
            token_ids_S = torch.empty(len(logits_SV), dtype=torch.int64, device=logits_SV.device)
        else:
            token_ids_S = self.sample_plain(logits_SV, sampling.noise, mask=mask)
        if rows.num_processed:
            index_P = sampling.fields["processed_P"]
            # `x[index]` would start torch's threads on the cores that our kernels use.
            logits_PV = logits_SV.index_select(0, index_P)
            mask_P = None if mask is None else mask.of_rows(index_P)
            token_ids_P = self.sample_processed(logits_PV, sampling.of_processed(), mask_P)
            token_ids_S.index_copy_(0, index_P, token_ids_P)
        places.write(token_ids_S)
        return token_ids_S

    def sample_plain(
        self,
        logits_RV: Tensor,
        noise: Noise | None,
        places: TokenPlaces | None = None,
        mask: TokenMask | None = None,
    ) -> Tensor:
        """Sample rows without filters or edits, int64 [R]; without noise the most likely tokens.

        places: where the tokens are to be written, too.
        """
        if self._tp.size == 1:
            return self._kernels.best_token(logits_RV, self._first_token, noise, places, mask)[1]
        best_R = best_candidate(logits_RV, self._first_token, self._kernels, noise, mask)
        token_ids_R = sampled_token_ids(self._tp.all_gather(best_R).amax(dim=0))
        if places is not None:
            places.write(token_ids_R)
        return token_ids_R

    def sample_processed(
        self, logits_RV: Tensor, metadata: SamplingMetadata, mask: TokenMask | None = None
    ) -> Tensor:
        """Sample rows with filters or edits, int64 [R]; edited logits are written over."""
        logits_RV, edits = self._whole_rows(logits_RV), metadata.edits
        if edits is not None:
            self._kernels.edit_logits(logits_RV[: edits.lists.num_rows], edits)
        noise, filters = metadata.noise, metadata.filters
        return self._kernels.best_filtered_token(logits_RV, noise, filters, mask)[1]

    def logprobs(
        self, logits_RV: Tensor, token_ids_N: Tensor, num_top: int, index_N: Tensor | None = None
    ) -> LogprobTensors | None:
        if self._tp.size > 1:
            logits_RV = logits_RV if index_N is None else logits_RV[index_N]
            logits_RV, index_N = self._whole_rows(logits_RV), None
        if self._tp.rank > 0:
            return None
        return self._kernels.logprobs(logits_RV, token_ids_N, num_top, index_N)

    def _whole_rows(self, logits_RV: Tensor) -> Tensor:
        """Logits of the whole vocabulary; every rank has a range, and the last has less."""
        if self._tp.size == 1:
            return logits_RV
        range_size = -(-self.vocab_size // self._tp.size)
        assert self._first_token == min(self._tp.rank * range_size, self.vocab_size)
        sent_RW = F.pad(logits_RV, (0, range_size - logits_RV.shape[1]), value=-torch.inf)
        gathered = self._tp.all_gather(sent_RW)
        # Of single columns a reshape would be a view, of another order in memory.
        rows_RSW = gathered.transpose(0, 1).contiguous()
        return rows_RSW.view(len(logits_RV), -1)[:, : self.vocab_size]
