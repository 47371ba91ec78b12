"""The stand-in for FlashAttention 3, over a library on a CPU that checks how it is called.

It binds arguments to the schemas that the library of vLLM 0.25.1 registers, as torch does, and
computes with the reference. Where the library itself was carried, its schemas are compared, and
torch binds the same arguments to them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.attention_step import make_metadata
from benchmarks.gpu import fa3
from nanocore.kernels.attention import AttentionMetadata, AttentionSpec, KVCache
from nanocore.kernels.step import GraphSupport
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.kernels.triton import flash_backend
from nanocore.kernels.triton.flash_backend import FlashKernels
from tests.campaign import in_campaign
from tests.fake_device import FakeGraphRecorder, FakeStream
from tests.kernels.paged_case import HEAD_DIM, PLAIN, PagedCase
from tests.tiny_models import make_tiny_qwen3
from tests.worker.device_engine import Engine, expected, load_model, make_wishes

STAND_INS = Path(fa3.__file__).parent / "stand_ins"
CPU = torch.device("cpu")
FWD = (
    "_vllm_fa3_C::fwd(Tensor($0! -> ) q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, "
    "Tensor? q_v, Tensor($1! -> )? out, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
    "int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, "
    "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, "
    "Tensor? k_descale, Tensor? v_descale, float softmax_scale, bool is_causal, "
    "int window_size_left, int window_size_right, float softcap, bool is_rotary_interleaved, "
    "Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, Tensor? s_aux, "
    "int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)
METADATA = (
    "_vllm_fa3_C::get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, "
    "int num_heads, int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, "
    "Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, "
    "Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, bool is_causal, "
    "int window_size_left, int window_size_right, bool has_softcap, int num_splits, "
    "bool? pack_gqa, int sm_margin) -> Tensor"
)
TYPES = {"Tensor": Tensor, "int": int, "float": float, "bool": bool, "ScalarType": torch.dtype}
Arguments = dict[str, Any]


def bind(schema: str, values: Sequence[Any]) -> Arguments:
    """Values by the names of a schema's arguments, whose number and types they have."""
    text = re.sub(r"\(\$\d! -> \)", "", schema)  # what is written to
    declared = re.findall(r"(\w+)(\??) (\w+)[,)]", text)
    assert len(values) == len(declared)
    for (kind, is_optional, name), value in zip(declared, values, strict=True):
        is_right = type(value) is TYPES[kind] or (kind == "Tensor" and isinstance(value, Tensor))
        assert is_right or (is_optional and value is None), (name, kind, value)
    return {name: value for (_, _, name), value in zip(declared, values, strict=True)}


@dataclass
class FakeLibrary:
    """Takes the place of torch.ops._vllm_fa3_C. plans, calls: with which arguments it was asked."""

    plans: list[Arguments] = field(default_factory=list)
    calls: list[Arguments] = field(default_factory=list)

    def get_scheduler_metadata(self, *values: Any) -> Tensor:
        self.plans.append(bind(METADATA, values))
        return torch.tensor([len(self.plans) - 1], dtype=torch.int32)

    def fwd(self, *values: Any) -> list[Tensor]:
        call = bind(FWD, values)
        self.calls.append(call)
        if call["scheduler_metadata"] is not None:
            self._check_plan(call, self.plans[int(call["scheduler_metadata"])])
        given = {"q", "k", "v", "out", "cu_seqlens_q", "seqused_k", "max_seqlen_q", "page_table"}
        given |= {"scheduler_metadata", "softmax_scale", "is_causal", "softcap", "num_splits"}
        given |= {"window_size_left", "window_size_right"}
        others = {name: value for name, value in call.items() if name not in given}
        assert others.pop("is_rotary_interleaved")
        assert {name for name, value in others.items() if value} == {"cp_world_size"}
        assert call["cp_world_size"] == 1
        out = torch.empty_like(call["q"]) if call["out"] is None else call["out"]
        out.copy_(attend(call))
        return [out, torch.empty(0), torch.empty(0), torch.empty(0)]

    def _check_plan(self, call: Arguments, plan: Arguments) -> None:
        """Whether the plan is one for this call: the kernel goes by it without a look."""
        num_seqs, num_columns = call["page_table"].shape
        assert plan["batch_size"] == num_seqs == len(plan["seqused_k"])
        assert plan["max_seqlen_k"] == num_columns * call["k"].shape[1]
        assert plan["page_size"] == call["k"].shape[1]
        assert call["max_seqlen_k"] is None
        _, *heads = call["q"].shape
        assert [plan["num_heads"], plan["headdim"]] == heads
        assert [plan["num_heads_k"], plan["headdim_v"]] == list(call["v"].shape[2:])
        assert plan["qkv_dtype"] == call["q"].dtype
        assert plan["has_softcap"] == (call["softcap"] > 0)
        for name in ("seqused_k", "cu_seqlens_q"):
            assert torch.equal(plan[name], call[name])
        for name in (
            "max_seqlen_q", "is_causal", "window_size_left", "window_size_right", "num_splits",
            "pack_gqa", "sm_margin", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "leftpad_k",
        ):  # fmt: skip
            assert plan[name] == call[name], name
        assert plan["max_seqlen_k_new"] == 0


def attend(call: Arguments) -> Tensor:
    """What the call is to compute, by what is on the device alone; zeros for padding."""
    assert call["is_causal"]
    q_THD, starts = call["q"], call["cu_seqlens_q"].tolist()
    lengths, table_BM = call["seqused_k"].tolist(), call["page_table"]
    assert len(lengths) == len(table_BM) == len(starts) - 1
    assert max(call["cu_seqlens_q"].diff().tolist()) <= call["max_seqlen_q"]
    left, right = call["window_size_left"], call["window_size_right"]
    assert (left < 0) == (right < 0)
    spec = AttentionSpec(call["softmax_scale"], max(0, left + 1), call["softcap"])
    out_THD = torch.zeros_like(q_THD)
    for i, length in enumerate(lengths):
        tokens = slice(starts[i], starts[i + 1])
        if length:
            count = starts[i + 1] - starts[i]
            alone = make_metadata([(length, count)], table_BM[i : i + 1], num_decodes=0)
            cache = KVCache(call["k"], call["v"])
            out_THD[tokens] = TorchKernels().paged_attention(q_THD[tokens], cache, alone, spec)
    return out_THD


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLibrary]:
    """The stand-in is what is installed; float32 is taken, so that results are exact."""
    fake = FakeLibrary()
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", fake, raising=False)
    monkeypatch.setattr(fa3, "load", lambda _: None)
    monkeypatch.setattr(flash_backend, "DTYPES", (torch.float32,))
    monkeypatch.syspath_prepend(str(STAND_INS))
    sys.modules.pop("flash_attn_interface", None)
    yield fake
    sys.modules.pop("flash_attn_interface", None)


SPECS = [PLAIN, AttentionSpec(scale=HEAD_DIM**-0.5, softcap=2.0)]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("seqs", [[(9, 1), (3, 1), (11, 4), (7, 7)], [(300, 1)], [(5, 5)]])
def test_steps_of_decodes_and_chunks_are_the_reference(
    library: FakeLibrary, spec: AttentionSpec, seqs: list[tuple[int, int]]
) -> None:
    case = PagedCase(seqs, block_size=16, spec=spec, num_padding=2)
    case.kernels = FlashKernels(CPU)
    out = case.run()
    torch.testing.assert_close(out[:-2].double(), case.expected(), rtol=1e-5, atol=1e-5)
    assert not out[-2:].any()
    (call,) = library.calls
    assert call["out"].data_ptr() == out.data_ptr()
    assert call["num_splits"] > 0


def test_all_layers_of_a_step_are_given_one_plan(library: FakeLibrary) -> None:
    case, kernels = PagedCase([(9, 1), (6, 3)], block_size=16), FlashKernels(CPU)
    metadata = case.metadata()
    for spec in SPECS * 3:
        kernels.paged_attention(torch.cat(case.q), case.cache, metadata, spec)
    assert len(library.plans) == len(SPECS)
    assert all(call["scheduler_metadata"] is not None for call in library.calls)


class FlashAttention(TorchKernels):
    """The reference, but for attention: that is FlashKernels'."""

    graph_support: GraphSupport = "decodes"

    def __init__(self) -> None:
        self._flash = FlashKernels(CPU)

    def paged_attention(
        self, q_THD: Tensor, cache: KVCache, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        return self._flash.paged_attention(q_THD, cache, metadata, spec)


@pytest.mark.parametrize("has_graphs", [*in_campaign(False), True])
def test_an_engine_gives_the_tokens_of_the_reference(
    library: FakeLibrary, tmp_path: Path, has_graphs: bool
) -> None:
    """Graphs keep the host's values of their recording, and make their plans anew in each step."""
    model = load_model(make_tiny_qwen3(tmp_path, head_dim=16))
    graph_capture = FakeGraphRecorder() if has_graphs else None
    stream = FakeStream(2, graph_capture)
    engine = Engine(model, 2, kernels=FlashAttention(), stream=stream)
    wishes = make_wishes(1, 5, 60, 33, 17, max_tokens=9)
    assert engine.run(wishes) == expected(model, wishes)
    assert len(library.calls) == 3 * len(library.plans), "the model has three layers"
    if graph_capture is not None:
        assert graph_capture.num_replays > 5


@pytest.mark.parametrize("folder", [None, "nowhere"])
def test_without_the_library_it_is_a_module_that_does_not_load(
    monkeypatch: pytest.MonkeyPatch, folder: str | None
) -> None:
    monkeypatch.delenv(fa3.FOLDER_VARIABLE, raising=False)
    if folder:
        monkeypatch.setenv(fa3.FOLDER_VARIABLE, folder)
    monkeypatch.syspath_prepend(str(STAND_INS))
    for name in ("flash_attn_interface", "flash_attn"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ValueError, match=r"flash_attn_interface: NANOCORE\w+=\w*: not carried"):
        FlashKernels(CPU)


def test_the_library_has_the_schemas_and_torch_binds_what_it_is_given() -> None:
    folder = os.environ.get(fa3.FOLDER_VARIABLE)
    if not folder:
        pytest.skip(f"{fa3.FOLDER_VARIABLE} names no folder with the library")
    try:
        fa3.load(Path(folder))
    except OSError as error:
        pytest.skip(f"the library does not load here: {error}")
    operators = torch.ops._vllm_fa3_C
    assert str(operators.fwd.default._schema) == FWD
    assert str(operators.get_scheduler_metadata.default._schema) == METADATA
    case = PagedCase([(9, 1), (6, 3)], block_size=16)
    step = case.metadata()
    heads, num_columns = (case.heads, case.kv_heads, HEAD_DIM), case.block_table.shape[1]
    # Both have kernels for CUDA alone: tensors of a CPU get as far as that.
    with pytest.raises(NotImplementedError, match="from the 'CPU' backend"):
        fa3.scheduler_metadata(
            step.seq_lens_B, step.query_start_A, 3, 16 * num_columns, heads=heads, page_size=16,
            dtype=torch.bfloat16, num_splits=32, window=(4, 0), has_softcap=True,
        )  # fmt: skip
    q_THD = torch.cat(case.q)
    with pytest.raises(NotImplementedError, match="from the 'CPU' backend"):
        fa3.attention(
            q_THD, case.cache.k_NSKD, case.cache.v_NSKD, step.query_start_A, 3, None,
            scale=0.25, seq_lens_B=step.seq_lens_B, block_table_BM=case.block_table,
            num_splits=32, window=(4, 0), softcap=2.0, out_THD=torch.empty_like(q_THD),
            plan=torch.zeros(9, dtype=torch.int32),
        )  # fmt: skip
