"""How the rows of a step sample, as columns; the same from step to step while the rows are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """R rows; all tensors on the device.

    greedy_rows, plain_rows, filtered_rows: int64 indices into R, each row in one of them: those
    that take the most likely token, have a temperature alone, and have top_k, top_p or min_p.
    max_top_k: the largest top_k of filtered rows, V if one of them has none; known on the host.
    temperature_R, top_p_R, min_p_R: float32. top_k_R: int32, V where it is off.
    seed_R: int64; a row's noise is a function of it, the token's position and its id.
    """

    greedy_rows: Tensor
    plain_rows: Tensor
    filtered_rows: Tensor
    max_top_k: int
    temperature_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor
    seed_R: Tensor

    @classmethod
    def of_rows(
        cls,
        greedy: NDArray[np.bool_],
        temperature: NDArray[np.float32],
        top_k: NDArray[np.int32],
        top_p: NDArray[np.float32],
        min_p: NDArray[np.float32],
        seed: NDArray[np.int64],
        vocab_size: int,
        device: torch.device,
    ) -> SamplingMetadata:
        """From columns on the host, each of R; top_k is vocab_size where it is off."""
        filtered = ~greedy & ((top_k < vocab_size) | (top_p < 1.0) | (min_p > 0.0))

        def to_device(values: NDArray) -> Tensor:
            return torch.from_numpy(values).to(device)

        return cls(
            greedy_rows=to_device(np.flatnonzero(greedy)),
            plain_rows=to_device(np.flatnonzero(~greedy & ~filtered)),
            filtered_rows=to_device(np.flatnonzero(filtered)),
            max_top_k=int(top_k[filtered].max(initial=0)),
            temperature_R=to_device(temperature),
            top_k_R=to_device(top_k),
            top_p_R=to_device(top_p),
            min_p_R=to_device(min_p),
            seed_R=to_device(seed),
        )
