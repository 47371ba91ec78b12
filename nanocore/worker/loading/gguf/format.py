"""How a GGUF model stores the weights of linear layers, for `layers` to ask.

Implements `WeightFormat`. A rank reads the rows and blocks that it keeps as bytes. Where the
converter has put the rows of Q and K into llama.cpp's order, whole rows are put back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from nanocore.kernels.grouped_weight import StoredWeight
from nanocore.protocol.errors import ConfigError, ModelFileError
from nanocore.worker.loading.gguf.architectures import ARCHITECTURES, architecture_name
from nanocore.worker.loading.gguf.blocks import SERVED_TYPES, unpack_blocks
from nanocore.worker.loading.gguf.files import read_headers
from nanocore.worker.loading.gguf.settings import config_settings
from nanocore.worker.loading.gguf.tensor_types import TensorType
from nanocore.worker.loading.gguf.tensors import BLOCKS, FLOATS, gguf_tensors
from nanocore.worker.loading.weight_format import Slot, StoredProjection
from nanocore.worker.loading.weights import Entries, is_finite

_FLOAT_DTYPES: Final = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
_IN_PAIRS: Final = re.compile(r"model\.layers\.\d+\.self_attn\.[qk]_proj(\.bias)?")


class GgufFormat:
    """Of one model.

    head_dim: of Q and K. dtype: of the model's floats.

    Raises:
        ModelFileError: see `gguf_tensors`.
    """

    name = "gguf"

    def __init__(self, first: Path, head_dim: int, dtype: torch.dtype) -> None:
        self._first, self._head_dim, self._dtype = first, head_dim, dtype
        self._has_pairs = ARCHITECTURES[architecture_name(read_headers(first)[0])].has_pairs
        self._tensors = {
            tensor.name.rpartition(".")[0]: tensor
            for tensor in gguf_tensors(first)
            if not tensor.name.endswith(".bias")
        }

    def projection(
        self, name: str, shape: tuple[int, int], rows: slice, columns: slice
    ) -> StoredProjection | None:
        """See `WeightFormat`."""
        tensor = self._tensors.get(name)
        is_in_pairs = self._has_pairs and _IN_PAIRS.fullmatch(name) is not None
        if tensor is None or (tensor.type.name in FLOATS and not is_in_pairs):
            return None
        kind, where = tensor.type, f"{tensor.path}: {tensor.source}"
        in_halves = partial(_in_halves, head_dim=self._head_dim)
        if kind.name in FLOATS:
            slot = Slot(shape, self._dtype, (rows, columns), is_exact=False)
            return StoredProjection(
                {"weight": slot}, lambda slots: in_halves(slots["weight"]), is_float=True
            )
        if kind.name not in SERVED_TYPES:
            raise ModelFileError(
                f"{where} is stored as {kind.name}, which is not served; known: "
                f"{', '.join((*SERVED_TYPES, *FLOATS))}: take another file of this model, for "
                "example its Q4_K_M"
            )
        if shape[1] % kind.block_numel:
            raise ModelFileError(
                f"{where} is {kind.name} and has {shape[1]} inputs by the file's "
                f"settings, which are no blocks of {kind.block_numel}: they are not of one model"
            )
        index = (rows, _bytes_of(name, kind, shape[1], columns))
        row_bytes = shape[1] // kind.block_numel * kind.block_bytes

        def unpack(slots: Mapping[str, Tensor]) -> StoredWeight:
            blocks = slots[BLOCKS]
            weight = unpack_blocks(kind, in_halves(blocks) if is_in_pairs else blocks)
            if not all(is_finite(scales) for scales in weight.float_scales):
                raise ModelFileError(
                    f"{where} has NaN or infinity in its scales: download the model again"
                )
            return weight

        slot = Slot((shape[0], row_bytes), torch.uint8, index)
        # Numbers of five and six bits become bytes, and some scales wider.
        one_row = unpack_blocks(
            kind, torch.zeros(1, index[1].stop - index[1].start, dtype=torch.uint8)
        )
        num_rows = rows.stop - rows.start
        return StoredProjection({BLOCKS: slot}, unpack, kept_bytes=num_rows * one_row.nbytes)


def _in_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of heads whose pairs are side by side, as those whose pairs are half a head apart; a
    rank keeps whole heads."""
    pairs = rows.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).flatten(0, 2).contiguous()


def put_biases_back(first: Path, entries: Entries) -> None:
    """Bring loaded biases of Q and K from llama.cpp's order into ours, where it has another."""
    if not ARCHITECTURES[architecture_name(read_headers(first)[0])].has_pairs:
        return
    biases = [entry for name, entry in entries.items() if _is_bias_in_pairs(name)]
    head_dim = config_settings(first).values["head_dim"] if biases else 0
    for entry in biases:
        for part in entry.parts:
            part.target.copy_(_in_halves(part.target, head_dim))


def _is_bias_in_pairs(name: str) -> bool:
    return name.endswith(".bias") and _IN_PAIRS.fullmatch(name) is not None


def _bytes_of(name: str, kind: TensorType, in_features: int, columns: slice) -> slice:
    """Where in a row these inputs are."""
    if columns.start % kind.block_numel or columns.stop % kind.block_numel:
        num_blocks = in_features // kind.block_numel
        sizes = [str(size) for size in range(1, 65) if num_blocks % size == 0]
        raise ConfigError(
            f"--tensor-parallel-size: {name} has {num_blocks} blocks of {kind.block_numel} inputs "
            f"({kind.name}), which ranks cannot share evenly; sizes that can: {', '.join(sizes)}"
        )
    start, stop = (x // kind.block_numel * kind.block_bytes for x in (columns.start, columns.stop))
    return slice(start, stop)
