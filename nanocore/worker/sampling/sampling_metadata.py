"""How the rows of a step sample, as columns; the same from step to step while the rows are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """R rows; all tensors on the host.

    all_greedy: every row takes its most likely token. filtered_rows: int64 indices of the R that
    have top_k, top_p or min_p; unfiltered_rows: of the others, whose temperature may be 0.
    temperature_R, top_p_R, min_p_R: float32. top_k_R: int32, V where it is off.
    seed_R: int64; a row's noise is a function of it, the token's position and its id.
    """

    all_greedy: bool
    filtered_rows: Tensor
    unfiltered_rows: Tensor
    temperature_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor
    seed_R: Tensor

    @classmethod
    def of_rows(
        cls,
        temperature: NDArray[np.float32],
        top_k: NDArray[np.int32],
        top_p: NDArray[np.float32],
        min_p: NDArray[np.float32],
        is_filtered: NDArray[np.bool_],
        seed: NDArray[np.int64],
    ) -> SamplingMetadata:
        """From columns on the host, each of R; top_k is V or more where it is off."""
        return cls(
            all_greedy=not temperature.any(),
            filtered_rows=torch.from_numpy(np.flatnonzero(is_filtered)),
            unfiltered_rows=torch.from_numpy(np.flatnonzero(~is_filtered)),
            temperature_R=torch.from_numpy(temperature),
            top_k_R=torch.from_numpy(top_k),
            top_p_R=torch.from_numpy(top_p),
            min_p_R=torch.from_numpy(min_p),
            seed_R=torch.from_numpy(seed),
        )
