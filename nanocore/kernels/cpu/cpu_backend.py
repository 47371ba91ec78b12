"""The native CPU kernels as a backend: a Python call for each, or a whole step in one.

Every number of rows, chunking and batch gives a token the same bits (see multiply.h). K and V lie
in the cache as products read them (kv_cache.h), which needs blocks and heads of whole 16 values;
other shapes and caches of fp8 are computed by the torch backend. Shape suffixes: see `interface`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from ctypes import byref
from typing import Any, Final

import torch
from torch import Tensor

from nanocore.kernels import Activation
from nanocore.kernels.attention import AttentionMetadata, AttentionSpec, KVCache, QKNorm, Rotary
from nanocore.kernels.cpu.library import Library, NormWeightStruct, StepStruct
from nanocore.kernels.cpu.program import (
    SAMPLES,
    Captured,
    NotCapturable,
    Program,
    ProgramCapture,
    Unknown,
    Workspace,
    capture_program,
)
from nanocore.kernels.cpu.structs import (
    DTYPES,
    PackedExperts,
    cache_struct,
    edits_struct,
    expert_operands_struct,
    group_struct,
    mask_struct,
    norm_struct,
    step_struct,
    weight_struct,
)
from nanocore.kernels.cpu.weight_packing import TILE_COLUMNS, WeightPacking
from nanocore.kernels.grouped_weight import CheckpointWeight
from nanocore.kernels.linear import Routing, SharedExpert
from nanocore.kernels.linear_weight import Experts, ExpertWeights, LinearWeight, TokenEmbedding
from nanocore.kernels.logit_edits import LogitEdits, TokenMask
from nanocore.kernels.rank_group import RankGroup, SharedMemoryGroup
from nanocore.kernels.sampling import Filters, LogprobTensors, Noise, TokenPlaces
from nanocore.kernels.step import Replay
from nanocore.kernels.torch.backend import TorchKernels

logger = logging.getLogger(__name__)

_GATES: Final = {"silu": 1, "gelu": 2}
_OF_LOGITS: Final = frozenset(
    ("softcap", "best_token", "best_filtered_token", "edit_logits", "logprobs")
)
"""Kernels whose rows are float32 always: they take no dtype."""
NATIVE_MULTIPLE = 16


class CpuKernels(TorchKernels):
    """Implements `interface.Kernels`; library: what it calls, in this workspace.

    Args:
        cores: see `Workspace`.
        keeps_activations: weights of integers are multiplied with activations as they are, and not
            with eight bits of these (--activation-quantization none).
    """

    name = "cpu"
    kept_forms = frozenset({"grouped", "float8"})
    stacks_experts = False

    def __init__(
        self,
        library: Library,
        cores: Sequence[int] | None = None,
        *,
        keeps_activations: bool = False,
    ) -> None:
        self.workspace = Workspace(library, cores)
        self.library = library
        self.packing = WeightPacking(library, self.workspace, keeps_activations)
        amx = " and AMX" if library.call("uses_amx") else ""
        self.variant = f"{library.instruction_set}{amx}, compiled as {library.digest}"
        self._capturing: ProgramCapture | None = None

    def pack_linear(
        self,
        weight: CheckpointWeight,
        quantization: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> LinearWeight:
        return self.packing.pack(weight, quantization)

    def linear(self, x_TI: Tensor, weight: LinearWeight, bias_O: Tensor | None = None) -> Tensor:
        return self._linear(x_TI, weight, bias_O, x_TI.dtype)

    def gated_linear(
        self,
        x_TI: Tensor,
        weight: LinearWeight,
        bias_O: Tensor | None = None,
        activation: Activation = "silu",
    ) -> Tensor:
        if weight.out_features % (2 * TILE_COLUMNS) == 0 and not weight.segments:
            return self._linear(x_TI, weight, bias_O, x_TI.dtype, _GATES[activation])
        return self._gate(self.linear(x_TI, weight, bias_O), activation)

    def activate(self, x_TI: Tensor, activation: Activation) -> Tensor:
        # torch computes the last few values of a batch by other instructions than the rest.
        return self._gate(torch.cat((x_TI, torch.ones_like(x_TI)), dim=1), activation)

    def logits(self, x_RE: Tensor, weight: LinearWeight, softcap: float = 0.0) -> Tensor:
        logits_RV = self._linear(x_RE, weight, None, torch.float32)
        if softcap:
            width = logits_RV.shape[1]
            self._run("softcap", logits_RV, logits_RV.data_ptr(), width, softcap)
        return logits_RV

    def embedding(self, token_ids_T: Tensor, embedding: TokenEmbedding) -> Tensor:
        weight = embedding.weight
        out_TE = self._empty(token_ids_T, weight.in_features, embedding.dtype)
        step = StepStruct(token_ids=token_ids_T.data_ptr())
        self._run(
            "embedding", out_TE, byref(weight_struct(weight)), embedding.first_token,
            embedding.factor, out_TE.data_ptr(), step=step,
        )  # fmt: skip
        return out_TE

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, weight, eps)

    def add(self, x_TE: Tensor, residual_TE: Tensor) -> Tensor:
        x_TE, residual_TE = x_TE.contiguous(), residual_TE.contiguous()
        width = x_TE.shape[1]
        out_TE = self._empty(x_TE, width, x_TE.dtype)
        self._run(
            "add", x_TE, x_TE.data_ptr(), residual_TE.data_ptr(), width, out_TE.data_ptr()
        )  # fmt: skip
        return out_TE

    def all_reduce(self, x_TE: Tensor, group: RankGroup, bias_E: Tensor | None = None) -> Tensor:
        if not isinstance(group, SharedMemoryGroup) or x_TE.dtype not in DTYPES:
            if group.size > 1:
                self._refuse_capture("ranks that reduce in other ways than through shared memory")
            return super().all_reduce(x_TE, group, bias_E)
        x_TE = x_TE.contiguous()
        if self._capturing is not None:
            self._capturing.program.keep(group)
        self._run(
            "all_reduce", x_TE, byref(group_struct(group)), x_TE.data_ptr(), x_TE.shape[1],
            None if bias_E is None else bias_E.data_ptr(),
        )  # fmt: skip
        return x_TE

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        residual = residual.contiguous()
        return self._norm(x, residual, weight, eps), residual

    def select_add_rms_norm(
        self, x_TE: Tensor, residual_TE: Tensor, index_R: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        x_TE, _ = self.add_rms_norm(x_TE, residual_TE, weight, eps)
        if self._capturing is None:
            return x_TE[index_R]
        self._capturing.rows = SAMPLES
        out_RE = self._empty(x_TE, x_TE.shape[1], x_TE.dtype)
        self._run("select", out_RE, x_TE.data_ptr(), x_TE.shape[1], out_RE.data_ptr())
        return out_RE

    def pack_experts(self, weights: ExpertWeights) -> PackedExperts:  # type: ignore[override]
        return PackedExperts(weights)

    def moe(
        self,
        x_TE: Tensor,
        experts: Experts,
        routing: Routing,
        shared: SharedExpert | None = None,
        activation: Activation = "silu",
    ) -> Tensor:
        assert isinstance(experts, PackedExperts)
        out_TE = self._empty(x_TE, x_TE.shape[1], x_TE.dtype)
        self._run(
            "moe", x_TE, x_TE.data_ptr(), x_TE.stride(0), byref(experts.struct),
            byref(expert_operands_struct(routing, shared)), _GATES[activation], out_TE.data_ptr(),
        )  # fmt: skip
        return out_TE

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
            self._refuse_capture("this KV cache")
            return super().rope_and_store_kv(qkv, num_heads, qk_norm, rotary, cache, metadata)
        if not qkv.is_contiguous():
            qkv = qkv.contiguous()
        q_norm = k_norm = NormWeightStruct()
        if qk_norm is not None:
            q_norm = norm_struct(qk_norm.q_weight, qk_norm.eps)
            k_norm = norm_struct(qk_norm.k_weight, qk_norm.eps)
        head_dim = cache.k_NSKD.shape[3]
        self._run(
            "rope", qkv, qkv.data_ptr(), num_heads, byref(cache_struct(cache)), byref(q_norm),
            byref(k_norm), rotary.cos.data_ptr(), rotary.sin.data_ptr(), rotary.cos.shape[1],
            step=self._step(metadata),
        )  # fmt: skip
        return qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))

    def paged_attention(
        self, q_THD: Tensor, cache: KVCache, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        if not _is_native(cache, q_THD.dtype):
            self._refuse_capture("this KV cache")
            return super().paged_attention(q_THD, cache, metadata, spec)
        assert spec.scale > 0, "the largest product is the largest logit"
        num_heads, head_dim = q_THD.shape[1:]
        out = self._empty(q_THD, num_heads * head_dim, q_THD.dtype)
        self._run(
            "attention", out, q_THD.data_ptr(), q_THD.stride(0), num_heads,
            byref(cache_struct(cache)), spec.scale, spec.window, spec.softcap, out.data_ptr(),
            step=self._step(metadata),
        )  # fmt: skip
        return out.unflatten(1, (num_heads, head_dim))

    def best_token(
        self,
        logits_RV: Tensor,
        first_token: int,
        noise: Noise | None = None,
        places: TokenPlaces | None = None,
        mask: TokenMask | None = None,
    ) -> tuple[Tensor, Tensor]:
        num_rows, width = logits_RV.shape
        value_R = torch.empty(num_rows)
        index_R = torch.empty(num_rows, dtype=torch.int64)
        columns: tuple[int | None, ...] = (None, None, None)
        if noise is not None:
            noise = noise.contiguous()
            columns = (
                noise.temperature_R.data_ptr(),
                noise.seed_R.data_ptr(),
                noise.position_R.data_ptr(),
            )
        self._run(
            "best_token", logits_RV, logits_RV.data_ptr(), width, logits_RV.stride(0), first_token,
            mask_struct(mask), *columns, value_R.data_ptr(), index_R.data_ptr(),
        )  # fmt: skip
        if places is not None:
            places.write(index_R)
        return value_R, index_R

    def best_filtered_token(
        self, logits_RV: Tensor, noise: Noise, filters: Filters, mask: TokenMask | None = None
    ) -> tuple[Tensor, Tensor]:
        num_rows, width = logits_RV.shape
        value_R = torch.empty(num_rows)
        index_R = torch.empty(num_rows, dtype=torch.int64)
        noise, max_gap_R = noise.contiguous(), -filters.min_p_R.log()
        top_k_R, top_p_R = filters.top_k_R.contiguous(), filters.top_p_R.contiguous()
        self._run(
            "best_filtered_token", logits_RV, logits_RV.data_ptr(), width, logits_RV.stride(0),
            mask_struct(mask), noise.temperature_R.data_ptr(), noise.seed_R.data_ptr(),
            noise.position_R.data_ptr(), top_k_R.data_ptr(), top_p_R.data_ptr(),
            max_gap_R.data_ptr(), value_R.data_ptr(), index_R.data_ptr(),
        )  # fmt: skip
        return value_R, index_R

    def edit_logits(self, logits_RV: Tensor, edits: LogitEdits) -> None:
        self._run("edit_logits", logits_RV, byref(edits_struct(logits_RV, edits)))

    def logprobs(
        self, logits_RV: Tensor, token_ids_N: Tensor, num_top: int, index_N: Tensor | None = None
    ) -> LogprobTensors:
        num_rows, width = len(token_ids_N), logits_RV.shape[1]
        num_top = min(num_top, width)
        ids_NC = torch.empty(num_rows, 1 + num_top, dtype=torch.int32)
        logprobs_NC, rank_N = torch.empty(ids_NC.shape), torch.empty(num_rows, dtype=torch.int32)
        token_ids_N = token_ids_N.contiguous()
        index_N = None if index_N is None else index_N.contiguous()
        self._run(
            "logprobs", token_ids_N, logits_RV.data_ptr(), width, logits_RV.stride(0),
            None if index_N is None else index_N.data_ptr(), token_ids_N.data_ptr(), num_top,
            ids_NC.data_ptr(), logprobs_NC.data_ptr(), rank_N.data_ptr(),
        )  # fmt: skip
        return LogprobTensors(ids_NC, logprobs_NC, rank_N)

    def capture(self, compute: Replay, max_tokens: int, max_samples: int) -> Replay | None:
        assert self._capturing is None, "one capture at a time"
        placeholder = torch.zeros(max_tokens, dtype=torch.int64)

        def run(capturing: ProgramCapture) -> Tensor:
            self._capturing = capturing
            return compute(placeholder, Unknown(), placeholder)  # type: ignore[arg-type]

        try:
            program, result, rows = capture_program(self.workspace, max_tokens, max_samples, run)
        except NotCapturable as reason:
            logger.info("no graphs are captured, because a step has %s", reason)
            return None
        finally:
            self._capturing = None
        return Captured(program, result, rows)

    def _linear(
        self,
        x_TI: Tensor,
        weight: LinearWeight,
        bias_O: Tensor | None,
        out_dtype: torch.dtype,
        gate: int = 0,
    ) -> Tensor:
        width = weight.out_features // 2 if gate else weight.out_features
        out_TO = self._empty(x_TI, width, out_dtype)
        start = out_TO.data_ptr()
        for segment, bias in weight.parts(bias_O):
            self._run(
                "linear", x_TI, x_TI.data_ptr(), x_TI.stride(0), byref(weight_struct(segment)),
                None if bias is None else bias.data_ptr(), gate, DTYPES[out_dtype], start,
                out_TO.stride(0),
            )  # fmt: skip
            start += segment.out_features * out_TO.element_size()
        return out_TO

    def _gate(self, x_TO: Tensor, activation: Activation) -> Tensor:
        out = self._empty(x_TO, x_TO.shape[1] // 2, x_TO.dtype)
        self._run(
            "gate", x_TO, x_TO.data_ptr(), out.shape[1], _GATES[activation], out.data_ptr()
        )  # fmt: skip
        return out

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        size = x.shape[-1]
        rows = x if x.dim() == 2 else x.reshape(-1, size)
        out = self._empty(rows, size, x.dtype)
        self._run(
            "rms_norm", rows, rows.data_ptr(), rows.stride(0),
            None if residual is None else residual.data_ptr(), byref(norm_struct(weight, eps)),
            size, out.data_ptr(),
        )  # fmt: skip
        return out.view(x.shape)

    def _empty(self, like: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        if self._capturing is not None:
            return self._capturing.empty(width, dtype)
        return torch.empty(len(like), width, dtype=dtype)

    def _run(
        self, kernel: str, rows: Tensor, *arguments: Any, step: StepStruct | None = None
    ) -> None:
        """Capture a kernel, or run it at once on the rows of this tensor."""
        head = () if kernel in _OF_LOGITS else (DTYPES[rows.dtype],)
        if self._capturing is not None:
            self._capturing.program.append(kernel, self._capturing.rows, *head, *arguments)
            return
        program = Program(self.workspace)
        program.append(kernel, len(rows), *head, *arguments)
        program.run(step or StepStruct())

    def _step(self, metadata: AttentionMetadata) -> StepStruct | None:
        return None if self._capturing is not None else step_struct(metadata)

    def _refuse_capture(self, what: str) -> None:
        if self._capturing is not None:
            raise NotCapturable(what)


def _is_native(cache: KVCache, dtype: torch.dtype) -> bool:
    """Whether K and V lie in the cache in the native kernels' order."""
    block_size, head_dim = cache.k_NSKD.shape[1], cache.k_NSKD.shape[3]
    is_whole = block_size % NATIVE_MULTIPLE == 0 and head_dim % NATIVE_MULTIPLE == 0
    scale_dtype = None if cache.k_scale_NSK is None else cache.k_scale_NSK.dtype
    stored = cache.k_NSKD.dtype, scale_dtype
    return is_whole and stored in ((dtype, None), (torch.int8, torch.bfloat16))
