"""AWQ as AutoAWQ writes it for its GEMM kernels: four bits, groups, a zero point for each.

Eight outputs are in a word, in an order of their own; values and zero points are [inputs, words].
w = scale * (q - zero).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from nanocore.kernels.grouped_weight import GroupedWeight
from nanocore.protocol.errors import ModelFileError
from nanocore.worker.config.json_settings import Settings
from nanocore.worker.loading.formats.packed_groups import (
    compact,
    groups_of_slice,
    words,
    zeros_or_none,
)
from nanocore.worker.loading.formats.quantization_config import (
    CheckpointTensors,
    group_size,
    groups_in_words,
    refuse_unless,
)
from nanocore.worker.loading.weights import CheckpointProjection, Projection, Slot

_BITS: Final = 4
_PER_WORD: Final = 8
_WORDS_AT_ONCE: Final = 8
"""Words of all inputs that are unpacked at once: what caches hold."""
_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place of output j of eight in a word: its four bits, counted from the lowest."""


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """A `WeightFormat`. has_zeros: False: all zero points are 8, stored or not."""

    group_size: int
    has_zeros: bool
    stored: CheckpointTensors
    name: str = "awq"

    @classmethod
    def read(cls, settings: Settings, stored: CheckpointTensors) -> AwqFormat:
        settings = settings.with_values(
            {
                "bits": settings.values.get("w_bit"),
                "group_size": settings.values.get("q_group_size"),
            }
            | settings.values
        )
        refuse_unless(settings, "bits", int, (_BITS,), required=True)
        version = settings.get("version", str, "gemm").lower()
        if version != "gemm":
            raise settings.error("version", "is not served: of AWQ's packings gemm alone is")
        return cls(group_size(settings), settings.get("zero_point", bool, True), stored)

    def __str__(self) -> str:
        return f"AWQ: four bits, {groups_in_words(self.group_size)}"

    def projection(self, kept: Projection) -> CheckpointProjection | None:
        name, rows = kept.name, kept.rows
        if not self.stored.has(f"{name}.qweight"):
            return None
        out_features, in_features = kept.shape
        if out_features % _PER_WORD:
            raise ModelFileError(f"{name} has {out_features} outputs: AWQ packs eight to a word")
        groups = groups_of_slice(kept, self.group_size)
        kept_words, _ = words(rows, _PER_WORD)
        num_words = out_features // _PER_WORD
        scale_dtype = self.stored.float_dtype(f"{name}.scales", torch.float16)
        slots = {
            "qweight": Slot((in_features, num_words), torch.int32, (kept.columns, kept_words)),
            "scales": Slot((groups.count, out_features), scale_dtype, (groups.kept, rows)),
        }
        if self.has_zeros or self.stored.has(f"{name}.qzeros"):
            slots["qzeros"] = Slot(
                (groups.count, num_words), torch.int32, (groups.kept, kept_words)
            )
        return CheckpointProjection(slots, partial(self._unpack, kept, groups.size))

    def _unpack(
        self, kept: Projection, group_size: int, tensors: Mapping[str, Tensor]
    ) -> GroupedWeight:
        in_words, zero_OG = words(kept.rows, _PER_WORD)[1], None
        if "qzeros" in tensors:
            zero_OG = zeros_or_none(_outputs(tensors["qzeros"])[in_words], _BITS)
            if zero_OG is not None and not self.has_zeros:
                raise ModelFileError(
                    f"{kept.name}.qzeros has zero points other than 8, and quantization_config "
                    "says zero_point = false: it is not of this model"
                )
        values_OI, scale_OG = _outputs(tensors["qweight"])[in_words], tensors["scales"].t()
        return GroupedWeight(values_OI, _BITS, group_size, scale_OG.contiguous(), zero_OG)


def _outputs(packed: Tensor) -> Tensor:
    """int32 [inputs, W] to uint8 [8 W, inputs]."""
    word_WI = compact(packed.t())
    num_words, num_inputs = word_WI.shape
    values = torch.empty(num_words, _PER_WORD, num_inputs, dtype=torch.uint8, device=packed.device)
    for start in range(0, num_words, _WORDS_AT_ONCE):
        part = slice(start, start + _WORDS_AT_ONCE)
        for output, place in enumerate(_ORDER):
            values[part, output] = (word_WI[part] >> 4 * place).bitwise_and_(15)
    return values.view(_PER_WORD * num_words, num_inputs)
