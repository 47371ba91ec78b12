"""Attention by flash-attn where it is installed, everything else by our kernels.

FlashAttention 3 (module flash_attn_interface, for Hopper) takes any block size and a step's decodes
and chunks in one call. FlashAttention 2 (module flash_attn) wants blocks of whole 256 tokens, and
gets decodes and chunks apart. Both choose their work by the batch, so results depend on it, and
chunks need lengths on the host, so only steps of decodes are recorded as graphs. (Dao et al. 2022,
Dao 2023, Shah et al. 2024.) Quantized caches and float32 are ours. Shape suffixes: see `interface`.
"""

from __future__ import annotations

import importlib
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

    def paged_attention(
        self, q_THD: Tensor, cache: KVCache, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        if cache.k_scale_NSK is not None or cache.k_NSKD.dtype not in DTYPES:
            return super().paged_attention(q_THD, cache, metadata, spec)
        attend = _attend_3 if self.version == 3 else _attend_2
        out_THD = torch.empty_like(q_THD)
        num_tokens = metadata.query_start[-1]
        out_THD[num_tokens:] = 0  # padding
        attend(self._module, q_THD[:num_tokens], cache, metadata, spec, out_THD[:num_tokens])
        return out_THD


def _find() -> tuple[int, ModuleType]:
    for version, name in _MODULES.items():
        try:
            return version, importlib.import_module(name)
        except ImportError:
            continue
    raise ValueError("flash-attn is not installed (neither 3 nor 2); use auto, or install it")


def _options(spec: AttentionSpec) -> dict[str, Any]:
    window = (spec.window - 1, 0) if spec.window else (-1, -1)
    return {
        "softmax_scale": spec.scale,
        "causal": True,
        "window_size": window,
        "softcap": spec.softcap,
    }


def _attend_3(
    module: ModuleType,
    q_THD: Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    out_THD: Tensor,
) -> None:
    """Decodes and chunks at once: a decode is a chunk of one token."""
    starts = metadata.query_start
    longest = max(end - start for start, end in pairwise(starts))
    out_THD.copy_(
        module.flash_attn_with_kvcache(
            q_THD,
            cache.k_NSKD,
            cache.v_NSKD,
            cache_seqlens=metadata.seq_lens_B,
            page_table=metadata.block_table_BM.contiguous(),
            cu_seqlens_q=metadata.query_start_A,
            max_seqlen_q=longest,
            **_options(spec),
        )
    )


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
