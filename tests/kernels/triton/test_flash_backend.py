"""flash-attn as a backend, with stand-ins for its two versions that check how they are called.

They compute with dense attention what the real modules document for these arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from nanocore.kernels.interface import AttentionSpec
from nanocore.kernels.triton import flash_backend
from nanocore.kernels.triton.flash_backend import FlashKernels
from nanocore.protocol.errors import ConfigError
from nanocore.worker.device.device import make_kernels
from tests.kernels.paged_case import HEAD_DIM, PLAIN, PagedCase
from tests.worker.configs import make_worker_config

CPU = torch.device("cpu")
FA2_BLOCK = 256


def attend(
    q_QHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, scale: float, window: tuple[int, int], cap: float
) -> Tensor:
    """Causal, aligned at the end, as flash-attn is."""
    group = q_QHD.shape[1] // k_LKD.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k_LKD, v_LKD))
    scores = torch.einsum("qhd,khd->hqk", q_QHD, k) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    num_queries, length = len(q_QHD), len(k_LKD)
    ago = torch.arange(length - num_queries, length)[:, None] - torch.arange(length)
    unseen = (ago < 0) | ((ago > window[0]) if window[0] >= 0 else torch.tensor(False))
    weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def sequences(
    q: list[Tensor], cache: tuple[Tensor, Tensor], lengths: Tensor, table: Tensor, **options: Any
) -> Tensor:
    assert options["causal"]
    assert table.is_contiguous()
    assert table.dtype == lengths.dtype == torch.int32
    rows = []
    for i, queries in enumerate(q):
        k, v = (x[table[i].long()].flatten(0, 1)[: int(lengths[i])] for x in cache)
        rows.append(
            attend(
                queries, k, v, options["softmax_scale"], options["window_size"], options["softcap"]
            )
        )
    return torch.cat(rows)


def chunks(q: Tensor, starts: Tensor, longest: int) -> list[Tensor]:
    assert starts.dtype == torch.int32
    counts = starts.diff().tolist()
    assert max(counts) == longest
    return list(q.split(counts))


def fa3_with_kvcache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    **options: Any,
) -> Tensor:
    parts = chunks(q, cu_seqlens_q, max_seqlen_q)
    return sequences(parts, (k, v), cache_seqlens, page_table, **options)


@dataclass
class NewerRelease:
    """FlashAttention 3 of a release that takes our output and its scheduler's metadata.

    plans: what was asked of its scheduler. given: the plan and the output of each call.
    """

    plans: list[dict[str, Any]] = field(default_factory=list)
    given: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def functions(self) -> dict[str, Callable[..., Tensor]]:
        """Of the module."""

        def with_kvcache(
            *operands: Tensor, out: Tensor, scheduler_metadata: Tensor, num_splits: int,
            **options: Any,
        ) -> Tensor:  # fmt: skip
            asked = self.plans[int(scheduler_metadata)]
            assert num_splits == asked["num_splits"] > 0
            for name in ("cu_seqlens_q", "window_size", "causal"):
                assert options[name] is asked[name] or options[name] == asked[name]
            assert bool(options["softcap"]) == asked["has_softcap"]
            self.given.append((scheduler_metadata, out))
            return out.copy_(fa3_with_kvcache(*operands, **options))

        def plan(
            batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int,
            num_heads_kv: int, headdim: int, cache_seqlens: Tensor, **options: Any,
        ) -> Tensor:  # fmt: skip
            assert len(cache_seqlens) == batch_size
            assert int(options["cu_seqlens_q"].diff().max()) == max_seqlen_q
            assert int(cache_seqlens.max()) <= max_seqlen_k
            assert max_seqlen_k % options["page_size"] == 0
            self.plans.append(options | {"heads": (num_heads_q, num_heads_kv, headdim)})
            return torch.tensor(len(self.plans) - 1)

        return {"flash_attn_with_kvcache": with_kvcache, "get_scheduler_metadata": plan}


def fa2_with_kvcache(
    q: Tensor, k: Tensor, v: Tensor, *, cache_seqlens: Tensor, block_table: Tensor, **options: Any
) -> Tensor:
    assert k.shape[1] % FA2_BLOCK == 0
    assert q.dim() == 4
    assert q.shape[1] == 1
    parts = list(q.unbind())
    return sequences(parts, (k, v), cache_seqlens, block_table, **options)[:, None]


def fa2_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_table: Tensor,
    **options: Any,
) -> Tensor:
    assert k.shape[1] % FA2_BLOCK == 0
    lengths = cu_seqlens_k.diff().to(torch.int32)
    assert int(lengths.max()) == max_seqlen_k
    assert int(cu_seqlens_q[0]) == 0
    parts = chunks(q, cu_seqlens_q, max_seqlen_q)
    return sequences(parts, (k, v), lengths, block_table, **options)


MODULES: dict[str, dict[str, Callable[..., Tensor]]] = {
    "flash_attn_interface": {"flash_attn_with_kvcache": fa3_with_kvcache},
    "flash_attn": {
        "flash_attn_with_kvcache": fa2_with_kvcache,
        "flash_attn_varlen_func": fa2_varlen,
    },
}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have these modules and none of the others; float32 is taken, so that results are exact."""
    monkeypatch.setattr(flash_backend, "DTYPES", (torch.float32,))

    def have(*names: str) -> None:
        for name, functions in MODULES.items():
            module = ModuleType(name) if name in names else None
            for function_name, function in functions.items():
                setattr(module, function_name, function) if module else None
            monkeypatch.setitem(sys.modules, name, module)

    return have


@pytest.mark.parametrize(
    ("name", "version", "block_size"), [("flash_attn_interface", 3, 4), ("flash_attn", 2, 256)]
)
@pytest.mark.parametrize(
    "spec", [PLAIN, AttentionSpec(scale=HEAD_DIM**-0.5, window=5, softcap=2.0)]
)
@pytest.mark.parametrize(
    "seqs", [[(9, 1), (3, 1), (11, 4), (7, 7)], [(300, 1)], [(5, 5)], [(1, 1), (2, 2)]]
)
def test_steps_of_decodes_and_chunks_are_the_reference(
    install: Callable[..., None],
    name: str,
    version: int,
    block_size: int,
    spec: AttentionSpec,
    seqs: list[tuple[int, int]],
) -> None:
    install(name)
    case = PagedCase(seqs, block_size=block_size, spec=spec, num_padding=2)
    kernels = case.kernels = FlashKernels(CPU)
    assert kernels.version == version
    out = case.run()
    torch.testing.assert_close(out[:-2].double(), case.expected(), rtol=1e-5, atol=1e-5)
    assert not out[-2:].any()


def install_newer(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> NewerRelease:
    newer = NewerRelease()
    monkeypatch.setitem(MODULES, "flash_attn_interface", newer.functions())
    install("flash_attn_interface")
    return newer


@pytest.mark.parametrize(
    "spec", [PLAIN, AttentionSpec(scale=HEAD_DIM**-0.5, window=5, softcap=2.0)]
)
def test_a_release_that_takes_our_output_writes_there_alone(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, spec: AttentionSpec
) -> None:
    newer = install_newer(install, monkeypatch)
    case = PagedCase([(9, 1), (3, 1), (11, 4)], spec=spec, num_padding=2)
    case.kernels = FlashKernels(CPU)
    out = case.run()
    torch.testing.assert_close(out[:-2].double(), case.expected(), rtol=1e-5, atol=1e-5)
    assert not out[-2:].any()
    ((_, written),) = newer.given
    assert written.data_ptr() == out.data_ptr()


def test_layers_that_are_alike_share_a_plan_of_their_step(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with another window, softcap or number of heads have their own, and so has a step."""
    newer = install_newer(install, monkeypatch)
    kernels, scale = FlashKernels(CPU), HEAD_DIM**-0.5
    case, wide = PagedCase([(9, 1), (6, 3)]), PagedCase([(9, 1), (6, 3)], heads=8)
    specs = [PLAIN, AttentionSpec(scale, window=5), AttentionSpec(scale, softcap=2.0)]
    for _ in range(2):
        metadata = case.metadata()
        for spec in (*specs, *specs):
            kernels.paged_attention(torch.cat(case.q), case.cache, metadata, spec)
        kernels.paged_attention(torch.cat(wide.q), wide.cache, metadata, PLAIN)
    used = [int(plan) for plan, _ in newer.given]
    assert used == [0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7]
    assert [plan["heads"] for plan in newer.plans[2:4]] == [(4, 2, HEAD_DIM), (8, 2, HEAD_DIM)]


def test_parts_are_fewer_the_more_tokens_have_results_of_each(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = install_newer(install, monkeypatch)
    monkeypatch.setattr(flash_backend, "_MAX_SPLIT_TOKENS", 64)
    for count in (1, 3, 20, 100):
        case = PagedCase([(count, count)])
        case.kernels = FlashKernels(CPU)
        case.run()
    assert [plan["num_splits"] for plan in newer.plans] == [32, 21, 3, 1]


def test_version_3_is_taken_where_both_are(install: Callable[..., None]) -> None:
    install(*MODULES)
    assert FlashKernels(CPU).version == 3


def test_without_either_it_is_refused_with_a_remedy(install: Callable[..., None]) -> None:
    install()
    with pytest.raises(ValueError, match="flash-attn is not installed"):
        FlashKernels(CPU)


def test_one_that_is_there_and_does_not_load_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> ModuleType:
        reason = "undefined symbol: aoti" if name == "flash_attn_interface" else "No module"
        raise ImportError(reason, name="flash_attn_3._C" if "undefined" in reason else name)

    monkeypatch.setattr("importlib.import_module", find)
    with pytest.raises(ValueError, match="install it; flash_attn_interface: undefined symbol: aot"):
        FlashKernels(CPU)


def test_blocks_that_version_2_cannot_take_are_refused_by_flag(
    install: Callable[..., None],
) -> None:
    install("flash_attn")
    config = make_worker_config(attention_backend="flash", block_size=64)
    with pytest.raises(ConfigError, match=r"--block-size 64: .*a multiple of 256"):
        make_kernels(config, CPU)
    assert make_kernels(make_worker_config(attention_backend="flash", block_size=256), CPU)
    install("flash_attn_interface")
    assert make_kernels(config, CPU)


def test_a_batch_invariant_mode_is_refused(install: Callable[..., None]) -> None:
    install(*MODULES)
    config = make_worker_config(attention_backend="flash", batch_invariant=True)
    with pytest.raises(ConfigError, match="--batch-invariant needs"):
        make_kernels(config, CPU)


def test_quantized_caches_are_left_to_our_kernels(install: Callable[..., None]) -> None:
    install("flash_attn_interface")
    case = PagedCase([(9, 1), (6, 3)], kv_cache="int8")
    case.kernels = FlashKernels(CPU)
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=1e-4, atol=1e-4)
