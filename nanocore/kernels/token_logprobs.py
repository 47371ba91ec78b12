"""What `Kernels.logprobs` says: columns of log probabilities.

Ordered as tokens are sampled: by logit falling, and of equal ones the smaller id first.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities, logit - logsumexp(row), of each row's token and the K most likely ones.

    token_ids_NC: int32 [N, 1 + K], the row's own token and then the K first of the order: by logit
    falling, and of equal ones the smaller id first. logprobs_NC: float32, theirs. rank_N: int32,
    the own token's place in that order, from 1 on.
    """

    token_ids_NC: Tensor
    logprobs_NC: Tensor
    rank_N: Tensor
