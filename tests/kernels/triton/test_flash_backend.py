"""flash-attn as a backend, with stand-ins for its two versions that check how they are called.

They compute with dense attention what the real modules document for these arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanocore.kernels.attention import AttentionSpec
from nanocore.kernels.triton import flash_backend
from nanocore.kernels.triton.flash_backend import FlashKernels
from nanocore.protocol.errors import ConfigError
from nanocore.worker.devices import make_kernels
from tests.kernels.paged_case import HEAD_DIM, PLAIN, PagedCase
from tests.worker.configs import make_worker_config

CPU = torch.device("cpu")
FA2_BLOCK = 256


def attend(
    q_QHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, scale: float, window: tuple[int, int], cap: float
) -> Tensor:
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
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    num_splits: int = 0,
) -> Tensor:
    parts = chunks(q, cu_seqlens_q, max_seqlen_q)
    return sequences(
        parts, (k, v), cache_seqlens, page_table, causal=causal, softmax_scale=softmax_scale,
        window_size=window_size, softcap=softcap,
    )  # fmt: skip


@dataclass
class NewerRelease:
    """FlashAttention 3 of a release that takes our output and its scheduler's metadata.

    plans: what was asked of its scheduler. given: the plan and the output of each call.
    """

    plans: list[dict[str, Any]] = field(default_factory=list)
    given: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def functions(self) -> dict[str, Callable[..., Any]]:

        def with_kvcache(
            q: Tensor, k: Tensor, v: Tensor, *, cache_seqlens: Tensor, page_table: Tensor,
            softmax_scale: float, causal: bool, window_size: tuple[int, int], softcap: float,
            out: Tensor, scheduler_metadata: Tensor, num_splits: int, **options: Any,
        ) -> Tensor:  # fmt: skip
            asked = self.plans[int(scheduler_metadata)]
            assert num_splits == asked["num_splits"] > 0
            assert options["cu_seqlens_q"] is asked["cu_seqlens_q"]
            assert (window_size, causal) == (asked["window_size"], asked["causal"])
            assert bool(softcap) == asked["has_softcap"]
            self.given.append((scheduler_metadata, out))
            return out.copy_(
                fa3_with_kvcache(
                    q, k, v, cache_seqlens=cache_seqlens, page_table=page_table, causal=causal,
                    softmax_scale=softmax_scale, window_size=window_size, softcap=softcap,
                    **options,
                )
            )  # fmt: skip

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


def vllm_functions() -> dict[str, Callable[..., Any]]:
    """vLLM's build: FlashAttention 3 behind the varlen function of version 2."""
    newer = NewerRelease().functions()

    def varlen(
        q: Tensor, k: Tensor, v: Tensor, max_seqlen_q: int, cu_seqlens_q: Tensor,
        max_seqlen_k: int, seqused_k: Tensor, softmax_scale: float, causal: bool,
        window_size: tuple[int, int], softcap: float, block_table: Tensor, out: Tensor,
        scheduler_metadata: Tensor, num_splits: int, fa_version: int = 2,
    ) -> Tensor:  # fmt: skip
        assert fa_version == 3
        assert int(seqused_k.max()) <= max_seqlen_k
        return newer["flash_attn_with_kvcache"](
            q, k, v, cache_seqlens=seqused_k, page_table=block_table, cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q, softmax_scale=softmax_scale, causal=causal, out=out,
            window_size=window_size, softcap=softcap, scheduler_metadata=scheduler_metadata,
            num_splits=num_splits,
        )  # fmt: skip

    return {
        "flash_attn_varlen_func": varlen,
        "get_scheduler_metadata": newer["get_scheduler_metadata"],
        "fa_version_unsupported_reason": lambda version: None,
    }


def fa4_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: Tensor,
    page_table: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int | None, int | None],
    softcap: float,
    num_splits: int = 1,
) -> tuple[Tensor, None]:
    """Splits are for Blackwell alone, and windows without an end None; it returns two things."""
    assert num_splits == 1
    assert max_seqlen_k == page_table.shape[1] * k.shape[1]
    assert -1 not in window_size
    left, right = window_size
    window = (-1, -1) if left is None or right is None else (left, right)
    parts = chunks(q, cu_seqlens_q, max_seqlen_q)
    out = sequences(
        parts, (k, v), seqused_k, page_table, causal=causal, softmax_scale=softmax_scale,
        window_size=window, softcap=softcap,
    )  # fmt: skip
    return out, None


def fa2_with_kvcache(
    q: Tensor, k: Tensor, v: Tensor, *, cache_seqlens: Tensor, block_table: Tensor,
    softmax_scale: float, causal: bool, window_size: tuple[int, int], softcap: float,
) -> Tensor:  # fmt: skip
    assert k.shape[1] % FA2_BLOCK == 0
    assert q.dim() == 4
    assert q.shape[1] == 1
    parts = list(q.unbind())
    return sequences(
        parts, (k, v), cache_seqlens, block_table, causal=causal, softmax_scale=softmax_scale,
        window_size=window_size, softcap=softcap,
    )[:, None]  # fmt: skip


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


FA3, VLLM, FA4, FA2 = (
    "flash_attn_interface",
    "vllm.vllm_flash_attn",
    "flash_attn.cute",
    "flash_attn",
)
MODULES: dict[str, dict[str, Callable[..., Any]]] = {
    FA3: {"flash_attn_with_kvcache": fa3_with_kvcache},
    VLLM: vllm_functions(),
    FA4: {"flash_attn_varlen_func": fa4_varlen},
    FA2: {"flash_attn_with_kvcache": fa2_with_kvcache, "flash_attn_varlen_func": fa2_varlen},
}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have these modules and none of the others; float32 is taken, so that results are exact."""
    monkeypatch.setattr(flash_backend, "DTYPES", (torch.float32,))

    def have(*names: str, namespace: bool = False) -> None:
        """namespace: of flash_attn, if that is none of the names."""
        for name, functions in MODULES.items():
            module = ModuleType(name) if name in names else None
            for function_name, function in functions.items():
                setattr(module, function_name, function) if module else None
            monkeypatch.setitem(sys.modules, name, module)
        for name, is_there in {"vllm": VLLM in names, FA2: namespace}.items():
            if is_there:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))

    return have


@pytest.mark.parametrize(
    ("name", "version", "block_size"), [(FA3, 3, 4), (VLLM, 3, 4), (FA4, 4, 4), (FA2, 2, 256)]
)
@pytest.mark.parametrize("spec", [PLAIN, AttentionSpec(scale=HEAD_DIM**-0.5, softcap=2.0)])
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
    install(name, namespace=name == FA4)
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


@pytest.mark.parametrize("spec", [PLAIN, AttentionSpec(scale=HEAD_DIM**-0.5, softcap=2.0)])
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
    newer = install_newer(install, monkeypatch)
    kernels, scale = FlashKernels(CPU), HEAD_DIM**-0.5
    case, wide = PagedCase([(9, 1), (6, 3)]), PagedCase([(9, 1), (6, 3)], heads=8)
    specs = [PLAIN, AttentionSpec(scale, softcap=2.0)]
    for _ in range(2):
        metadata = case.metadata()
        for spec in (*specs, *specs):
            kernels.paged_attention(torch.cat(case.q), case.cache, metadata, spec)
        kernels.paged_attention(torch.cat(wide.q), wide.cache, metadata, PLAIN)
    used = [int(plan) for plan, _ in newer.given]
    assert used == [0, 1, 0, 1, 2, 3, 4, 3, 4, 5]
    assert [plan["heads"] for plan in newer.plans[1:3]] == [(4, 2, HEAD_DIM), (8, 2, HEAD_DIM)]


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


def test_version_3_is_taken_where_all_are(install: Callable[..., None]) -> None:
    install(*MODULES)
    assert FlashKernels(CPU).version == 3


def test_without_any_it_is_refused_with_a_remedy(install: Callable[..., None]) -> None:
    install()
    with pytest.raises(ValueError, match=r"no usable flash-attn .*pip install '\.\[flash-attn\]'"):
        FlashKernels(CPU)


def test_the_empty_package_around_version_4_is_not_taken_for_version_2(
    install: Callable[..., None],
) -> None:
    install(namespace=True)
    with pytest.raises(ValueError, match="flash_attn: it has no flash_attn_with_kvcache"):
        FlashKernels(CPU)


@pytest.mark.parametrize(
    ("name", "functions", "reason"),
    [
        (FA3, {}, "flash_attn_interface: it has no flash_attn_with_kvcache"),
        (FA4, {"flash_attn_varlen_func": fa2_varlen}, "func takes no causal, page_table, seqused"),
        (
            VLLM,
            vllm_functions() | {"fa_version_unsupported_reason": lambda version: "no FA3 built"},
            "vllm_flash_attn: no FA3 built",
        ),
    ],
)  # fmt: skip
def test_a_build_without_what_is_called_is_refused_with_the_reason(
    install: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    functions: dict[str, Callable[..., Any]],
    reason: str,
) -> None:
    monkeypatch.setitem(MODULES, name, functions)
    install(name)
    with pytest.raises(ValueError, match=reason):
        FlashKernels(CPU)


@pytest.mark.parametrize(
    ("capability", "version"), [((8, 0), 3), ((9, 0), 3), ((10, 0), 4), ((12, 0), 2)]
)
def test_each_gpu_has_a_version_whose_paged_attention_it_runs(
    install: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    version: int,
) -> None:
    install(*MODULES)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    build, module = flash_backend._find(torch.device("cuda"))
    assert (build.version, module.__name__) == (version, build.module)


def test_version_4_alone_is_refused_where_it_has_no_paged_attention(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(FA4, namespace=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(ValueError, match=r"cute: it has no paged attention for .* 8\.9"):
        flash_backend._find(torch.device("cuda"))


DAMAGES = [
    ImportError("undefined symbol: aoti", name="flash_attn_3._C"),
    ImportError("No module named 'cutlass'", name="cutlass"),
    OSError("libcudart.so.12: cannot open shared object file"),
    AttributeError("partially initialized module"),
    SyntaxError("source code cannot contain null bytes"),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: type(damage).__name__)
def test_a_damaged_one_is_told_and_another_one_taken(
    install: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    damage: Exception,
) -> None:
    others: dict[str, ModuleType] = {}

    def find(name: str) -> ModuleType:
        if name == FA3:
            raise damage
        if name not in others:
            raise ImportError(f"No module named {name!r}", name=name)
        return others[name]

    config = make_worker_config(attention_backend="flash", block_size=256)
    install(FA2)
    whole = sys.modules[FA2]
    with monkeypatch.context() as patch:
        patch.setattr(flash_backend.importlib, "import_module", find)
        with pytest.raises(ValueError, match=f"flash_attn_interface: {damage}"):
            FlashKernels(CPU)
        others[FA2] = whole
        assert FlashKernels(CPU).version == 2
    assert f"cannot use flash_attn_interface: {damage}" in caplog.text
    assert make_kernels(config, CPU)


def test_a_damaged_triton_is_told_as_an_error_of_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> ModuleType:
        raise OSError("libtriton.so: file too short")

    monkeypatch.setattr("importlib.import_module", find)
    for backend in ("triton", "flash"):
        config = make_worker_config(attention_backend=backend)
        with pytest.raises(ConfigError, match=f"{backend}: .*triton does not load: libtriton"):
            make_kernels(config, CPU)


def test_heads_that_a_version_cannot_take_are_left_to_our_kernels(
    install: Callable[..., None],
) -> None:
    install(FA4, namespace=True)
    kernels = FlashKernels(CPU)
    kernels._max_head_dim = HEAD_DIM - 1
    case = PagedCase([(9, 1), (6, 3)])
    case.kernels = kernels
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=1e-4, atol=1e-4)


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


def test_windows_are_left_to_our_kernels_which_read_no_block_before_them(
    install: Callable[..., None],
) -> None:
    install(FA3)
    spec = AttentionSpec(scale=HEAD_DIM**-0.5, window=5, softcap=2.0)
    case = PagedCase([(9, 1), (3, 1), (31, 4)], spec=spec, num_padding=2)
    case.kernels = FlashKernels(CPU)
    torch.testing.assert_close(case.run()[:-2].double(), case.expected(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "block_size"), [(FA3, 4), (VLLM, 4), (FA4, 4), (FA2, 256)])
def test_decodes_of_several_tokens_are_the_reference(
    install: Callable[..., None], name: str, block_size: int
) -> None:
    install(name, namespace=name == FA4)
    case = PagedCase([(9, 3), (3, 1), (11, 4), (40, 20)], block_size=block_size, decode_tokens=4)
    assert case.metadata().num_decodes == 3
    case.kernels = FlashKernels(CPU)
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=1e-5, atol=1e-5)


def test_tokens_that_only_the_device_knows_to_be_of_no_sequence_are_zero(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(FA3)
    case = PagedCase([(9, 3), (3, 1)], decode_tokens=4)
    case.kernels = FlashKernels(CPU)
    monkeypatch.setattr(case.kernels, "_one_call", SimpleNamespace(attend=lambda *_: None))
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full(x.shape, -7.0))
    assert not case.run().any()
