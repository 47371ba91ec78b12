"""Loaded weights, handed from the layers to the kernel backend once: packed, perhaps quantized."""

from __future__ import annotations

from torch import Tensor

from nanocore.kernels.interface import Kernels
from nanocore.kernels.linear_weight import LinearWeight
from nanocore.worker.messages import Quantization


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
