"""A model whose parameters are filled, each weight packed by the kernel backend when it is there.

So no more than a few weights are in memory twice, in the form that they are read in and packed.
"""

from __future__ import annotations

from collections.abc import Callable

from nanocore.kernels.interface import Kernels
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.layers.packing import WeightPacker
from nanocore.worker.loading.weights import Entries, unbuffered_bytes
from nanocore.worker.messages import Quantization


def fill_and_pack(
    model: DecoderModel,
    kernels: Kernels,
    fill: Callable[[Entries], object],
    quantization: Quantization | None = None,
) -> int:
    """Have all of a model's parameters filled and packed; returns the memory that they take.

    fill: fills all parts of these entries, and tells their owners.
    """
    entries = model.entries()
    packer = WeightPacker(kernels, model.placement.dtype, quantization)
    model.pack(packer)
    fill(entries)
    model.finish()
    return packer.num_bytes + unbuffered_bytes(entries)
