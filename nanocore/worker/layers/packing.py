"""A weight's two states: a parameter that is filled, and then what the kernel backend packed.

Layers say where the parameter is filled from (`entries`) while it is there, and hand it to the
backend once (`pack`); from then on kernels are called, and the parameter's memory is gone.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from nanocore.kernels.interface import Kernels
from nanocore.kernels.linear_weight import LinearWeight
from nanocore.worker.messages import Quantization


class Weight:
    """A layer's weight [O, I], first as a parameter and then packed: never both, never neither."""

    def __init__(self, parameter_OI: Tensor) -> None:
        self._state: Tensor | LinearWeight = parameter_OI

    @property
    def parameter(self) -> Tensor:
        """[O, I], to be filled; before it is packed."""
        assert isinstance(self._state, Tensor), "this weight is packed, and filled no more"
        return self._state

    @property
    def packed(self) -> LinearWeight:
        """As kernels take it; once it is packed."""
        assert isinstance(self._state, LinearWeight), "this weight is not packed yet"
        return self._state

    def pack(self, pack: Callable[[Tensor], LinearWeight]) -> None:
        """Give the parameter up for what one of `WeightPacker`'s methods makes of it; once."""
        self._state = pack(self.parameter)


class WeightPacker:
    """Packs weights for a backend.

    saved_bytes: how much less memory the packed ones take than the loaded ones took, so far.
    """

    def __init__(self, kernels: Kernels, quantization: Quantization | None = None) -> None:
        self._kernels, self._quantization = kernels, quantization
        self.saved_bytes = 0

    def linear(self, weight_OI: Tensor) -> LinearWeight:
        """The weight of a linear layer, which the caller gives up."""
        return self._pack(weight_OI, self._quantization)

    def head(self, weight_OI: Tensor) -> LinearWeight:
        """Likewise, of the layer that gives logits: fp8 is for what lies between the two ends."""
        return self._pack(weight_OI, None if self._quantization == "fp8" else self._quantization)

    def unquantized(self, weight_OI: Tensor) -> LinearWeight:
        """Likewise, as it is: of an embedding that is no head, or a router."""
        return self._pack(weight_OI, None)

    def _pack(self, weight_OI: Tensor, quantization: Quantization | None) -> LinearWeight:
        packed = self._kernels.pack_linear(weight_OI, quantization)
        self.saved_bytes += weight_OI.nbytes - packed.num_bytes
        return packed
