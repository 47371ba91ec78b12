"""The native CPU kernels as a backend: a Python call for each, or a whole step in one.

Every number of rows, chunking and batch gives a token the same bits (see multiply.h). K and V lie
in the cache as products read them (kv_cache.h), which needs blocks and heads of whole 16 values;
other shapes and caches of fp8 are torch's. Shape suffixes: see `interface`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from msgspec.structs import astuple
from torch import Tensor

from nanocore.kernels.attention import AttentionMetadata, AttentionSpec, KVCache, QKNorm, Rotary
from nanocore.kernels.cpu.library import Library, NormWeightStruct
from nanocore.kernels.cpu.linear import CpuLinear
from nanocore.kernels.cpu.program import (
    SAMPLES,
    Captured,
    NativeKernels,
    NotCapturable,
    ProgramCapture,
    Unknown,
    UnknownInputs,
)
from nanocore.kernels.cpu.structs import (
    DTYPES,
    cache_struct,
    delta_struct,
    edits_struct,
    group_struct,
    kept_struct,
    mask_struct,
    norm_struct,
    state_struct,
)
from nanocore.kernels.linear import LinearKernels
from nanocore.kernels.linear_weight import TokenEmbedding
from nanocore.kernels.logit_edits import LogitEdits, TokenMask
from nanocore.kernels.sampling import Filters, LogprobTensors, Noise, TokenPlaces
from nanocore.kernels.states import ConvFilters, DeltaRule, StateCache
from nanocore.kernels.step import (
    BegunStep,
    GraphSupport,
    RankGroup,
    Replay,
    SharedMemoryGroup,
    StepRows,
)
from nanocore.kernels.torch import attention as torch_attention
from nanocore.kernels.torch import states as torch_states
from nanocore.kernels.torch import step as torch_step

logger = logging.getLogger(__name__)

NATIVE_MULTIPLE = 16
_PRODUCTS, _SILU = 0, 1
"""Kinds of convolutions in states.h."""
_DELTA_COLUMNS, _MAX_KEY_DIM = 32, 256


class CpuAttention(NativeKernels):
    """Implements `AttentionKernels`."""

    block_multiple = 1

    def rope_and_store_kv(
        self,
        qkv: Tensor,
        num_heads: int,
        qk_norm: QKNorm | None,
        rotary: Rotary,
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        if not _is_native(cache, qkv.dtype):
            self.refuse_capture("this KV cache")
            return torch_attention.rope_and_store_kv(
                qkv, num_heads, qk_norm, rotary, cache, metadata
            )
        qkv = qkv.contiguous()
        q_norm = k_norm = NormWeightStruct()
        if qk_norm is not None:
            q_norm = norm_struct(qk_norm.q_weight, qk_norm.eps)
            k_norm = norm_struct(qk_norm.k_weight, qk_norm.eps)
        self.run(
            "rope", qkv, qkv, num_heads, cache_struct(cache), q_norm, k_norm, rotary.cos,
            rotary.sin, rotary.cos.shape[1], step=self.step(metadata),
        )  # fmt: skip
        head_dim = cache.k_NSKD.shape[3]
        return qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))

    def paged_attention(
        self, q_THD: Tensor, cache: KVCache, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        if not _is_native(cache, q_THD.dtype):
            self.refuse_capture("this KV cache")
            return torch_attention.paged_attention(q_THD, cache, metadata, spec)
        assert spec.scale > 0, "the largest product is the largest logit"
        num_heads, head_dim = q_THD.shape[1:]
        out = self.empty(q_THD, num_heads * head_dim, q_THD.dtype)
        self.run(
            "attention", out, q_THD, q_THD.stride(0), num_heads, cache_struct(cache), spec.scale,
            spec.window, spec.softcap, out, step=self.step(metadata),
        )  # fmt: skip
        return out.unflatten(1, (num_heads, head_dim))


class CpuStates(NativeKernels):
    """Implements `StateKernels`."""

    def short_conv(
        self, x: Tensor, filters: ConvFilters, cache: StateCache, metadata: AttentionMetadata
    ) -> Tensor:
        return self._conv(_PRODUCTS, x, filters, cache, metadata)

    def silu_conv(
        self, x: Tensor, filters: ConvFilters, cache: StateCache, metadata: AttentionMetadata
    ) -> Tensor:
        return self._conv(_SILU, x, filters, cache, metadata)

    def _conv(
        self,
        kind: int,
        x: Tensor,
        filters: ConvFilters,
        cache: StateCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        num_taps, channels = filters.taps_LC.shape
        out = self.empty(x, channels, x.dtype)
        self.run(
            "short_conv", x, kind, x, x.stride(0), channels, num_taps, filters.taps_LC,
            filters.bias_C, state_struct(cache.conv_NLC, cache), out, step=self.step(metadata),
        )  # fmt: skip
        return out

    def delta_rule(
        self,
        qkv: Tensor,
        gates_T2P: Tensor,
        rule: DeltaRule,
        cache: StateCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        assert cache.delta_N is not None
        if not is_native_delta(rule.key_dim, rule.value_dim):
            self.refuse_capture("heads of this size")
            return torch_states.delta_rule(qkv, gates_T2P, rule, cache, metadata)
        out = self.empty(qkv, len(rule.decay_P) * rule.value_dim, qkv.dtype)
        self.run(
            "delta_rule", qkv, qkv, qkv.stride(0), gates_T2P, gates_T2P.stride(0),
            delta_struct(rule), state_struct(cache.delta_N, cache, qkv.shape[1]), out,
            step=self.step(metadata),
        )  # fmt: skip
        return out

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        out = self.empty(x, x.shape[1], x.dtype)
        self.run("sigmoid_gate", x, x, gate, gate.stride(0), x.shape[1], out)
        return out

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        head_dim = len(weight)
        if head_dim % NATIVE_MULTIPLE:
            self.refuse_capture("heads of this size")
            return torch_states.gated_norm(x, gate, weight, eps)
        out = self.empty(x, x.shape[1], x.dtype)
        self.run(
            "gated_norm", x, x, gate, gate.stride(0), norm_struct(weight, eps),
            x.shape[1] // head_dim, head_dim, out,
        )  # fmt: skip
        return out

    def join_previous(
        self, x_TE: Tensor, hidden_TE: Tensor, kept_RKE: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        size = x_TE.shape[1]
        out = self.empty(x_TE, 2 * size, x_TE.dtype)
        self.run(
            "join_previous", x_TE, x_TE, hidden_TE, size, kept_struct(kept_RKE), out,
            step=self.step(metadata),
        )  # fmt: skip
        return out

    def keep_last(self, hidden_TE: Tensor, kept_RKE: Tensor, metadata: AttentionMetadata) -> None:
        size, kept = hidden_TE.shape[1], kept_struct(kept_RKE)
        self.run("keep_last", hidden_TE, hidden_TE, size, kept, step=self.step(metadata))


class CpuSampling(NativeKernels):
    """Implements `SamplingKernels`."""

    def best_token(
        self,
        logits_RV: Tensor,
        first_token: int,
        noise: Noise | None = None,
        places: TokenPlaces | None = None,
        mask: TokenMask | None = None,
    ) -> tuple[Tensor, Tensor]:
        value_R, index_R = _empty_choice(logits_RV)
        drawn = (None, None, None) if noise is None else astuple(noise.contiguous())
        to: tuple[Any, ...] = None, 0, None, None
        if places is not None:
            table = places.token_table
            to = table, table.stride(0), places.rows_R.contiguous(), places.positions_R.contiguous()
        self.run(
            "best_token", logits_RV, *_places(logits_RV), first_token, mask_struct(mask), *drawn,
            value_R, index_R, *to,
        )  # fmt: skip
        return value_R, index_R

    def best_filtered_token(
        self, logits_RV: Tensor, noise: Noise, filters: Filters, mask: TokenMask | None = None
    ) -> tuple[Tensor, Tensor]:
        value_R, index_R = _empty_choice(logits_RV)
        self.run(
            "best_filtered_token", logits_RV, *_places(logits_RV), mask_struct(mask),
            *astuple(noise.contiguous()), filters.top_k_R.contiguous(),
            filters.top_p_R.contiguous(), -filters.min_p_R.log(), value_R, index_R,
        )  # fmt: skip
        return value_R, index_R

    def edit_logits(self, logits_RV: Tensor, edits: LogitEdits) -> None:
        self.run("edit_logits", logits_RV, edits_struct(logits_RV, edits))

    def logprobs(
        self, logits_RV: Tensor, token_ids_N: Tensor, num_top: int, index_N: Tensor | None = None
    ) -> LogprobTensors:
        num_rows, num_top = len(token_ids_N), min(num_top, logits_RV.shape[1])
        ids_NC = torch.empty(num_rows, 1 + num_top, dtype=torch.int32)
        logprobs_NC, rank_N = torch.empty(ids_NC.shape), torch.empty(num_rows, dtype=torch.int32)
        index_N = None if index_N is None else index_N.contiguous()
        self.run(
            "logprobs", token_ids_N, *_places(logits_RV), index_N, token_ids_N.contiguous(),
            num_top, ids_NC, logprobs_NC, rank_N,
        )  # fmt: skip
        return LogprobTensors(ids_NC, logprobs_NC, rank_N)


class _Embeds(LinearKernels, Protocol):
    """A backend whose step can be captured, and which has an embedding."""

    capturing: ProgramCapture | None


class CpuStep(NativeKernels):
    """Implements `StepKernels`. A whole step is captured, but not as a graph of a device."""

    graph_support: GraphSupport = "never"

    def begin_step(self: _Embeds, rows: StepRows, embedding: TokenEmbedding | None) -> BegunStep:
        if (capturing := self.capturing) is not None:
            unknown: Any = Unknown()
            if embedding is None:
                return BegunStep(unknown, unknown, None)
            capturing.takes_token_ids = True
            return BegunStep(unknown, unknown, self.embedding(capturing.token_ids_T, embedding))
        rows.append_blocks()
        x_TE = None if embedding is None else self.embedding(rows.token_ids(), embedding)
        return BegunStep(rows.of_groups(), rows.rows_B, x_TE)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        residual = residual.contiguous()
        return self._norm(x, residual, weight, eps), residual

    def select_add_rms_norm(
        self, x_TE: Tensor, residual_TE: Tensor, index_R: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        return self.select(self.add_rms_norm(x_TE, residual_TE, weight, eps)[0], index_R)

    def select(self, x_TE: Tensor, index_R: Tensor) -> Tensor:
        if self.capturing is None:
            return x_TE[index_R]
        self.capturing.rows = SAMPLES
        out_RE = self.empty(x_TE, x_TE.shape[1], x_TE.dtype)
        self.run("select", out_RE, x_TE, x_TE.shape[1], out_RE)
        return out_RE

    def add(self, x_TE: Tensor, residual_TE: Tensor) -> Tensor:
        width = x_TE.shape[1]
        out_TE = self.empty(x_TE, width, x_TE.dtype)
        self.run("add", x_TE, x_TE.contiguous(), residual_TE.contiguous(), width, out_TE)
        return out_TE

    def all_reduce(self, x_TE: Tensor, group: RankGroup, bias_E: Tensor | None = None) -> Tensor:
        if not isinstance(group, SharedMemoryGroup) or x_TE.dtype not in DTYPES:
            if group.size > 1:
                self.refuse_capture("ranks that reduce in other ways than through shared memory")
            return torch_step.all_reduce(x_TE, group, bias_E)
        x_TE = x_TE.contiguous()
        if self.capturing is not None:
            self.capturing.program.keep(group)
        self.run("all_reduce", x_TE, group_struct(group), x_TE, x_TE.shape[1], bias_E)
        return x_TE

    def capture(self, compute: Replay, max_tokens: int, max_samples: int) -> Replay | None:
        assert self.capturing is None, "one capture at a time"
        inputs: Any = UnknownInputs(torch.zeros(max_samples, dtype=torch.int64))
        self.capturing = ProgramCapture(self.workspace, max_tokens, max_samples)
        try:
            with self.capturing as capturing:
                result = compute(inputs)
        except NotCapturable as reason:
            logger.info("no graphs are captured, because a step has %s", reason)
            return None
        finally:
            self.capturing = None
        return Captured(capturing, result)

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        size = x.shape[-1]
        rows = x if x.dim() == 2 else x.reshape(-1, size)
        out = self.empty(rows, size, x.dtype)
        norm = norm_struct(weight, eps)
        self.run("rms_norm", rows, rows, rows.stride(0), residual, norm, size, out)
        return out.view(x.shape)


class CpuKernels(CpuLinear, CpuAttention, CpuStates, CpuSampling, CpuStep):
    """Implements `interface.Kernels`; library: what it calls, in this workspace.

    Args:
        cores: see `Workspace`.
        keeps_activations: weights of integers are multiplied with activations as they are, and not
            with eight bits of these (--activation-quantization none).
    """

    name = "cpu"

    def __init__(
        self,
        library: Library,
        cores: Sequence[int] | None = None,
        *,
        keeps_activations: bool = False,
    ) -> None:
        super().__init__(library, cores, keeps_activations=keeps_activations)
        amx = " and AMX" if library.call("uses_amx") else ""
        self.variant = f"{library.instruction_set}{amx}, compiled as {library.digest}"


def is_native_delta(key_dim: int, value_dim: int) -> bool:
    """Whether the native delta rule takes heads of these sizes."""
    return not (key_dim % NATIVE_MULTIPLE or key_dim > _MAX_KEY_DIM or value_dim % _DELTA_COLUMNS)


def _is_native(cache: KVCache, dtype: torch.dtype) -> bool:
    """Whether K and V lie in the cache in the native kernels' order."""
    block_size, head_dim = cache.k_NSKD.shape[1], cache.k_NSKD.shape[3]
    is_whole = block_size % NATIVE_MULTIPLE == 0 and head_dim % NATIVE_MULTIPLE == 0
    scale_dtype = None if cache.k_scale_NSK is None else cache.k_scale_NSK.dtype
    stored = cache.k_NSKD.dtype, scale_dtype
    return is_whole and stored in ((dtype, None), (torch.int8, torch.bfloat16))


def _empty_choice(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    num_rows = logits_RV.shape[0]
    return torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)


def _places(logits_RV: Tensor) -> tuple[Any, ...]:
    """Where rows are: the first one, their length, and from one to the next."""
    return logits_RV, logits_RV.shape[1], logits_RV.stride(0)
