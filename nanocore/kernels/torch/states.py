"""Layers with states in plain torch, one sequence after the other. Shape suffixes: see `interface`
and `nanocore.kernels.states`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from nanocore.kernels.attention import AttentionMetadata
from nanocore.kernels.states import ConvFilters, DeltaRule, StateCache
from nanocore.kernels.torch.step import rms_norm

_EPS = 1e-6
"""Added to the squared length of q and of k."""


def short_conv(
    x: Tensor, filters: ConvFilters, cache: StateCache, metadata: AttentionMetadata
) -> Tensor:
    y_TC, size = _conv(x, filters, cache, metadata, _product), filters.taps_LC.shape[1]
    end = int(metadata.query_start_A[-1])
    y_TC[:end] *= x[:end, size : 2 * size]
    return y_TC


def silu_conv(
    x: Tensor, filters: ConvFilters, cache: StateCache, metadata: AttentionMetadata
) -> Tensor:
    return F.silu(_conv(x, filters, cache, metadata, lambda x: x))


def _product(x: Tensor) -> Tensor:
    b, _, u = x.chunk(3, 1)
    return b * u


def _conv(
    x: Tensor,
    filters: ConvFilters,
    cache: StateCache,
    metadata: AttentionMetadata,
    make_input: Callable[[Tensor], Tensor],
) -> Tensor:
    """The convolution, rounded; zeros of padding. make_input: of the filter, from x."""
    num_taps, num_channels = filters.taps_LC.shape
    out_TC, num_kept = x.new_zeros(len(x), num_channels), num_taps - 1
    for one in _sequences(cache, metadata):
        before = x.new_zeros(num_kept, num_channels)
        if one.first:
            before = cache.conv_NLC[one.block(one.first)]
        own = one.inputs(x, 0)
        inputs, count = torch.cat((before, make_input(own))), len(own)
        y = torch.zeros_like(inputs[num_kept:], dtype=torch.float32)
        if filters.bias_C is not None:
            y += filters.bias_C
        for j, tap_C in enumerate(filters.taps_LC):
            y += inputs[j : j + count].float() * tap_C
        out_TC[one.start : one.stop] = y[one.num_right :]
        for end in one.written_ends():
            cache.conv_NLC[one.block(end)] = inputs[end - one.first : end - one.first + num_kept]
        one.keep_drafts(x, 0)
    return out_TC


def delta_rule(
    qkv: Tensor,
    gates_T2P: Tensor,
    rule: DeltaRule,
    cache: StateCache,
    metadata: AttentionMetadata,
) -> Tensor:
    assert cache.delta_N is not None
    x, num_heads = torch.cat((qkv, gates_T2P), 1), len(rule.decay_P)
    out_TPD = qkv.new_zeros(len(x), num_heads, rule.value_dim)
    for one in _sequences(cache, metadata):
        own = one.inputs(x, -x.shape[1])
        states = out_TPD.new_zeros(num_heads, rule.key_dim, rule.value_dim, dtype=torch.float32)
        if one.first:
            states = cache.delta_N[one.block(one.first)].clone()
        ends, results = set(one.written_ends()), []
        for number, (q, k, v, decay, beta) in enumerate(_tokens(own, rule), one.first + 1):
            states *= decay[:, None, None]
            change = beta[:, None] * (v - torch.einsum("pkv,pk->pv", states, k))
            states += k[:, :, None] * change[:, None]
            results.append(torch.einsum("pkv,pk->pv", states, q))
            if number in ends:
                cache.delta_N[one.block(number)] = states
        out_TPD[one.start : one.stop] = torch.stack(results[one.num_right :])
        one.keep_drafts(x, -x.shape[1])
    return out_TPD.flatten(1)


def _tokens(x: Tensor, rule: DeltaRule) -> Iterator[tuple[Tensor, ...]]:
    """Yield of each token q, k and v of the value heads, decays and betas. x: qkv, b and a."""
    num_keys, num_heads, size = rule.num_key_heads, len(rule.decay_P), rule.key_dim
    sizes = num_keys * size, num_keys * size, num_heads * rule.value_dim, num_heads, num_heads
    q, k, v, b, a = x.float().split(sizes, 1)
    heads = torch.arange(num_heads, device=x.device)
    of_key = heads % num_keys if rule.is_tiled else heads // (num_heads // num_keys)
    q, k = (_unit(x.unflatten(1, (num_keys, size)))[:, of_key] for x in (q, k))
    decay = (rule.decay_P * F.softplus(a + rule.time_bias_P)).exp()
    beta = b.sigmoid().to(x.dtype).float()
    yield from zip(q * size**-0.5, k, v.unflatten(1, (num_heads, -1)), decay, beta, strict=True)


def join_previous(
    x_TE: Tensor, hidden_TE: Tensor, kept_RKE: Tensor, metadata: AttentionMetadata
) -> Tensor:
    joined_TE = torch.cat((x_TE, hidden_TE.roll(1, 0)), 1)
    for (start, _), row, num_right, _ in _rows(metadata):
        joined_TE[start, x_TE.shape[1] :] = kept = kept_RKE[row, num_right]
        joined_TE[start] *= kept.any()
    return joined_TE


def keep_last(hidden_TE: Tensor, kept_RKE: Tensor, metadata: AttentionMetadata) -> None:
    for (_, stop), row, _, num_drafts in _rows(metadata):
        num_kept = 1 + num_drafts
        kept_RKE[row, :num_kept] = hidden_TE[stop - num_kept : stop]


def _rows(metadata: AttentionMetadata) -> Iterator[tuple[tuple[int, int], int, int, int]]:
    """Yield of each sequence with tokens their range, its row, and what drafts were and are."""
    columns = metadata.rows_B, metadata.num_right_B, metadata.num_drafts_B
    of_rows = [column.tolist() for column in columns if column is not None]
    for span, *row in zip(pairwise(metadata.query_start_A.tolist()), *of_rows, strict=True):
        if span[0] < span[1]:
            yield (span, *row)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    return x * gate.sigmoid()


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    shape = -1, len(weight)
    normed = rms_norm(x.unflatten(1, shape), weight, eps)
    return (normed.float() * F.silu(gate.unflatten(1, shape).float())).to(x.dtype).flatten(1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


class _Sequence(msgspec.Struct):
    """A sequence of a step.

    start, stop: of its tokens in T. first: tokens that the state has which it begins with; it lacks
    num_right drafts of its row's last step. last: likewise of the one which it leaves. blocks: ids.
    drafts_KI: of its row, if rows draft; num_drafts: of them it ends with.
    """

    start: int
    stop: int
    first: int
    last: int
    num_right: int
    num_drafts: int
    blocks: list[int]
    block_size: int
    drafts_KI: Tensor

    def block(self, num_tokens: int) -> int:
        """Return the id of the block with the state after so many tokens."""
        return self.blocks[(num_tokens - 1) // self.block_size]

    def inputs(self, x: Tensor, column: int) -> Tensor:
        """Return inputs of the last step's drafts that were right, kept from a column on, and x."""
        own = x[self.start : self.stop]
        if not self.num_right:
            return own
        return torch.cat((self._kept(x, column)[: self.num_right], own))

    def keep_drafts(self, x: Tensor, column: int) -> None:
        """Keep inputs of this step's drafts, when the last one's are read."""
        if self.num_drafts:
            drafts = x[self.stop - self.num_drafts : self.stop]
            self._kept(x, column)[: self.num_drafts] = drafts

    def _kept(self, x: Tensor, column: int) -> Tensor:
        return self.drafts_KI[:, column % self.drafts_KI.shape[1] :][:, : x.shape[1]]

    def written_ends(self) -> Iterator[int]:
        """Yield after how many tokens the state is to be written."""
        size = self.block_size
        for end in (*range((self.first // size + 1) * size, self.last, size), self.last):
            if self.block(end) >= 0:
                yield end


def _sequences(cache: StateCache, metadata: AttentionMetadata) -> Iterator[_Sequence]:
    """Yield the sequences that have tokens."""
    starts = metadata.query_start_A.tolist()  # of the step, where a graph replays it
    num_right = num_drafts = [0] * len(starts)
    drafts_RKI = cache.drafts_RKI
    if drafts_RKI is not None:
        assert metadata.rows_B is not None
        assert metadata.num_right_B is not None
        assert metadata.num_drafts_B is not None
        num_right, num_drafts = metadata.num_right_B.tolist(), metadata.num_drafts_B.tolist()
        rows = metadata.rows_B.tolist()
    for i, seq_len in enumerate(metadata.seq_lens_B.tolist()):
        start, stop = starts[i], starts[i + 1]
        if not seq_len or stop == start:
            continue
        num_blocks = -(-seq_len // cache.block_size)
        yield _Sequence(
            start,
            stop,
            seq_len - (stop - start) - num_right[i],
            seq_len - num_drafts[i],
            num_right[i],
            num_drafts[i],
            metadata.block_ids(slice(i, i + 1))[0, :num_blocks].tolist(),
            cache.block_size,
            cache.conv_NLC.new_zeros(0, 0) if drafts_RKI is None else drafts_RKI[rows[i]],
        )


class TorchStates:
    """Implements `StateKernels`."""

    short_conv = staticmethod(short_conv)
    silu_conv = staticmethod(silu_conv)
    delta_rule = staticmethod(delta_rule)
    join_previous = staticmethod(join_previous)
    keep_last = staticmethod(keep_last)
    sigmoid_gate = staticmethod(sigmoid_gate)
    gated_norm = staticmethod(gated_norm)
