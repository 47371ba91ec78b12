"""Peers take turns with our engine where they were carried, and are recorded where not."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.attention_step import make_metadata
from benchmarks.gpu import carry_vllm, fa3
from benchmarks.gpu.results import Records
from benchmarks.peer_process import PeerCommand, PeerError, PeerProcess
from benchmarks.workloads import BenchmarkRequest
from nanocore.kernels.attention import AttentionSpec, KVCache
from nanocore.kernels.torch.backend import TorchKernels
from tests.kernels.paged_case import PagedCase

pytestmark = pytest.mark.campaign

ROOT = Path(__file__).parents[2]

FAKE_MODEL_RUNNER = """
def load_model(model, folder):
    raise AssertionError("weights are not read from files")
"""
FAKE_NANO_VLLM = """
import os
import sys
from dataclasses import dataclass
import torch
from transformers import AutoTokenizer
from nanovllm.engine import model_runner


@dataclass
class SamplingParams:
    temperature: float
    max_tokens: int
    ignore_eos: bool


class LLM:
    def __init__(self, folder, *, enforce_eager, max_model_len, max_num_batched_tokens,
                 gpu_memory_utilization):
        model = torch.nn.Linear(4, 4)
        model_runner.load_model(model, folder)
        assert model.weight.isfinite().all()
        assert AutoTokenizer.from_pretrained(folder, use_fast=True).eos_token_id == 1
        assert os.environ["NANOCORE_GPU_BENCHMARK_CARRIED"]
        assert any(path.endswith("/stand_ins") for path in sys.path)

    def generate(self, prompts, params, use_tqdm):
        return [{"text": "", "token_ids": [1] * p.max_tokens} for p in params]
"""
FAKE_VLLM = """
from dataclasses import dataclass

__version__ = "fake"


@dataclass
class SamplingParams:
    temperature: float
    ignore_eos: bool
    max_tokens: int
    detokenize: bool
    output_kind: str
"""
FAKE_SAMPLING_PARAMS = """
class RequestOutputKind:
    CUMULATIVE, FINAL_ONLY = "cumulative", "final"
"""
FAKE_ENGINE = """
import os
from types import SimpleNamespace


class LLMEngine:
    @classmethod
    def from_engine_args(cls, args, enable_multiprocessing):
        assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
        assert args.pop("load_format") == "dummy"
        self = cls()
        self.is_on_gpu = "gpu_memory_utilization" in args
        assert args["enable_prefix_caching"] is not self.is_on_gpu
        compilation = SimpleNamespace(**args.get("compilation_config", {}))
        if self.is_on_gpu:
            assert args["gpu_memory_utilization"] == 0.44
            assert args["attention_config"]["flash_attn_version"] == 3
            chosen = args["compilation_config"] or {"mode": 3, "cudagraph_mode": "DEFAULT"}
            mode = {0: "NONE", 3: "VLLM_COMPILE"}[chosen["mode"]]
            compilation.mode = SimpleNamespace(name=mode)
            compilation.cudagraph_mode = SimpleNamespace(name=chosen["cudagraph_mode"])
            for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
                assert "/nanocore-vllm-" in os.environ[name]
        self.vllm_config = SimpleNamespace(
            compilation_config=compilation,
            scheduler_config=SimpleNamespace(async_scheduling=True),
            cache_config=SimpleNamespace(num_gpu_blocks=7),
        )
        self.requests = {}
        return self

    def add_request(self, request_id, prompt, params):
        assert params.temperature == 0.6
        assert prompt["prompt_token_ids"]
        assert params.output_kind == ("final" if self.is_on_gpu else "cumulative")
        self.requests[request_id] = params.max_tokens

    def has_unfinished_requests(self):
        return bool(self.requests)

    def step(self):
        request_id, max_tokens = self.requests.popitem()
        output = SimpleNamespace(token_ids=[1] * max_tokens)
        return [SimpleNamespace(request_id=request_id, finished=True, outputs=[output])]
"""


def carry_fake_vllm(folder: Path) -> None:
    package = folder / "vllm"
    for name, text in {
        "": FAKE_VLLM, "sampling_params": FAKE_SAMPLING_PARAMS, "engine": "", "v1": "",
        "engine/arg_utils": "EngineArgs = dict", "v1/engine": "",
        "v1/engine/llm_engine": FAKE_ENGINE,
    }.items():  # fmt: skip
        path = package / name / "__init__.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (folder / carry_vllm.SITE).mkdir()
    for number, what in enumerate(carry_vllm.NAMES):
        (folder / f"{carry_vllm.LIBRARY}.{what}").write_bytes(bytes([number]))


def carry_fakes(folder: Path) -> None:
    carry_fake_vllm(folder)
    package = folder / "nano-vllm" / "nanovllm"
    (package / "engine").mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE_NANO_VLLM)
    (package / "engine" / "__init__.py").write_text("")
    (package / "engine" / "model_runner.py").write_text(FAKE_MODEL_RUNNER)


def run_part(part: str, folder: Path, *flags: str) -> Records:
    command = [sys.executable, "-m", "benchmarks.gpu.part", part, "--device", "cpu", "--small"]
    folders = ["--carried", str(folder / "carried"), "--out", str(folder)]
    subprocess.run([*command, *folders, *flags], cwd=ROOT, check=True, timeout=110)
    return Records("rehearsal.jsonl", (folder,))


@pytest.mark.parametrize("peer", ["nano-vllm", "transformers", "vllm", "vllm-inductor"])
def test_a_peer_takes_turns_with_ours(peer: str, tmp_path: Path) -> None:
    carry_fakes(tmp_path / "carried")
    found = run_part(peer, tmp_path)
    assert found.errors == {}
    figures = found.figures[f"{peer}/tiny"]
    assert len(figures["times_slower_than_ours"]["values"]) == 2
    for engine in ("nanocore", peer):
        assert figures[engine]["output_tokens_per_s"]["min"] > 0
        assert figures[engine]["versions"]


@pytest.mark.parametrize(
    ("flags", "compilation", "graphs"),
    [([], "NONE", "FULL_DECODE_ONLY"), (["--inductor"], "VLLM_COMPILE", "DEFAULT")],
    ids=["plain", "inductor"],
)
def test_vllm_runs_on_a_gpu_with_graphs_and_compiles_if_it_is_told_to(
    flags: list[str], compilation: str, graphs: str, tmp_path: Path
) -> None:
    """Its driver by itself: what it asks of a fake engine, and what it says of it."""
    carry_fake_vllm(tmp_path)
    driver = [sys.executable, str(ROOT / "benchmarks" / "peers" / "vllm_driver.py")]
    model = ["--model", "folder", "--temperature", "0.6", "--device", "cuda", "--random-weights"]
    command = [*driver, *model, "--memory-share", "0.44", *flags]
    vllm = PeerCommand("vllm", command, {"PYTHONPATH": str(tmp_path)})
    with PeerProcess(vllm, tmp_path / "log") as peer:
        ready = peer.wait_ready(60)
        run = peer.run([BenchmarkRequest((1, 2), 3), BenchmarkRequest((3,), 1)], 60)
    assert ready["settings"] == {
        "dtype": "bfloat16", "compilation": compilation, "cudagraph_mode": graphs,
        "async_scheduling": True, "num_gpu_blocks": 7,
    }  # fmt: skip
    assert run.num_output_tokens == [3, 1]
    assert run.ttft_s == [], "tokens are not timed"


def test_of_a_peer_that_is_too_slow_our_rounds_are_kept(tmp_path: Path) -> None:
    """It answers the short round that warms up, and no other one."""
    carry_fakes(tmp_path / "carried")
    package = tmp_path / "carried" / "nano-vllm" / "nanovllm" / "__init__.py"
    waits = "        if params[0].max_tokens > 8: __import__('threading').Event().wait()\n"
    head, mark, tail = package.read_text().partition("        return [{")
    package.write_text(head + waits + mark + tail)
    found = run_part("nano-vllm", tmp_path, "--limit-s", "40")
    figures = found.figures["nano-vllm/tiny"]
    assert figures["nanocore"]["output_tokens_per_s"]["min"] > 0
    assert figures["nano-vllm"]["more_than_s"] > 0
    assert "times_slower_than_ours" not in figures
    assert found.figures["nano-vllm/tiny/nanocore/round 0"]["wall_s"] > 0
    assert found.figures["nano-vllm/tiny/nano-vllm/round 0"].keys() == {"more_than_s", "commit"}


def test_a_peer_that_fails_is_told_with_its_log(tmp_path: Path) -> None:
    assert run_part("nano-vllm", tmp_path).skipped == {"nano-vllm/tiny": "not carried: nano-vllm"}
    assert "not carried: vllm-site" in run_part("vllm", tmp_path).skipped.values()
    package = tmp_path / "carried" / "nano-vllm" / "nanovllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('no device')")
    assert "no device" in run_part("nano-vllm", tmp_path).errors["nano-vllm/tiny"]


def test_a_peer_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    silent = PeerCommand("silent", [sys.executable, "-c", "import time; time.sleep(1000)"])
    with PeerProcess(silent, tmp_path / "log") as peer:
        with pytest.raises(PeerError, match="no answer in 0 s"):
            peer.wait_ready(0.2)
        peer._process.kill()


def attend(
    q_THD: Tensor, k: Tensor, v: Tensor, query_start_A: Tensor, max_query: int, max_context: int,
    *, scale: float, seq_lens_B: Tensor | None = None, block_table_BM: Tensor | None = None,
    key_start_A: Tensor | None = None, num_splits: int = 0,
) -> Tensor:  # fmt: skip
    """What FlashAttention 3 computes, by our reference; of its arguments those that count."""
    if key_start_A is not None:  # as a cache in which each prompt is a block
        lengths = key_start_A.diff().to(torch.int32)
        pages = [torch.zeros(len(lengths), 32, *x.shape[1:]) for x in (k, v)]
        for row, (begin, end) in enumerate(pairwise(key_start_A.tolist())):
            pages[0][row, : end - begin], pages[1][row, : end - begin] = k[begin:end], v[begin:end]
        (k, v), seq_lens_B = pages, lengths
        block_table_BM = torch.arange(len(lengths), dtype=torch.int32)[:, None]
    assert seq_lens_B is not None
    assert block_table_BM is not None
    counts = query_start_A.diff().tolist()
    assert max_query == max(counts)
    assert max_context >= int(seq_lens_B.max())
    num_decodes = len(counts) if max_query == 1 else 0
    seqs = list(zip(seq_lens_B.tolist(), counts, strict=True))
    metadata = make_metadata(seqs, block_table_BM, num_decodes=num_decodes)
    kernels = TorchKernels()
    return kernels.paged_attention(q_THD, KVCache(k, v), metadata, AttentionSpec(scale=scale))


def test_the_stand_in_attends_as_flash_attn_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts with K and V of their own and from the cache, and decodes from the cache."""
    monkeypatch.setenv(fa3.FOLDER_VARIABLE, "carried")
    monkeypatch.setattr(fa3, "load", lambda _: True)
    monkeypatch.setattr(fa3, "attention", attend)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu" / "stand_ins"))
    import flash_attn

    case = PagedCase([(7, 7), (21, 21), (4, 4)], block_size=16)
    starts = torch.tensor([0, 7, 28, 32], dtype=torch.int32)
    k, v, q = torch.cat(case.k), torch.cat(case.v), torch.cat(case.q)
    scale = case.spec.scale
    out = flash_attn.flash_attn_varlen_func(
        q, k, v, max_seqlen_q=21, cu_seqlens_q=starts, max_seqlen_k=21, cu_seqlens_k=starts,
        softmax_scale=scale, causal=True, block_table=None,
    )  # fmt: skip
    torch.testing.assert_close(out.double(), case.expected(), atol=1e-5, rtol=1e-5)

    decodes = PagedCase([(7, 1), (21, 1)], block_size=16)
    expected = decodes.run()
    out = flash_attn.flash_attn_with_kvcache(
        torch.cat(decodes.q)[:, None], decodes.cache.k_NSKD, decodes.cache.v_NSKD,
        cache_seqlens=torch.tensor([7, 21], dtype=torch.int32), block_table=decodes.block_table,
        softmax_scale=scale, causal=True,
    )  # fmt: skip
    assert out.shape == (2, 1, *expected.shape[1:])
    torch.testing.assert_close(out[:, 0], expected)
    assert not math.isnan(float(out.sum()))
