"""Writing K and V to the paged cache and reading blocks of it, for the reference backend.

A slot of -1 is padding: nothing is written for it. (As an index it would be the last slot.) Where
slots are in the host's memory padding is looked for, and mostly there is none; elsewhere looking
would wait for the device in every layer, so padding tokens there repeat another token's write.
Quantized values get back the dtype of the computation as they are read. Shape suffixes: see
`interface`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nanocore.kernels.interface import KVCache
from nanocore.kernels.kv_quantization import quantize

Write = Callable[[Tensor, Tensor], None]
"""Writes each token's values, [T, ...], to its slot of K, V or scales, [N, S, ...]."""


def store_kv(k_TKD: Tensor, v_TKD: Tensor, cache: KVCache, slot_mapping_T: Tensor) -> None:
    """Write each token's K and V to its slot; slots are distinct, or -1."""
    k_NSKD, v_NSKD = cache.k_NSKD, cache.v_NSKD
    make_writer = repeating_writer
    if slot_mapping_T.device.type == "cpu":
        make_writer = _writer
        keep_T = slot_mapping_T >= 0
        if not keep_T.all():
            k_TKD, v_TKD, slot_mapping_T = k_TKD[keep_T], v_TKD[keep_T], slot_mapping_T[keep_T]
    write = make_writer(slot_mapping_T, k_NSKD.shape[1])
    if cache.k_scale_NSK is not None:
        assert cache.v_scale_NSK is not None
        # K and V at once: for few tokens the number of operations is what counts.
        values, scales = quantize(
            torch.stack((k_TKD, v_TKD)), k_NSKD.dtype, cache.k_scale_NSK.dtype
        )
        write(cache.k_scale_NSK, scales[0])
        write(cache.v_scale_NSK, scales[1])
        k_TKD, v_TKD = values.view(torch.uint8)
        k_NSKD, v_NSKD = k_NSKD.view(torch.uint8), v_NSKD.view(torch.uint8)
    write(k_NSKD, k_TKD)
    write(v_NSKD, v_TKD)


def gather_kv(cache: KVCache, table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and V of the blocks in `table`, int [...], in `dtype`: each [..., S, K, D]."""
    return (
        _gather(cache.k_NSKD, cache.k_scale_NSK, table, dtype),
        _gather(cache.v_NSKD, cache.v_scale_NSK, table, dtype),
    )


def _gather(
    values_NSKD: Tensor, scale_NSK: Tensor | None, table: Tensor, dtype: torch.dtype
) -> Tensor:
    if scale_NSK is None:
        return _blocks(values_NSKD, table)
    bytes_SKD = _blocks(values_NSKD.view(torch.uint8), table)
    values = bytes_SKD.view(values_NSKD.dtype).to(dtype)
    return values.mul_(_blocks(scale_NSK, table).to(dtype)[..., None])


def _blocks(cache: Tensor, table: Tensor) -> Tensor:
    """cache[table], by an operation that copies whole blocks: on the CPU twice as fast."""
    return cache.index_select(0, table.flatten()).unflatten(0, table.shape)


def _places(slot_mapping_T: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Of slots, as indices: there is no view of them as one row, for blocks may lie apart."""
    return slot_mapping_T // block_size, slot_mapping_T % block_size


def _writer(slot_mapping_T: Tensor, block_size: int) -> Write:
    """For distinct slots, none of them -1."""
    places = _places(slot_mapping_T, block_size)

    def write(cache_NS: Tensor, values_T: Tensor) -> None:
        cache_NS[places] = values_T

    return write


def repeating_writer(slot_mapping_T: Tensor, block_size: int) -> Write:
    """Padding repeats the write of the first token that is none, or if all are, writes nothing new.

    Equal writes to one slot may come in any order.
    """
    valid_T = slot_mapping_T >= 0
    own_T = torch.arange(len(valid_T), device=valid_T.device)
    source_T = torch.where(valid_T, own_T, valid_T.int().argmax())
    places = _places(slot_mapping_T[source_T], block_size)
    is_new = valid_T.any()

    def write(cache_NS: Tensor, values_T: Tensor) -> None:
        cache_NS[places] = torch.where(is_new, values_T[source_T], cache_NS[places])

    return write
