"""The weights of linear layers as backends keep them, and their quantization to int8.

Weight-only: activations stay as they are, and a product is scaled once it is summed up. int8 is
symmetric with a scale for each output feature, so the layer's result is exactly that of the rounded
weights (LLM.int8: Dettmers et al. 2022, has the same scales).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight [out_features, in_features] as one backend keeps it; see `Kernels.pack_linear`.

    data: the backend's own. dtype: of the values in it. scale_O: float32, what integers are to be
    multiplied by, one number for each output feature (perhaps padded); None for others.
    """

    out_features: int
    in_features: int
    dtype: torch.dtype
    data: Tensor
    scale_O: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return self.data.nbytes + (self.scale_O.nbytes if self.scale_O is not None else 0)


@dataclass(frozen=True, slots=True)
class TokenEmbedding:
    """How tokens become hidden states in dtype: rows token_id - first_token times factor.

    Tokens that the weight lacks (another rank has them, or they are none) become zeros.
    """

    weight: LinearWeight
    first_token: int
    factor: float
    dtype: torch.dtype


def check_quantization(name: str | None) -> None:
    """Raises ValueError if weights cannot be stored so."""
    if name not in (None, "int8"):
        raise ValueError(f"no quantization {name!r}; there is: int8")


def quantize_weight(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 values [O, I], float32 scales [O]); weight ~ value * scale."""
    largest_O = weight_OI.float().abs().amax(dim=1)
    # Multiplied by the inverse, as the native kernels do, so that both round alike.
    # (A number divided by a tensor is its reciprocal times the number, which is rounded twice.)
    inverse_O = torch.full_like(largest_O, 127.0) / largest_O
    inverse_O1 = inverse_O.masked_fill(largest_O == 0, 0.0)[:, None]
    return (weight_OI.float() * inverse_O1).round().to(torch.int8), largest_O / 127.0
