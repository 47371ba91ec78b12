"""Attention over a paged cache at real shapes: decodes of one step, chunks, prompts.

Blocks are scattered over the cache. Beside ours: FlashAttention 3 where it was carried. Each call
makes the step's plan anew, as FlashAttention 3's does; an engine makes it once for all layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from benchmarks.attention_step import make_metadata
from benchmarks.gpu import fa3
from benchmarks.gpu.kernels import KernelCase, draw, dtype_of
from benchmarks.gpu.results import Session
from nanocore.kernels.attention import AttentionMetadata, AttentionSpec, KVCache
from nanocore.kernels.interface import Kernels
from nanocore.kernels.kv_quantization import kv_cache_format, quantize
from nanocore.worker.memory.kv_memory import KVLayout, KVMemory, KVSpec

BLOCK_SIZE: Final = 64
Seqs = list[tuple[int, int]]
"""(context, query tokens of this step) of each sequence, decodes first."""


@dataclass(frozen=True, slots=True)
class Step:
    """Operands of one launch. q_THD, and everything that the interface asks for."""

    q_THD: Tensor
    cache: KVCache
    metadata: AttentionMetadata
    spec: AttentionSpec

    def operands(self) -> tuple[Tensor, KVCache, AttentionMetadata, AttentionSpec]:
        """For a call that makes its plan itself: that of another one is forgotten."""
        return self.q_THD, self.cache, replace(self.metadata), self.spec


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, KV heads, head dimension."""

    num_q: int
    num_kv: int
    size: int


def groups(session: Session) -> dict[str, Heads]:
    """Group 2 is Qwen3-0.6B's, group 4 Qwen3-8B's."""
    if session.small:
        return {"g2": Heads(4, 2, 32)}
    return {"g2": Heads(16, 8, 128), "g4": Heads(32, 8, 128)}


def attention_cases(session: Session) -> Iterator[KernelCase]:
    """All shapes: decodes of each number of rows, prompts, quantized caches, then the rare ones."""
    # Contexts are multiples of the unit; most: sequences of a step.
    unit, most = (16, 3) if session.small else (1024, 256)
    half = most // 2
    for group, heads in groups(session).items():
        case = partial(_case, session, group, heads)
        for rows in sorted({min(n, most) for n in (256, 32, 1, 128, 64, 8)}, reverse=True):
            yield case(f"decode b{rows}/ctx{unit}", [(unit, 1)] * rows)
        for rows, length in ((min(4, most), 4 * unit), (min(16, most), unit)):
            yield case(f"prefill {rows}x{length}", [(length, length)] * rows)
        long = [(8 * unit, 1)] * min(32, most)
        yield case(f"decode b{len(long)}/ctx{8 * unit}", long)
        for kv in ("int8", "fp8"):
            rows = min(32, most)
            yield case(f"decode b{rows}/ctx{unit}/{kv}", [(unit, 1)] * rows, kv=kv)
        uneven = [(128 * unit, 1), *[(unit // 2, 1)] * min(40, most)]
        yield case(f"decode b{len(uneven)}, one of {128 * unit}", uneven)
        yield case(f"decode b{len(long)}/ctx{8 * unit}/window", long, window=unit)
        yield case(f"chunk {unit // 16 + 1} of {64 * unit}", [(64 * unit, unit // 16 + 1)])
        mixed = [*[(unit, 1)] * half, (4 * unit, 2 * unit)]
        yield case(f"mixed b{half} and a chunk", mixed)


def make_step(
    session: Session, heads: Heads, seqs: Seqs, window: int = 0, kv: str = "auto"
) -> Step:
    """Operands. kv: the format of the cache, see `kv_quantization`."""
    q_THD = draw(session, sum(count for _, count in seqs), heads.num_q, heads.size)
    widths = [-(-context // BLOCK_SIZE) for context, _ in seqs]
    scattered = torch.randperm(sum(widths), generator=torch.Generator().manual_seed(0))
    table_BM = torch.zeros(len(seqs), max(widths), dtype=torch.int32)
    for row, blocks in enumerate(torch.split(scattered, widths)):
        table_BM[row, : len(blocks)] = blocks
    stored = kv_cache_format(kv, q_THD.dtype, "cuda")
    layout = KVLayout([KVSpec(heads.num_kv, heads.size)], stored, BLOCK_SIZE)
    cache = KVMemory(layout, sum(widths), session.device).layer(0)
    for values, scales in ((cache.k_NSKD, cache.k_scale_NSK), (cache.v_NSKD, cache.v_scale_NSK)):
        drawn = draw(session, *values.shape)
        if scales is not None:
            drawn, scale = quantize(drawn, values.dtype, scales.dtype)
            scales.copy_(scale)
        values.copy_(drawn)
    metadata = make_metadata(seqs, table_BM.to(session.device))
    return Step(q_THD, cache, metadata, AttentionSpec(scale=heads.size**-0.5, window=window))


def _case(
    session: Session, group: str, heads: Heads, name: str, seqs: Seqs, window: int = 0,
    kv: str = "auto",
) -> KernelCase:  # fmt: skip
    """name: the kind of step, and its shape."""
    kind, _, shape = name.partition(" ")
    dtype = dtype_of(session)
    num_tokens = sum(count for _, count in seqs)
    seen = window or math.inf
    num_keys = sum(min(context, seen + count - 1) for context, count in seqs)
    pairs = sum(
        min(p + 1, seen) for context, count in seqs for p in range(context - count, context)
    )
    key_bytes = heads.num_kv * kv_cache_format(kv, dtype, "cuda").bytes_per_head(heads.size)
    has_fa3 = kv == "auto" and session.on_gpu
    return KernelCase(
        name=f"attention/{kind}/{group}/{shape}",
        num_bytes=2 * num_keys * key_bytes
        + 2 * num_tokens * heads.num_q * heads.size * dtype.itemsize,
        flops=4 * pairs * heads.num_q * heads.size,
        make=lambda _: make_step(session, heads, seqs, window, kv),
        run=_run,
        others={"fa3": partial(_with_fa3, session)} if has_fa3 else {},
    )


def _run(kernels: Kernels, step: Step) -> Tensor:
    return kernels.paged_attention(*step.operands())


def _with_fa3(session: Session, step: Step) -> Callable[[], Tensor]:
    fa3.load(session.carried)
    metadata, window = step.metadata, step.spec.window
    counts = [b - a for a, b in zip(metadata.query_start, metadata.query_start[1:], strict=False)]
    return partial(
        fa3.attention,
        step.q_THD, step.cache.k_NSKD, step.cache.v_NSKD, metadata.query_start_A,
        max(counts), max(metadata.seq_lens), scale=step.spec.scale,
        seq_lens_B=metadata.seq_lens_B, block_table_BM=metadata.block_table_BM,
        window=(window - 1, 0) if window else (-1, -1),
    )  # fmt: skip
