"""Layers with states at the sizes of Qwen3.5: decodes of one step, and prompts.

A sequence reads its state from one block and writes it to another, so that calls can be repeated.
The least time of a delta rule is that of its multiplications in tensor cores, which ours does not
use: it goes from token to token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from benchmarks.attention_step import make_metadata
from benchmarks.gpu.kernels import KernelCase, draw, dtype_of
from benchmarks.gpu.results import Session
from nanocore.kernels.attention import AttentionMetadata
from nanocore.kernels.interface import Kernels
from nanocore.kernels.kv_quantization import KVCacheFormat
from nanocore.kernels.states import ConvFilters, DeltaRule, StateCache
from nanocore.worker.memory.kv_memory import KVLayout, KVMemory, StateSpec

BLOCK_SIZE: Final = 64
NUM_TAPS: Final = 4
KERNELS: Final = "delta_rule", "silu_conv", "gated_norm", "sigmoid_gate"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Key heads, value heads, and the dimension of both."""

    num_keys: int
    num_values: int
    dim: int

    @property
    def num_channels(self) -> int:
        """Of q, k and v."""
        return (2 * self.num_keys + self.num_values) * self.dim

    @property
    def state_bytes(self) -> int:
        """Of a sequence's matrices."""
        return 4 * self.num_values * self.dim**2


@dataclass(frozen=True, slots=True)
class Step:
    """Operands of every kernel. x: q, k and v, then z."""

    x: Tensor
    gates_T2P: Tensor
    filters: ConvFilters
    rule: DeltaRule
    norm: Tensor
    cache: StateCache
    metadata: AttentionMetadata

    def run(self, kernels: Kernels, kernel: str) -> Tensor:
        """One of KERNELS. x's other part is as wide as the values."""
        num_channels = self.filters.taps_LC.shape[1]
        qkv, z = self.x[:, :num_channels], self.x[:, num_channels:]
        if kernel == "delta_rule":
            return kernels.delta_rule(qkv, self.gates_T2P, self.rule, self.cache, self.metadata)
        if kernel == "silu_conv":
            return kernels.silu_conv(qkv, self.filters, self.cache, self.metadata)
        values = self.x[:, -z.shape[1] :].contiguous()
        if kernel == "gated_norm":
            return kernels.gated_norm(values, z, self.norm, 1e-6)
        return kernels.sigmoid_gate(values, z)


def state_cases(session: Session) -> Iterator[KernelCase]:
    """Decodes and prompts of both models; the gates of most rows alone."""
    models = {"0.8b": Sizes(16, 16, 128), "4b": Sizes(16, 32, 128)}
    steps = [(256, 1), (4, 1024), (32, 1), (1, 1024), (1, 1)]
    if session.small:
        models, steps = {"tiny": Sizes(2, 4, 32)}, [(3, 1), (2, 20)]
    for rows, length in steps:
        for model, sizes in models.items():
            for kernel in KERNELS[: 4 if (rows, length) in steps[:2] else 2]:
                name = f"states/{kernel}/{model}/{rows}x{length}"
                yield _case(session, name, sizes, kernel, rows, length)


def make_step(session: Session, sizes: Sizes, rows: int, length: int) -> Step:
    """Operands. length: tokens of each sequence; one goes on from a block that is full."""
    dtype, device = dtype_of(session), session.device
    num_inputs = 2 * (sizes.num_channels + sizes.num_values)
    shape = sizes.num_values, sizes.dim, sizes.dim
    spec = StateSpec((NUM_TAPS - 1, sizes.num_channels), dtype, num_inputs, shape)
    layout = KVLayout([spec], KVCacheFormat(dtype), BLOCK_SIZE)
    cache = KVMemory(layout, 2 * rows, device).layer(0)
    assert isinstance(cache, StateCache)
    assert cache.delta_N is not None
    for kept in (cache.conv_NLC, cache.delta_N):
        kept.copy_(draw(session, *kept.shape))
    context = length + BLOCK_SIZE * (length == 1)
    table_BM = torch.full((rows, -(-context // BLOCK_SIZE)), -1, dtype=torch.int32)
    table_BM[:, 0], table_BM[:, -1] = torch.arange(rows), torch.arange(rows, 2 * rows)
    num_tokens, num_values = rows * length, sizes.num_values
    rule = DeltaRule(
        sizes.num_keys, sizes.dim, sizes.dim,
        -draw(session, num_values).float().exp(), draw(session, num_values).float(),
    )  # fmt: skip
    return Step(
        draw(session, num_tokens, sizes.num_channels + num_values * sizes.dim),
        draw(session, num_tokens, 2 * num_values),
        ConvFilters(draw(session, NUM_TAPS, sizes.num_channels).float()),
        rule,
        draw(session, sizes.dim),
        cache,
        make_metadata([(context, length)] * rows, table_BM.to(device)),
    )


def _case(
    session: Session, name: str, sizes: Sizes, kernel: str, rows: int, length: int
) -> KernelCase:
    num_tokens, itemsize = rows * length, dtype_of(session).itemsize
    width = sizes.num_values * sizes.dim
    num_bytes = num_tokens * itemsize * 3 * width
    flops = 0
    if kernel == "silu_conv":
        num_bytes = 2 * num_tokens * itemsize * sizes.num_channels
        flops = 2 * num_tokens * sizes.num_channels * NUM_TAPS
    elif kernel == "delta_rule":
        num_states = 2 * rows  # without those on the way
        num_bytes = num_tokens * itemsize * (sizes.num_channels + width)
        num_bytes += num_states * sizes.state_bytes
        flops = 6 * num_tokens * width * sizes.dim
    return KernelCase(
        name=name,
        num_bytes=num_bytes,
        flops=flops,
        make=lambda _: make_step(session, sizes, rows, length),
        run=lambda kernels, step: step.run(kernels, kernel),
    )
