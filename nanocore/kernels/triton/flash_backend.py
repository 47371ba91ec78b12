"""Attention by flash-attn where it is installed, everything else by our kernels.

FlashAttention 3 (for Hopper, upstream's or vLLM's build) and 4 (for Hopper and Blackwell) take any
block size and a step's decodes and chunks in one call. FlashAttention 2 wants blocks of whole 256
tokens, and gets decodes and chunks apart. All choose their work by the batch, so results depend on
it, and chunks need lengths on the host, so only steps of decodes are captured as graphs. (Dao et
al. 2022, Dao 2023, Shah et al. 2024.) Quantized caches, float32 and head sizes that they do not
take are ours; and so are windows, of which they read whole tiles of keys, where blocks before the
window may be another request's by now. Shape suffixes: see `interface`.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from nanocore.kernels.attention import AttentionMetadata, AttentionSpec, KVCache
from nanocore.kernels.step import GraphSupport
from nanocore.kernels.triton.linear import TritonLinear
from nanocore.kernels.triton.paged_attention import paged_attention
from nanocore.kernels.triton.rope import rope_and_store_kv
from nanocore.kernels.triton.states import TritonStates
from nanocore.kernels.triton.triton_backend import TritonDevice, TritonSampling, TritonStep

logger = logging.getLogger(__name__)

DTYPES: Final = (torch.bfloat16, torch.float16)

_MAX_SPLITS: Final = 32
_MAX_SPLIT_TOKENS: Final = 8192
"""Limits for the parts that FlashAttention 3 may split keys into, and for tokens times parts: each
part has float32 results for every token. How many of them it uses it decides on the device."""
_NO_WINDOW: Final = (-1, -1)
"""Tokens before and after a token that it attends to: all."""
_STEP_KEY: Final = "flash-attn"


@dataclass(frozen=True, slots=True)
class _Build:
    """A build of flash-attn: its module, what our calls need of it, and where it runs.

    functions: those that we call; the first one takes sequence lengths and the block table by the
    names `lengths` and `table`. majors: of compute capabilities.
    """

    version: int
    module: str
    functions: tuple[str, ...]
    lengths: str
    table: str
    majors: Collection[int]

    def load(self, device: torch.device) -> ModuleType:
        """Import the module.

        Raises Exception: it is not installed, damaged, lacks what we call, or cannot run here.
        """
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            if major not in self.majors:
                raise ValueError(
                    f"it has no paged attention for compute capability {major}.{minor}"
                )
        module = importlib.import_module(self.module)
        for name in self.functions:
            if not hasattr(module, name):  # flash-attn-4 alone leaves an empty module flash_attn
                raise ValueError(f"it has no {name}")
        needed = {self.lengths, self.table, "softmax_scale", "causal", "window_size", "softcap"}
        names = inspect.signature(getattr(module, self.functions[0])).parameters
        if missing := sorted(needed - names.keys()):
            raise ValueError(f"its {self.functions[0]} takes no {', '.join(missing)}")
        if "fa_version" in names and (lacks := module.fa_version_unsupported_reason(self.version)):
            raise ValueError(lacks)  # vLLM's has several versions
        return module


_WITH_KVCACHE: Final = "flash_attn_with_kvcache"
_VARLEN: Final = "flash_attn_varlen_func"
_BUILDS: Final = (
    _Build(3, "flash_attn_interface", (_WITH_KVCACHE,), "cache_seqlens", "page_table", (8, 9)),
    _Build(3, "vllm.vllm_flash_attn", (_VARLEN,), "seqused_k", "block_table", (9,)),
    _Build(4, "flash_attn.cute", (_VARLEN,), "seqused_k", "page_table", (9, 10, 11)),
    _Build(2, "flash_attn", (_WITH_KVCACHE, _VARLEN), "cache_seqlens", "block_table", range(8, 13)),
)
"""Builds that are looked for, the best one first."""


class FlashAttention(TritonDevice):
    """Implements `AttentionKernels`. version: of flash-attn.

    Raises ValueError: no flash-attn can be used here, or see `TritonDevice`.
    """

    rope_and_store_kv = staticmethod(rope_and_store_kv)

    def __init__(self, device: torch.device, *, keeps_activations: bool = False) -> None:
        super().__init__(device, keeps_activations=keeps_activations)
        build, self._module = _find(device)
        self.version = build.version
        self.block_multiple = 256 if self.version == 2 else 1
        self._one_call = _OneCall.of(build, self._module) if self.version > 2 else None
        is_blackwell = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] > 9
        self._max_head_dim = 128 if is_blackwell and self.version == 4 else 256

    def paged_attention(
        self, q_THD: Tensor, cache: KVCache, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        head_dim = q_THD.shape[-1]
        is_theirs = cache.k_scale_NSK is None and cache.k_NSKD.dtype in DTYPES and not spec.window
        if not is_theirs or head_dim > self._max_head_dim or head_dim % 8:
            return paged_attention(
                q_THD, cache, metadata, spec, num_sms=self.num_sms, batch_invariant=False
            )
        # Where decodes may have several tokens, which are no sequence's only the device knows.
        make_out = torch.empty_like if metadata.decode_tokens == 1 else torch.zeros_like
        out_THD = make_out(q_THD)
        num_tokens = metadata.query_start[-1]
        out_THD[num_tokens:] = 0  # padding
        operands = q_THD[:num_tokens], cache, metadata, spec, out_THD[:num_tokens]
        if self._one_call is not None:
            self._one_call.attend(*operands)
        else:
            _attend_2(self._module, *operands)
        return out_THD


class FlashKernels(TritonLinear, FlashAttention, TritonStates, TritonSampling, TritonStep):
    """Implements `interface.Kernels`."""

    name = "flash"
    graph_support: GraphSupport = "decodes"


def _find(device: torch.device) -> tuple[_Build, ModuleType]:
    reasons = []
    for build in _BUILDS:
        try:
            module = build.load(device)
        except Exception as error:  # a damaged installation raises anything
            if not (isinstance(error, ImportError) and _is_absent(build.module, error)):
                reasons.append(f"{build.module}: {error or type(error).__name__}")
        else:
            for reason in reasons:
                logger.warning("flash-attn: cannot use %s", reason)
            logger.info("attention by FlashAttention %d (%s)", build.version, build.module)
            return build, module
    told = "; ".join(reasons) or "pip install '.[flash-attn]' does it, see docs/gpu.md"
    raise ValueError(f"no usable flash-attn is installed; use auto, or install it; {told}")


def _is_absent(module: str, error: ImportError) -> bool:
    """Whether the module itself, or a package around it, is what was not found."""
    return error.name is not None and f"{module}.".startswith(f"{error.name}.")


def _options(spec: AttentionSpec) -> dict[str, Any]:
    return {
        "softmax_scale": spec.scale,
        "causal": True,
        "window_size": _NO_WINDOW,
        "softcap": spec.softcap,
    }


@dataclass(frozen=True, slots=True)
class _OneCall:
    """The function of FlashAttention 3 or 4 for a step's decodes and chunks.

    names: what it takes. plan: FlashAttention 3's scheduler, in releases whose function takes its
    metadata.
    """

    build: _Build
    function: Callable[..., Any]
    names: Collection[str]
    plan: Callable[..., Tensor] | None

    @classmethod
    def of(cls, build: _Build, module: ModuleType) -> _OneCall:
        function = getattr(module, build.functions[0])
        names = inspect.signature(function).parameters.keys()
        has_plans = build.version == 3 and "scheduler_metadata" in names
        plan = getattr(module, "get_scheduler_metadata", None) if has_plans else None
        return cls(build, function, names, plan)

    def attend(
        self,
        q_THD: Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        out_THD: Tensor,
    ) -> None:
        step, build = _Step.of(metadata), self.build
        table_BM = step.block_table_BM
        options = _options(spec) | {
            build.lengths: metadata.seq_lens_B,
            build.table: table_BM,
            "cu_seqlens_q": metadata.query_start_A,
            "max_seqlen_q": step.longest,
        }
        optional = {
            "max_seqlen_k": table_BM.shape[1] * cache.k_NSKD.shape[1],
            "fa_version": build.version,
            "out": out_THD,
        }
        if build.version == 3:
            optional["num_splits"] = step.num_splits
        else:  # to FlashAttention 4 any number is a window; it splits no keys here
            options["window_size"] = None, None
        if self.plan is not None:
            options["scheduler_metadata"] = self._planned(q_THD, cache, metadata, spec)
        options |= {name: value for name, value in optional.items() if name in self.names}
        result = self.function(q_THD, cache.k_NSKD, cache.v_NSKD, **options)
        if "out" not in self.names:  # FlashAttention 4 returns the logarithms of sums, too
            out_THD.copy_(result[0] if isinstance(result, tuple) else result)

    def _planned(
        self, q_THD: Tensor, cache: KVCache, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        """Plan of the step's work on multiprocessors, for all layers that are alike.

        It is computed on the device, by a kernel that a graph has before those that read it.
        """
        step, (_, num_heads, head_dim) = _Step.of(metadata), q_THD.shape
        _, block_size, num_kv_heads, _ = cache.k_NSKD.shape
        key = num_heads, num_kv_heads, head_dim, block_size, spec.softcap > 0
        if key not in step.plans:
            assert self.plan is not None
            batch_size, num_columns = step.block_table_BM.shape
            step.plans[key] = self.plan(
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
                window_size=_NO_WINDOW,
                has_softcap=spec.softcap > 0,
                num_splits=step.num_splits,
            )
        return step.plans[key]


@dataclass(frozen=True, slots=True)
class _Step:
    """Arguments of one call for a step. longest: chunk. plans: by what they depend on."""

    longest: int
    num_splits: int
    block_table_BM: Tensor
    plans: dict[Hashable, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, metadata: AttentionMetadata) -> _Step:
        found: _Step | None = metadata.scratch.get(_STEP_KEY)
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
    # Its function for decodes wants as many tokens of each.
    num_decodes = metadata.num_decodes if metadata.decode_tokens == 1 else 0
    starts = metadata.query_start
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
