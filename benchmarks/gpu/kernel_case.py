"""One kernel at one shape: its operands, what it must compute, and the least it must move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nanocore.kernels.interface import Kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """num_bytes, flops: what any implementation has to move and to multiply.

    make: a set of operands, by its number. run: our kernel on one. error: how far its result is
    from a reference in float32 or float64; NaN never passes. others: what else computes the same,
    by name: given a set of operands each returns the call to time, and prepares there what the
    call shall find.
    """

    name: str
    num_bytes: float
    flops: float
    make: Callable[[Kernels, int], Any]
    run: Callable[[Kernels, Any], Any]
    error: Callable[[Any, Any], float]
    others: dict[str, Callable[[Any], Callable[[], Any]]] = field(default_factory=dict)


class Draw:
    """Random operands on a device, other ones for each seed."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(seed + 1)

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        """Of the dtype."""
        return torch.empty(*shape, dtype=self.dtype, device=self.device).normal_(
            std=std, generator=self._generator
        )


def relative_error(result: Tensor, reference: Tensor) -> float:
    """Norm of the difference over that of the reference."""
    reference = reference.double()
    return float((result.double() - reference).norm() / reference.norm())
