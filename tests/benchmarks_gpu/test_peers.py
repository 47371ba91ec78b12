"""Peers take turns with our engine where they were carried, and are recorded where not."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peer_process import PeerCommand, PeerError, PeerProcess
from tests.kernels.paged_case import PagedCase

pytestmark = pytest.mark.campaign

Report = Callable[[str], dict[str, Any]]

FAKE_MODEL_RUNNER = """
def load_model(model, folder):
    raise AssertionError("weights are not read from files")
"""
FAKE_NANO_VLLM = """
import os
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
        assert os.environ["NANOCORE_STAND_IN_ATTENTION"] == "triton"
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    def generate(self, prompts, params, use_tqdm):
        return [{"text": "", "token_ids": [1] * p.max_tokens} for p in params]
"""
FAKE_VLLM = """
from dataclasses import dataclass
__version__ = "0.25.1"
import xgrammar


@dataclass
class SamplingParams:
    temperature: float
    ignore_eos: bool
    max_tokens: int
    detokenize: bool


@dataclass
class Output:
    outputs: list
    token_ids: list = ()


class LLM:
    def __init__(self, model, load_format, skip_tokenizer_init, attention_backend, **others):
        assert load_format == "dummy"

    def generate(self, prompts, params, use_tqdm):
        assert all(list(prompt) == ["prompt_token_ids"] for prompt in prompts)
        return [Output([Output([], [1] * p.max_tokens)]) for p in params]
"""


def carry_fakes(folder: Path) -> None:
    package = folder / "nano-vllm" / "nanovllm"
    (package / "engine").mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE_NANO_VLLM)
    (package / "engine" / "__init__.py").write_text("")
    (package / "engine" / "model_runner.py").write_text(FAKE_MODEL_RUNNER)
    (folder / "vllm-site" / "vllm").mkdir(parents=True)
    (folder / "vllm-site" / "vllm" / "__init__.py").write_text(FAKE_VLLM)


def test_peers_that_were_carried_take_turns_with_ours(
    run_driver: Any, report: Report, tmp_path: Path
) -> None:
    carried = tmp_path / "carried"
    carry_fakes(carried)
    run_driver("peers", "--carried", str(carried), "--only", "tiny/nano-vllm,tiny/vllm")
    found = report("peers")
    assert found["errors"] == {}
    assert found["skipped"] == {"tiny/nano-vllm, FA3": "not carried: fa3.so.xz"}
    for name in ("tiny/nano-vllm, our attention", "tiny/vllm, FA3", "tiny/vllm, Triton"):
        figures = found["measurements"][name]
        peer = name.removeprefix("tiny/")
        assert figures["engines"].keys() == {"nanocore", peer}
        assert len(figures["times_slower_than_ours"]["values"]) == 2
        assert all(e["output_tokens_per_s"]["min"] > 0 for e in figures["engines"].values())


def test_a_peer_that_fails_costs_only_itself(
    run_driver: Any, report: Report, tmp_path: Path
) -> None:
    carried = tmp_path / "carried"
    (carried / "vllm-site" / "vllm").mkdir(parents=True)
    (carried / "vllm-site" / "vllm" / "__init__.py").write_text("raise RuntimeError('no device')")
    run_driver("peers", "--carried", str(carried), "--only", "tiny/vllm,tiny/nano")
    found = report("peers")
    assert "no device" in found["errors"]["tiny/vllm, FA3"]
    assert all(reason.startswith("not carried") for reason in found["skipped"].values())
    assert "tiny/nano-vllm, our attention" in found["skipped"]


def test_a_peer_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    silent = PeerCommand("silent", [sys.executable, "-c", "import time; time.sleep(1000)"])
    with PeerProcess(silent, tmp_path / "log") as peer:
        with pytest.raises(PeerError, match="no answer in 0 s"):
            peer.wait_ready(0.2)
        peer._process.kill()


def test_the_stand_in_attends_as_flash_attn_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts with K and V of their own and from the cache, and decodes from the cache."""
    stand_ins = Path(__file__).parents[2] / "benchmarks" / "gpu" / "stand_ins" / "nano_vllm"
    monkeypatch.syspath_prepend(str(stand_ins))
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
