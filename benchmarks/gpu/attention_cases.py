"""Attention over a paged cache at real shapes: decodes of one step, chunks, prompts.

Blocks are scattered over the cache. The reference is dense attention in float32 over some of the
sequences. Beside ours: FlashAttention 3 where it was carried, and for prompts torch's attention
over the same K and V laid side by side, which no engine has, as the best that torch can do. Each
call makes the step's plan anew, as FlashAttention 3's does; an engine makes it once for all layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.gpu import fa3
from benchmarks.gpu.kernel_case import Draw, KernelCase, relative_error
from benchmarks.gpu.session import Session
from nanocore.kernels.interface import AttentionMetadata, AttentionSpec, Kernels, KVCache
from nanocore.kernels.kv_quantization import kv_cache_format, quantize
from nanocore.kernels.torch_kv_cache import gather_kv
from nanocore.worker.memory.kv_memory import KVLayout, KVMemory, KVSpec

BLOCK_SIZE: Final = 64
_CHECKED: Final = 4
"""Sequences that are compared with the reference."""
Seqs = list[tuple[int, int]]
"""(context, query tokens of this step) of each sequence, decodes first."""


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
    if session.small:
        yield from _cases_of(session, Heads(4, 2, 32), unit=16, most=3)
        return
    for heads in (Heads(16, 8, 128), Heads(32, 8, 128)):
        yield from _cases_of(session, heads, unit=1024, most=256)


def _cases_of(session: Session, heads: Heads, unit: int, most: int) -> Iterator[KernelCase]:
    """unit: contexts and windows are multiples of it. most: sequences of a step."""

    def case(kind: str, shape: str, seqs: Seqs, **options: Any) -> KernelCase:
        name = f"attention/{kind}/g{heads.num_q // heads.num_kv}/{shape}"
        return _case(session, name, heads, seqs, **options)

    def decode(rows: int, length: int, suffix: str = "", **options: Any) -> KernelCase:
        rows = min(rows, most)
        shape = f"b{rows}/ctx{length}{suffix}"
        return case("decode", shape, [(length, 1)] * rows, **options)

    def prefill(rows: int, length: int, suffix: str = "", **options: Any) -> KernelCase:
        rows = min(rows, most)
        shape = f"{rows}x{length}{suffix}"
        return case("prefill", shape, [(length, length)] * rows, **options)

    for rows in (256, 32, 1, 128, 64, 48, 16, 8, 2):
        yield decode(rows, unit)
    for rows, length in ((4, 4 * unit), (16, unit), (2, 8 * unit)):
        yield prefill(rows, length)
    few, long = min(40, most), 128 * unit
    shape = f"b{few}/ctx{unit // 2}, one of {long}"
    yield case("decode", shape, [(long, 1), *[(unit // 2, 1)] * few])
    for rows in (32, 1, 8, 128):
        yield decode(rows, 8 * unit)
    for kv in ("int8", "fp8"):
        for rows in (256, 32, 1):
            yield decode(rows, unit, f"/{kv}", kv=kv)
        yield prefill(4, 4 * unit, f"/{kv}", kv=kv)
    chunk = max(2, unit // 16)
    yield case("chunk", f"{chunk} of {long // 2}", [(long // 2, chunk)])
    yield decode(32, 8 * unit, "/window", window=unit)
    yield prefill(4, 4 * unit, "/window", window=unit)
    half = max(1, most // 2)
    mixed = [(unit, 1)] * half + [(4 * unit, 2 * unit)]
    yield case("mixed", f"b{half} and a chunk", mixed)


def make_step(
    session: Session,
    heads: Heads,
    seqs: Seqs,
    number: int,
    dtype: torch.dtype,
    window: int = 0,
    kv: str = "auto",
) -> Step:
    """Operands with this number. kv: the format of the cache, see `kv_quantization`."""
    device, draw = session.device, Draw(session.device, dtype, number)
    widths = [-(-context // BLOCK_SIZE) for context, _ in seqs]
    num_blocks = sum(widths)
    scattered = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(number))
    table_BM = torch.zeros(len(seqs), max(widths), dtype=torch.int32)
    start = 0
    for row, width in enumerate(widths):
        table_BM[row, :width] = scattered[start : start + width]
        start += width
    layout = KVLayout(
        [KVSpec(heads.num_kv, heads.size)], kv_cache_format(kv, dtype, "cuda"), BLOCK_SIZE
    )
    cache = KVMemory(layout, num_blocks, device).layer(0)
    for values, scales in ((cache.k_NSKD, cache.k_scale_NSK), (cache.v_NSKD, cache.v_scale_NSK)):
        drawn = draw.normal(*values.shape)
        if scales is not None:
            drawn, scale = quantize(drawn, values.dtype, scales.dtype)
            scales.copy_(scale)
        values.copy_(drawn)
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
    return Step(q_THD, cache, metadata, AttentionSpec(scale=heads.size**-0.5, window=window))


def error(step: Step, out_THD: Tensor) -> float:
    """Of some sequences, among them the first and the last."""
    num_seqs = len(step.metadata.seq_lens)
    chosen = sorted({round(i * (num_seqs - 1) / max(1, _CHECKED - 1)) for i in range(_CHECKED)})
    errors = []
    for row in chosen:
        begin, end = step.metadata.query_start[row : row + 2]
        errors.append(relative_error(out_THD[begin:end], _reference(step, row)))
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def _case(
    session: Session, name: str, heads: Heads, seqs: Seqs, window: int = 0, kv: str = "auto"
) -> KernelCase:
    dtype = torch.bfloat16 if session.on_gpu else torch.float32
    num_tokens = sum(count for _, count in seqs)
    seen = window or math.inf
    num_keys = sum(min(context, seen + count - 1) for context, count in seqs)
    pairs = sum(
        min(p + 1, seen) for context, count in seqs for p in range(context - count, context)
    )
    key_bytes = heads.num_kv * kv_cache_format(kv, dtype, "cuda").bytes_per_head(heads.size)
    others: dict[str, Callable[[Step], Callable[[], Tensor]]] = {}
    if kv == "auto" and session.on_gpu and _has_fa3(session.carried):
        others["fa3"] = _with_fa3
    if kv == "auto" and not window and seqs == [(seqs[0][0], seqs[0][0])] * len(seqs):
        others["torch sdpa, contiguous"] = with_sdpa
    return KernelCase(
        name=name,
        num_bytes=2 * num_keys * key_bytes
        + 2 * num_tokens * heads.num_q * heads.size * dtype.itemsize,
        flops=4 * pairs * heads.num_q * heads.size,
        make=lambda _, number: make_step(session, heads, seqs, number, dtype, window, kv),
        run=_run,
        error=error,
        others=others,
    )


def _run(kernels: Kernels, step: Step) -> Tensor:
    step.metadata.scratch.clear()
    return kernels.paged_attention(step.q_THD, step.cache, step.metadata, step.spec)


def with_sdpa(step: Step) -> Callable[[], Tensor]:
    """Prompts of one length by torch, over K and V of all sequences side by side, without pages."""
    batch, length = len(step.metadata.seq_lens), step.metadata.seq_lens[0]
    width = -(-length // BLOCK_SIZE)
    k, v = (
        x.flatten(1, 2)[:, :length].transpose(1, 2).contiguous()
        for x in gather_kv(step.cache, step.metadata.block_table_BM[:, :width], step.q_THD.dtype)
    )
    q = step.q_THD.view(batch, length, *step.q_THD.shape[1:]).transpose(1, 2).contiguous()
    return partial(
        torch.nn.functional.scaled_dot_product_attention,
        q, k, v, is_causal=True, scale=step.spec.scale, enable_gqa=True,
    )  # fmt: skip


def _with_fa3(step: Step) -> Callable[[], Tensor]:
    metadata, window = step.metadata, step.spec.window
    counts = [b - a for a, b in zip(metadata.query_start, metadata.query_start[1:], strict=False)]
    return partial(
        fa3.attention,
        step.q_THD, step.cache.k_NSKD, step.cache.v_NSKD, metadata.query_start_A,
        max(counts), max(metadata.seq_lens), scale=step.spec.scale,
        seq_lens_B=metadata.seq_lens_B, block_table_BM=metadata.block_table_BM,
        window=(window - 1, 0) if window else (-1, -1),
    )  # fmt: skip


def _has_fa3(carried: Path | None) -> bool:
    try:
        return fa3.load(carried)
    except OSError:  # `env` says why
        return False


def _reference(step: Step, row: int) -> Tensor:
    """Dense, float32; head by head, for scores of long prompts are large."""
    begin, end = step.metadata.query_start[row : row + 2]
    length = step.metadata.seq_lens[row]
    blocks = step.metadata.block_table_BM[row, : -(-length // BLOCK_SIZE)]
    k, v = (x.flatten(0, 1)[:length].float() for x in gather_kv(step.cache, blocks, torch.float32))
    q = step.q_THD[begin:end].float()
    group = q.shape[1] // k.shape[1]
    places = torch.arange(length, device=q.device)
    own = places[length - (end - begin) :, None]
    unseen = (places > own) | (places <= own - (step.spec.window or length))
    heads = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T * step.spec.scale
        heads.append(scores.masked_fill(unseen, -torch.inf).softmax(-1) @ v[:, head // group])
    return torch.stack(heads, 1)
