"""A rank's KV memory: one array of blocks, and in each block all of this rank's layers of a group.

What a block holds, K and V of its tokens in every layer and their scales where they are quantized,
is one span of bytes: to move it is one copy, and to check it one checksum. A layer's K and V are
views that step from block to block. Layers may differ in what they keep: those that see the same
window of tokens are a group. With several groups the memory is cut into slabs that hold blocks of
any (see `nanocore.kv_cache.slab_pool`); each group's blocks are views of all of it, with a stride
of its own. Owner: `ModelRunner`. Shape suffixes: see `interface`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from nanocore.kernels.attention import KVCache
from nanocore.kernels.kv_quantization import KVCacheFormat
from nanocore.kernels.states import LayerCache, StateCache
from nanocore.worker.memory.kv_groups import (
    ALIGNMENT_BYTES,
    CacheKind,
    KVGroup,
    LayerGroup,
    aligned,
    rank_slab_bytes,
)

KV_LAYOUT_VERSION: Final = 2
"""To be counted up when blocks hold the same values otherwise."""

_SCALE_ALIGNMENT_BYTES: Final = 16

_CROWDING_BYTES: Final = 16 << 10
_MAX_STAGGER_SHARE: Final = 0.01


class KVSpec(msgspec.Struct, frozen=True):
    """What a layer keeps of a token: heads of this rank, values of each; and for how long.

    window: tokens that a token sees, itself included; 0: all.
    """

    num_kv_heads: int
    head_dim: int
    window: int = 0

    @property
    def kind(self) -> CacheKind:
        return CacheKind(window=self.window)


class StateSpec(msgspec.Struct, frozen=True):
    """What a layer keeps after a token for the next one, this rank's part; see `StateCache`.

    conv_shape: of dtype. delta_shape: of float32; None: there is none. num_inputs: numbers of dtype
    that a draft's inputs are.
    """

    conv_shape: tuple[int, int]
    dtype: torch.dtype
    num_inputs: int
    delta_shape: tuple[int, int, int] | None = None
    kind: CacheKind = CacheKind(has_states=True)


CacheSpec = KVSpec | StateSpec


def in_full_group(specs: Sequence[CacheSpec]) -> list[CacheSpec]:
    """Declare layers as such that keep K and V of all tokens, whatever their windows."""
    return [msgspec.structs.replace(one, window=0) for one in specs if isinstance(one, KVSpec)]


class _Part(msgspec.Struct, frozen=True):
    """Part of a block: [S, K, D] values of a layer's K or V, their [S, K] scales, or a state."""

    start_byte: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end_byte(self) -> int:
        return self.start_byte + self.num_bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, memory: Tensor) -> Tensor:
        """A view of all blocks' memory (uint8 [N, bytes]), [N, *shape]."""
        values, itemsize = memory.view(self.dtype), self.dtype.itemsize
        in_block = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        # Said outright: torch makes up a stride of its own where there is a single block.
        return values.as_strided(
            (len(values), *self.shape),
            (memory.shape[1] // itemsize, *in_block),
            values.storage_offset() + self.start_byte // itemsize,
        )


class KVLayout:
    """Layout of a rank's blocks. block_bytes: of a block of each group, by kind, full first.

    Args:
        specs: of this rank's layers.
    """

    def __init__(
        self, specs: Sequence[CacheSpec], kv_format: KVCacheFormat, block_size: int
    ) -> None:
        self.specs, self.block_size = specs, block_size
        self.layers: list[list[_Part]] = []
        self.block_bytes: dict[CacheKind, int] = {}
        ends = dict.fromkeys(sorted({spec.kind for spec in specs}), 0)
        for spec in specs:
            self.layers.append(list(_parts(ends[spec.kind], spec, kv_format, block_size)))
            ends[spec.kind] = self.layers[-1][-1].end_byte
        for kind, end_byte in ends.items():
            dims = [one.head_dim for one in specs if isinstance(one, KVSpec) and one.kind == kind]
            num_bytes = aligned(end_byte, ALIGNMENT_BYTES)
            head_bytes = block_size * max(dims, default=0) * kv_format.dtype.itemsize
            self.block_bytes[kind] = num_bytes + _stagger_bytes(num_bytes, head_bytes)

    @property
    def groups(self) -> list[LayerGroup]:
        kinds = [spec.kind for spec in self.specs]
        return [LayerGroup(one, kinds.count(one), size) for one, size in self.block_bytes.items()]

    @property
    def has_states(self) -> bool:
        return any(kind.has_states for kind in self.block_bytes)

    def layer_bytes(self, index: int) -> int:
        """Bytes of what a layer keeps in a block, without what lies between."""
        return sum(part.num_bytes for part in self.layers[index])


class KVMemory:
    """num_slabs slabs of blocks of this layout on a device, zeros at first.

    Args:
        groups: of all ranks; this one's layers are of some of them. None: the layout's own one.

    blocks: all that they hold by group, uint8 [num_blocks, bytes of a block], to be read or
    written.

    Zeros, because attention masks what it gathers too much of, and 0 * NaN would be NaN.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_slabs: int,
        device: torch.device,
        groups: Sequence[KVGroup] = (),
    ) -> None:
        self._layout = layout
        groups = groups or [KVGroup(kind, len(layout.specs)) for kind in layout.block_bytes]
        self._kinds = [group.kind for group in groups]
        self.slab_bytes = rank_slab_bytes(layout.groups, groups)
        memory = _zeros(num_slabs * self.slab_bytes, device)
        self.blocks = [memory.view(num_slabs * group.per_slab, -1) for group in groups]

    def layer(self, index: int) -> LayerCache:
        group = self._kinds.index(self._layout.specs[index].kind)
        parts = [part.of(self.blocks[group]) for part in self._layout.layers[index]]
        if self._kinds[group].has_states:
            conv_NLC, *delta = parts
            return StateCache(conv_NLC, (*delta, None)[0], self._layout.block_size, group)
        k, v, *scales = parts
        k_scale, v_scale = scales or (None, None)
        return KVCache(k, v, k_scale, v_scale, group)

    def layers(self, draft_shape: tuple[int, int] = (0, 0)) -> list[LayerCache]:
        """Return every layer's. draft_shape: rows, and most drafts of one."""
        return [
            _with_drafts(self.layer(i), spec, draft_shape)
            for i, spec in enumerate(self._layout.specs)
        ]


def draft_bytes(specs: Sequence[CacheSpec], num_rows: int, max_drafts: int) -> int:
    """Return the bytes of `StateCache.drafts_RKI` of all layers."""
    states = [spec for spec in specs if isinstance(spec, StateSpec)]
    return num_rows * max_drafts * sum(one.num_inputs * one.dtype.itemsize for one in states)


def _with_drafts(cache: LayerCache, spec: CacheSpec, draft_shape: tuple[int, int]) -> LayerCache:
    num_bytes = draft_bytes([spec], *draft_shape)
    if not num_bytes or not isinstance(cache, StateCache) or not isinstance(spec, StateSpec):
        return cache
    memory = _zeros(num_bytes, cache.conv_NLC.device).view(spec.dtype)
    return msgspec.structs.replace(cache, drafts_RKI=memory.view(*draft_shape, spec.num_inputs))


def _parts(
    start_byte: int, spec: CacheSpec, kv_format: KVCacheFormat, block_size: int
) -> Iterator[_Part]:
    """A layer's K, V, and their scales if there are any, as in `KVCache`; or its state."""
    shape: tuple[int, ...]
    if isinstance(spec, StateSpec):
        kinds = [(tuple[int, ...](spec.conv_shape), spec.dtype, ALIGNMENT_BYTES)]
        if spec.delta_shape is not None:
            kinds.append((spec.delta_shape, torch.float32, ALIGNMENT_BYTES))
    else:
        shape = block_size, spec.num_kv_heads, spec.head_dim
        kinds = [(shape, kv_format.dtype, ALIGNMENT_BYTES)] * 2
        if kv_format.scale_dtype is not None:
            kinds += [(shape[:2], kv_format.scale_dtype, _SCALE_ALIGNMENT_BYTES)] * 2
    for shape, dtype, alignment in kinds:
        part = _Part(aligned(start_byte, alignment), shape, dtype)
        yield part
        start_byte = part.end_byte


def _stagger_bytes(block_bytes: int, head_bytes: int) -> int:
    """Gap between blocks for the sake of a CPU's cache, or 0. head_bytes: of a head's K.

    A prompt's attention reads the same head of many blocks, again and again. Where blocks begin at
    multiples of a large power of two these would share a few sets of the cache, and it took 5 to
    8 % longer; so each block is shifted by a head, and by two lines, against the one before.
    """
    stagger_bytes = aligned(head_bytes + 128, ALIGNMENT_BYTES)
    is_crowded = block_bytes % _CROWDING_BYTES == 0
    return stagger_bytes if is_crowded and stagger_bytes < _MAX_STAGGER_SHARE * block_bytes else 0


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    # numpy gets zeroed pages from the system on first use; torch.zeros would touch them all,
    # and a cache sized by the machine's memory is mostly never used.
    memory = np.zeros(num_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return torch.from_numpy(memory[start : start + num_bytes])
