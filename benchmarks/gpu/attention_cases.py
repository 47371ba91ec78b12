"""Attention over a paged cache at real shapes: decodes of one step, and prompts.

Blocks are scattered over the cache. The reference is dense attention in float32 over some of the
sequences. Beside ours: FlashAttention 3 where it was carried, and torch's attention over K and V
that are contiguous, which no engine has, as the best that torch can do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.gpu import fa3
from benchmarks.gpu.kernel_case import Draw, KernelCase, relative_error
from benchmarks.gpu.session import Session
from nanocore.kernels.backend import AttentionMetadata, AttentionSpec, KVCache

BLOCK_SIZE: Final = 64
_CHECKED: Final = 4
"""Sequences that are compared with the reference."""


@dataclass(frozen=True, slots=True)
class Step:
    """Operands of one launch. q_THD, and everything that the interface asks for."""

    q_THD: Tensor
    cache: KVCache
    metadata: AttentionMetadata
    spec: AttentionSpec


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, KV heads, head dimension."""

    num_q: int
    num_kv: int
    size: int


def attention_cases(session: Session) -> Iterator[KernelCase]:
    """All shapes; group 2 is Qwen3-0.6B's, group 4 Qwen3-8B's."""
    all_heads = (Heads(16, 8, 128), Heads(32, 8, 128))
    decodes = [(b, c) for c in (512, 2048, 8192) for b in (1, 8, 32, 128, 256)] + [(256, 1024)]
    prefills = [(16, 1024), (4, 4096), (2, 8192)]
    if session.small:
        all_heads, decodes, prefills = (Heads(4, 2, 32),), [(1, 40), (3, 70)], [(2, 33)]
    for heads in all_heads:
        group = heads.num_q // heads.num_kv
        for batch, context in decodes:
            name = f"decode_attention/g{group}/b{batch}/ctx{context}"
            yield _case(session, name, heads, [(context, 1)] * batch)
        for batch, length in prefills:
            name = f"prefill_attention/g{group}/{batch}x{length}"
            yield _case(session, name, heads, [(length, length)] * batch)
        if not session.small:
            mixed = [(1024, 1)] * 128 + [(4096, 1920)]
            yield _case(session, f"mixed_attention/g{group}", heads, mixed)


def make_step(
    session: Session, heads: Heads, seqs: list[tuple[int, int]], number: int, dtype: torch.dtype
) -> Step:
    """seqs: (context, query tokens of this step), decodes first."""
    device, draw = session.device, Draw(session.device, dtype, number)
    widths = [-(-context // BLOCK_SIZE) for context, _ in seqs]
    num_blocks = sum(widths)
    scattered = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(number))
    table_BM = torch.zeros(len(seqs), max(widths), dtype=torch.int32)
    start = 0
    for row, width in enumerate(widths):
        table_BM[row, :width] = scattered[start : start + width]
        start += width
    shape = num_blocks, BLOCK_SIZE, heads.num_kv, heads.size
    cache = KVCache(draw.normal(*shape), draw.normal(*shape))
    starts = [0]
    for _, count in seqs:
        starts.append(starts[-1] + count)
    lengths = [context for context, _ in seqs]
    num_decodes = sum(count == 1 for _, count in seqs)

    def on_device(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    metadata = AttentionMetadata(
        num_decodes=num_decodes,
        query_start=starts,
        seq_lens=lengths,
        num_decodes_1=on_device([num_decodes]),
        query_start_A=on_device(starts),
        seq_lens_B=on_device(lengths),
        block_table_BM=table_BM.to(device),
        positions_T=torch.cat([torch.arange(n - c, n) for n, c in seqs]).to(device),
        slot_mapping_T=torch.full((starts[-1],), -1, device=device),
    )
    q_THD = draw.normal(starts[-1], heads.num_q, heads.size)
    return Step(q_THD, cache, metadata, AttentionSpec(scale=heads.size**-0.5))


def error(step: Step, out_THD: Tensor) -> float:
    """Of some sequences, among them the first and the last."""
    num_seqs = len(step.metadata.seq_lens)
    chosen = sorted({round(i * (num_seqs - 1) / max(1, _CHECKED - 1)) for i in range(_CHECKED)})
    errors = []
    for row in chosen:
        begin, end = step.metadata.query_start[row : row + 2]
        errors.append(relative_error(out_THD[begin:end], _reference(step, row)))
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def _case(session: Session, name: str, heads: Heads, seqs: list[tuple[int, int]]) -> KernelCase:
    dtype = torch.bfloat16 if session.on_gpu else torch.float32
    num_tokens = sum(count for _, count in seqs)
    num_context = sum(context for context, _ in seqs)
    pairs = sum(count * (context - count) + count * (count + 1) / 2 for context, count in seqs)
    row_bytes = heads.size * dtype.itemsize
    others: dict[str, Any] = {}
    if session.on_gpu and _has_fa3(session.carried):
        others["fa3"] = _run_fa3
    if all(count == context for context, count in seqs):
        others["torch sdpa, contiguous"] = _TorchAttention(heads, seqs)
    return KernelCase(
        name=name,
        num_bytes=row_bytes * (2 * num_context * heads.num_kv + 2 * num_tokens * heads.num_q),
        flops=4 * pairs * heads.num_q * heads.size,
        make=lambda number: make_step(session, heads, seqs, number, dtype),
        run=lambda kernels, s: kernels.paged_attention(s.q_THD, s.cache, s.metadata, s.spec),
        error=error,
        others=others,
    )


def _has_fa3(carried: Path | None) -> bool:
    try:
        return fa3.load(carried)
    except OSError:  # `env` says why
        return False


def _reference(step: Step, row: int) -> Tensor:
    """Dense, float32; head by head, for scores of long prompts are large."""
    begin, end = step.metadata.query_start[row : row + 2]
    length = step.metadata.seq_lens[row]
    blocks = step.metadata.block_table_BM[row, : -(-length // BLOCK_SIZE)].long()
    k, v = (
        x[blocks].flatten(0, 1)[:length].float() for x in (step.cache.k_NSKD, step.cache.v_NSKD)
    )
    q = step.q_THD[begin:end].float()
    group = q.shape[1] // k.shape[1]
    count = end - begin
    places = torch.arange(length, device=q.device)
    unseen = places > places[length - count :, None]
    heads = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T * step.spec.scale
        heads.append(scores.masked_fill(unseen, -torch.inf).softmax(-1) @ v[:, head // group])
    return torch.stack(heads, 1)


def _run_fa3(step: Step) -> Tensor:
    metadata = step.metadata
    counts = [b - a for a, b in zip(metadata.query_start, metadata.query_start[1:], strict=False)]
    return fa3.attention(
        step.q_THD, step.cache.k_NSKD, step.cache.v_NSKD, metadata.query_start_A,
        max(counts), max(metadata.seq_lens), scale=step.spec.scale,
        seq_lens_B=metadata.seq_lens_B, block_table_BM=metadata.block_table_BM,
    )  # fmt: skip


class _TorchAttention:
    """Prompts of one length by torch; K and V of all sequences side by side, without pages."""

    def __init__(self, heads: Heads, seqs: list[tuple[int, int]]) -> None:
        self._heads, self._batch, self._length = heads, len(seqs), seqs[0][0]
        self._kv: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, step: Step) -> Tensor:
        heads = self._heads
        shape = self._batch, heads.num_q, self._length, heads.size
        q = step.q_THD.view(self._batch, self._length, heads.num_q, heads.size).transpose(1, 2)
        k, v = self._kv.setdefault(
            id(step),
            tuple(torch.randn(shape, dtype=q.dtype, device=q.device) for _ in "kv"),
        )
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
