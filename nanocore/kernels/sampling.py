"""The interface's sampling: tokens out of logits. Shape suffixes: see `interface`."""

from __future__ import annotations

from typing import Protocol

import msgspec
from torch import Tensor

from nanocore.kernels.logit_edits import LogitEdits, TokenMask


class Noise(msgspec.Struct, frozen=True):
    """Noise of R rows. temperature_R: float32, 0 is greedy. seed_R, position_R: int64."""

    temperature_R: Tensor
    seed_R: Tensor
    position_R: Tensor

    def contiguous(self) -> Noise:
        return Noise(*(x.contiguous() for x in (self.temperature_R, self.seed_R, self.position_R)))


class Filters(msgspec.Struct, frozen=True):
    """Sampling filters of R rows. top_k_R: int32, V or more is off. top_p_R, min_p_R: float32.

    In this order: a token stays if its probability, as a share of the best token's, reaches min_p;
    if fewer than top_k are before it; if the probability of those before it, as a share of all that
    stayed so far, is below top_p (1.0 is off). Tokens are ordered by logit, and of equal ones the
    smaller id comes first. The best always stays.
    """

    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor

    def of_rows(self, rows: Tensor | slice) -> Filters:
        return Filters(self.top_k_R[rows], self.top_p_R[rows], self.min_p_R[rows])


class LogprobTensors(msgspec.Struct, frozen=True):
    """Log probabilities, logit - logsumexp(row), of each row's token and the K most likely ones.

    token_ids_NC: int32 [N, 1 + K], the row's own token and then the K first by logit, falling; of
    equal logits the smaller id comes first. logprobs_NC: float32, theirs. rank_N: int32, the own
    token's place in that order, from 1 on.
    """

    token_ids_NC: Tensor
    logprobs_NC: Tensor
    rank_N: Tensor


class TokenPlaces(msgspec.Struct, frozen=True):
    """Places of sampled tokens in the token table; rows_R, positions_R: int64."""

    token_table: Tensor
    rows_R: Tensor
    positions_R: Tensor

    def of_rows(self, rows: Tensor) -> TokenPlaces:
        return TokenPlaces(self.token_table, self.rows_R[rows], self.positions_R[rows])

    def read(self) -> Tensor:
        """The tokens that are there, int64 [R]."""
        return self.token_table[self.rows_R, self.positions_R].long()

    def write(self, token_ids_R: Tensor) -> None:
        """Write int64 [R], each to its place; places are distinct."""
        if self.token_table.is_cpu:  # numpy begins sooner
            places = self.rows_R.numpy(), self.positions_R.numpy()
            self.token_table.numpy()[places] = token_ids_R.numpy()
        else:
            self.token_table[self.rows_R, self.positions_R] = token_ids_R.int()


class SamplingKernels(Protocol):
    """Kernels for the rows of a step that sample, each independent of the others."""

    def best_token(
        self,
        logits_RV: Tensor,
        first_token: int,
        noise: Noise | None = None,
        places: TokenPlaces | None = None,
        mask: TokenMask | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(the greatest value, its column) of each row, float32 and int64 [R]; V is above 0.

        Of equal values the first. logits_RV: float32, of tokens from first_token on. noise: values
        are logits / temperature plus Gumbel noise of (seed, position, token id), which is the same
        in each backend but for rounding; logits alone where the temperature is 0.

        The column is -1 of a row that has no token, for its greatest value is not finite, or one is
        NaN; the value is not finite either, and NaN if one is. places: columns go there too.

        mask: only tokens that it allows are looked at, in all that is said here.
        """

    def edit_logits(self, logits_RV: Tensor, edits: LogitEdits) -> None:
        """Change float32 logits of the whole vocabulary as rows ask, in place, in this order.

        All but the allowed tokens become minus infinity; biases are added; before min_tokens stops
        become minus infinity, and so does the last token of each bad sequence if the output ends
        with all tokens before it. Then, of tokens that the row holds, logits above 0 are divided by
        the repetition penalty and others multiplied by it; and those of the output have the
        frequency penalty taken off, times how often it holds them, and the presence penalty.

        What is not finite stays so. The same bits in each backend; the host does not wait.
        """

    def best_filtered_token(
        self, logits_RV: Tensor, noise: Noise, filters: Filters, mask: TokenMask | None = None
    ) -> tuple[Tensor, Tensor]:
        """Sample as `best_token` with noise, among tokens that filters keep and the mask allows.

        logits_RV: of the whole vocabulary. Temperatures are above 0. The host does not wait.
        Weights exp(logit - best) are float32 and their sums float64 (Triton's: within a thread
        float32), in an order of the backend's own: a cut of top_p that lies so close to a sum that
        their rounding decides may be another one in another backend.
        """

    def logprobs(
        self, logits_RV: Tensor, token_ids_N: Tensor, num_top: int, index_N: Tensor | None = None
    ) -> LogprobTensors:
        """Log probabilities of each row's token and of the num_top most likely ones, or of all.

        logits_RV: float32, of the whole vocabulary; only read. index_N: int64, which of the rows
        are meant; None: all of them. token_ids_N: int64. The host does not wait. Sums of
        exp(logit - best) are float64, of float32. What is said of a row whose best logit is not
        finite, that has a NaN, or whose token is below 0, means nothing.
        """
