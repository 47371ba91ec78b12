"""Nothing is compiled while requests are served: every kernel was launched so at the start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from nanocore.kernels.kv_quantization import kv_cache_format
from nanocore.kernels.triton.triton_backend import TritonKernels
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.rank_messages import Quantization
from nanocore.worker.sampling.sampler import TokenSampler
from nanocore.worker.step import step_graphs
from nanocore.worker.worker import run_largest_steps
from tests.campaign import in_campaign
from tests.fake_device import FakeGraphRecorder
from tests.model_families import BUILDERS
from tests.tiny_models import make_tiny_qwen3
from tests.worker import device_engine
from tests.worker.configs import make_worker_config
from tests.worker.device_engine import Engine, Wish, load_model

MAX_NUM_SEQS, BUDGET, LONGEST = 150, 400, 96
VOCAB_SIZE = 384
CPU = torch.device("cpu")


class Compiler:
    """Takes the place of Triton's, and of the device: kernels are noted and not run.

    compiled: of each what a compiler would know it by.
    """

    def __init__(self) -> None:
        self.compiled: set[tuple[object, ...]] = set()

    def run(
        self, kernel: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **constants: Any
    ) -> None:
        names = kernel.arg_names[: len(args)]
        kinds = [self._kind(kernel, *pair) for pair in zip(names, args, strict=True)]
        self.compiled.add((kernel.__name__, *kinds, *sorted(constants.items())))

    def _kind(self, kernel: InterpretedFunction, name: str, value: object) -> object:
        if name in (kernel.kwargs["do_not_specialize"] or ()):
            return name
        is_any_place = name in (kernel.kwargs["do_not_specialize_on_alignment"] or ())
        if isinstance(value, Tensor):
            return name, value.dtype, is_any_place or value.data_ptr() % 16 == 0
        if isinstance(value, int) and not isinstance(value, bool):
            return name, value == 1, is_any_place or value % 16 == 0
        return name, None if isinstance(value, float) else value


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    compiler = Compiler()
    monkeypatch.setattr(
        InterpretedFunction, "run", lambda kernel, *args, **kw: compiler.run(kernel, *args, **kw)
    )
    # Nothing is computed: every token is 0, and no memory that is read as one is left as it was.
    plain, processed = TokenSampler.sample_plain, TokenSampler.sample_processed

    def sample_plain(sampler: TokenSampler, *args: Any, **more: Any) -> Tensor:
        return plain(sampler, *args, **more).zero_()

    def sample_processed(sampler: TokenSampler, *args: Any, **more: Any) -> Tensor:
        return processed(sampler, *args, **more).zero_()

    monkeypatch.setattr(TokenSampler, "sample_plain", sample_plain)
    monkeypatch.setattr(TokenSampler, "sample_processed", sample_processed)
    monkeypatch.setattr(device_engine, "MAX_NUM_SEQS", MAX_NUM_SEQS)
    return compiler


def wishes() -> list[Wish]:
    """Steps of one decode up to many, of chunks alone and beside decodes, with all filters and with
    masks."""
    samplings = [
        EngineSamplingParams(temperature=heat, top_k=top_k, top_p=top_p)
        for heat, top_k, top_p in ((0.0, 0, 1.0), (0.8, 0, 1.0), (1.0, 20, 1.0), (1.0, 0, 0.9))
    ]
    return [
        Wish(
            [1] * (1 + 13 * i % 80),
            2 + i % 11,
            samplings[i % len(samplings)],
            allowed=None if i % 3 else lambda _: np.ones(VOCAB_SIZE, bool),
        )
        for i in range(MAX_NUM_SEQS)
    ]


def plain_wishes(temperature: float, is_masked: bool) -> list[Wish]:
    """Requests that all sample so, and none with filters."""
    sampling = EngineSamplingParams(temperature=temperature)
    allowed = (lambda _: np.ones(VOCAB_SIZE, bool)) if is_masked else None
    return [Wish([1] * 5, 3, sampling, allowed=allowed) for _ in range(3)]


@pytest.mark.parametrize(
    ("has_graphs", "batch_invariant"), [(True, False), *in_campaign((False, False), (False, True))]
)
@pytest.mark.parametrize(
    ("family", "quantization"), [("qwen3", None), ("qwen3", "int8"), ("qwen2_moe", None)]
)
def test_what_requests_need_was_compiled_at_the_start(
    tmp_path: Path,
    compiler: Compiler,
    has_graphs: bool,
    family: str,
    quantization: Quantization | None,
    batch_invariant: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_graphs, "MIXED_TOKENS", (200, 300))
    folder = make_tiny_qwen3(tmp_path) if family == "qwen3" else BUILDERS[family](tmp_path)
    model = load_model(folder, dtype=torch.float16, quantization=quantization)
    kernels = TritonKernels(CPU, batch_invariant)
    graph_capture = FakeGraphRecorder() if has_graphs else None
    engine = Engine(model, 2, graph_capture, num_blocks=2000, budget=BUDGET, kernels=kernels)
    start = make_worker_config(
        folder=str(folder),
        max_model_len=LONGEST,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=BUDGET,
        block_size=device_engine.BLOCK_SIZE,
    )
    run_largest_steps(engine.runner, kv_cache_format("auto", torch.float16), start)
    engine.allocate()
    before = set(compiler.compiled)
    engine.run(wishes())
    assert compiler.compiled - before == set()
    for temperature in (0.0, 0.8):
        for is_masked in (False, True):
            engine = Engine(
                model, 2, graph_capture, num_blocks=2000, budget=BUDGET, kernels=kernels
            )
            engine.run(plain_wishes(temperature, is_masked))
            assert compiler.compiled - before == set()
