"""A checkpoint whose weights have an adapter's product added while they are loaded.

W + scale * B A is computed in float32 from what the file holds, of a rank's slice, and rounded once
to the model's dtype; what quantizes weights at load has the merged ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from nanocore.protocol.errors import ModelFileError
from nanocore.worker.loading.lora.adapter import Adapter, LowRank
from nanocore.worker.loading.weight_format import Slot, StoredProjection, WeightFormat
from nanocore.worker.loading.weights import Entries, is_finite


class MergedFormat:
    """Implements `WeightFormat`: another format, or floats, with an adapter merged.

    dtype: of the model's weights.
    """

    def __init__(self, base: WeightFormat | None, adapter: Adapter, dtype: torch.dtype) -> None:
        self.name = "floats" if base is None else base.name
        self.base, self.adapter = base, adapter
        self._dtype = dtype

    def projection(
        self, name: str, shape: tuple[int, int], rows: slice, columns: slice
    ) -> StoredProjection | None:
        """See `WeightFormat`.

        Raises:
            ModelFileError: the adapter's module has another shape, or the weight is quantized.
        """
        stored = None
        if self.base is not None:
            stored = self.base.projection(name, shape, rows, columns)
        module = self.adapter.modules.get(name)
        if module is None:
            return stored
        if stored is not None:
            raise ModelFileError(
                f"--merge-lora: {module.where} is stored as {self.name}, and what is merged would "
                "have to be rounded again: merge into the model's unquantized checkpoint, and "
                "quantize at load with --quantization"
            )
        if module.shape != shape:
            raise ModelFileError(
                f"{module.where} is for a weight of shape {list(module.shape)}, and the model's is "
                f"{list(shape)}: the adapter is of another model"
            )
        slot = Slot(shape, torch.float32, (rows, columns), is_exact=False)
        unpack = partial(_merged, module, rows, columns, self._dtype)
        return StoredProjection({"weight": slot}, unpack, is_float=True)

    def check_used(self, entries: Entries) -> None:
        """Check that the model has every module of the adapter.

        Raises:
            ModelFileError: it lacks one.
        """
        for name, module in self.adapter.modules.items():
            if f"{name}.weight" not in entries:
                raise ModelFileError(
                    f"{module.where} is not part of this model: the adapter is of another one"
                )


def _merged(
    module: LowRank, rows: slice, columns: slice, dtype: torch.dtype, slots: Mapping[str, Tensor]
) -> Tensor:
    weight = slots["weight"]
    module.add_to(weight, rows, columns)
    merged = weight.to(dtype)
    if not is_finite(merged):
        raise ModelFileError(
            f"{module.where} makes infinity of its weight, by numbers that are too large or their "
            f"scale, {module.scale:g}: download the adapter again, or take another"
        )
    return merged
