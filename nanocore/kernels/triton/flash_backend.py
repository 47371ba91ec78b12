"""Attention by flash-attn where it is installed, everything else by our kernels.

FlashAttention 3 (module flash_attn_interface, for Hopper) takes any block size and a step's decodes
and chunks in one call. FlashAttention 2 (module flash_attn) wants blocks of whole 256 tokens, and
gets decodes and chunks apart. Both choose their work by the batch, so results depend on it, and
chunks need lengths on the host, so only steps of decodes are recorded as graphs. (Dao et al. 2022,
Dao 2023, Shah et al. 2024.) Quantized caches and float32 are ours. Shape suffixes: see `interface`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from nanocore.kernels.interface import AttentionMetadata, AttentionSpec, GraphSupport, KVCache
from nanocore.kernels.triton.triton_backend import TritonKernels

_MODULES: Final = {3: "flash_attn_interface", 2: "flash_attn"}
_BLOCK_MULTIPLES: Final = {3: 1, 2: 256}
DTYPES: Final = (torch.bfloat16, torch.float16)

_MAX_SPLITS: Final = 32
_MAX_SPLIT_TOKENS: Final = 8192
"""Limits for the parts that FlashAttention 3 may split keys into, and for tokens times parts: each
part has float32 results for every token. How many of them it uses it decides on the device."""
_STEP_KEY: Final = "FlashAttention 3"


class FlashKernels(TritonKernels):
    """Implements `interface.Kernels`. version: of flash-attn, 3 where it is there.

    Raises:
        ValueError: flash-attn is not installed, or see `TritonKernels`.
    """

    name = "flash"
    graph_support: GraphSupport = "decodes"

    def __init__(self, device: torch.device, *, keeps_activations: bool = False) -> None:
        super().__init__(device, keeps_activations=keeps_activations)
        self.version, self._module = _find()
        self.block_multiple = _BLOCK_MULTIPLES[self.version]
        self._flash_3 = _Flash3.of(self._module) if self.version == 3 else None

    def paged_attention(
        self, q_THD: Tensor, cache: KVCache, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        if cache.k_scale_NSK is not None or cache.k_NSKD.dtype not in DTYPES:
            return super().paged_attention(q_THD, cache, metadata, spec)
        out_THD = torch.empty_like(q_THD)
        num_tokens = metadata.query_start[-1]
        out_THD[num_tokens:] = 0  # padding
        operands = q_THD[:num_tokens], cache, metadata, spec, out_THD[:num_tokens]
        if self._flash_3 is not None:
            self._flash_3.attend(*operands)
        else:
            _attend_2(self._module, *operands)
        return out_THD


def _find() -> tuple[int, ModuleType]:
    reasons = []
    for version, name in _MODULES.items():
        try:
            return version, importlib.import_module(name)
        except ImportError as error:
            if getattr(error, "name", None) != name:  # it is there, and does not load
                reasons.append(f"; {name}: {error}")
    raise ValueError(
        "flash-attn is not installed (neither 3 nor 2); use auto, or install it" + "".join(reasons)
    )


def _options(spec: AttentionSpec) -> dict[str, Any]:
    return {
        "softmax_scale": spec.scale,
        "causal": True,
        "window_size": _window(spec),
        "softcap": spec.softcap,
    }


def _window(spec: AttentionSpec) -> tuple[int, int]:
    """Tokens before and after a token that it attends to; -1 is all."""
    return (spec.window - 1, 0) if spec.window else (-1, -1)


@dataclass(frozen=True, slots=True)
class _Flash3:
    """FlashAttention 3's module. has_out, has_plans: whether its function takes our output and
    its scheduler's metadata; both depend on the release.
    """

    module: ModuleType
    has_out: bool
    has_plans: bool

    @classmethod
    def of(cls, module: ModuleType) -> _Flash3:
        """Find out what this release takes."""
        names = inspect.signature(module.flash_attn_with_kvcache).parameters
        has_plans = "scheduler_metadata" in names and hasattr(module, "get_scheduler_metadata")
        return cls(module, "out" in names, has_plans)

    def attend(
        self,
        q_THD: Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        out_THD: Tensor,
    ) -> None:
        """Decodes and chunks at once: a decode is a chunk of one token."""
        step = _Step3.of(metadata)
        options = _options(spec) | {"num_splits": step.num_splits}
        if self.has_plans:
            options["scheduler_metadata"] = self._plan(q_THD, cache, metadata, spec)
        if self.has_out:
            options["out"] = out_THD
        result = self.module.flash_attn_with_kvcache(
            q_THD,
            cache.k_NSKD,
            cache.v_NSKD,
            cache_seqlens=metadata.seq_lens_B,
            page_table=step.block_table_BM,
            cu_seqlens_q=metadata.query_start_A,
            max_seqlen_q=step.longest,
            **options,
        )
        if not self.has_out:
            out_THD.copy_(result)

    def _plan(
        self, q_THD: Tensor, cache: KVCache, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        """How the step's work is shared among multiprocessors, for all layers that are alike.

        It is computed on the device, by a kernel that a graph records before those that read it.
        """
        step, (_, num_heads, head_dim) = _Step3.of(metadata), q_THD.shape
        _, block_size, num_kv_heads, _ = cache.k_NSKD.shape
        key = num_heads, num_kv_heads, head_dim, block_size, spec.window, spec.softcap > 0
        if key not in step.plans:
            batch_size, num_columns = step.block_table_BM.shape
            step.plans[key] = self.module.get_scheduler_metadata(
                batch_size,
                step.longest,
                num_columns * block_size,  # what the kernel assumes that is given a block table
                num_heads,
                num_kv_heads,
                head_dim,
                metadata.seq_lens_B,
                qkv_dtype=q_THD.dtype,
                cu_seqlens_q=metadata.query_start_A,
                page_size=block_size,
                causal=True,
                window_size=_window(spec),
                has_softcap=spec.softcap > 0,
                num_splits=step.num_splits,
            )
        return step.plans[key]


@dataclass(frozen=True, slots=True)
class _Step3:
    """What FlashAttention 3 is told of a step. longest: chunk. plans: by what they depend on."""

    longest: int
    num_splits: int
    block_table_BM: Tensor
    plans: dict[Hashable, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, metadata: AttentionMetadata) -> _Step3:
        """That of this step, made by its first layer."""
        found: _Step3 | None = metadata.scratch.get(_STEP_KEY)
        if found is None:
            starts = metadata.query_start
            found = metadata.scratch[_STEP_KEY] = cls(
                longest=max(end - start for start, end in pairwise(starts)),
                num_splits=max(1, min(_MAX_SPLITS, _MAX_SPLIT_TOKENS // starts[-1])),
                block_table_BM=metadata.block_table_BM.contiguous(),
            )
        return found


def _attend_2(
    module: ModuleType,
    q_THD: Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    out_THD: Tensor,
) -> None:
    num_decodes, starts = metadata.num_decodes, metadata.query_start
    if num_decodes:
        decoded = module.flash_attn_with_kvcache(
            q_THD[:num_decodes, None],
            cache.k_NSKD,
            cache.v_NSKD,
            cache_seqlens=metadata.seq_lens_B[:num_decodes],
            block_table=metadata.block_table_BM[:num_decodes].contiguous(),
            **_options(spec),
        )
        out_THD[:num_decodes] = decoded[:, 0]
    if num_decodes == len(metadata.seq_lens):
        return
    chunk_starts = metadata.query_start_A[num_decodes:] - num_decodes
    seq_lens = metadata.seq_lens_B[num_decodes:]
    zero = torch.zeros(1, dtype=torch.int32, device=q_THD.device)
    out_THD[num_decodes:] = module.flash_attn_varlen_func(
        q_THD[num_decodes:],
        cache.k_NSKD,
        cache.v_NSKD,
        cu_seqlens_q=chunk_starts,
        cu_seqlens_k=torch.cat((zero, seq_lens.cumsum(0, dtype=torch.int32))),
        max_seqlen_q=max(end - start for start, end in pairwise(starts[num_decodes:])),
        max_seqlen_k=max(metadata.seq_lens[num_decodes:]),
        block_table=metadata.block_table_BM[num_decodes:].contiguous(),
        **_options(spec),
    )
