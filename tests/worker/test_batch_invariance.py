"""A request's logits are the same bits whatever else runs, and however its tokens are computed.

The real scheduler drives the real model runner over a pool of requests: each alone, all at once, in
chunks of any size, after another request filled the blocks of their common prefix, and preempted
and resumed. Logits of each token of each request are compared bit for bit. The torch backend, whose
products depend on the shapes of the batch, differs in the same comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanocore.engine_core.process.cache_size import cache_groups
from nanocore.kernels.cpu.cpu_backend import CpuKernels
from nanocore.kernels.interface import Kernels
from nanocore.kernels.kv_quantization import kv_cache_format
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.protocol.errors import ConfigError
from nanocore.worker.communication.communicator import SingleRank
from nanocore.worker.dry_run import dry_run
from nanocore.worker.layers.decoder import fill_and_pack
from nanocore.worker.loading.loader import load_weights
from nanocore.worker.memory.kv_groups import joined_groups
from nanocore.worker.memory.kv_memory import KVLayout
from nanocore.worker.models import build_model, load_model_config
from nanocore.worker.placement import Placement
from nanocore.worker.plan import SchedulerOutput
from nanocore.worker.rank_messages import KVCacheDtype, Quantization
from nanocore.worker.step.model_runner import ModelRunner
from nanocore.worker.worker import Worker
from tests.campaign import examples, in_campaign
from tests.fakes import Deliveries, make_request, make_scheduler
from tests.kernels.cpu_case import runnable_libraries
from tests.model_families import BUILDERS, make_tiny
from tests.tiny_models import MAX_MODEL_LEN, make_tiny_qwen3
from tests.worker.configs import make_worker_config
from tests.worker.running import record_logits, record_steps

BLOCK_SIZE = 16
NUM_REQUESTS = 65
NUM_TOKENS = 4
PLENTY_OF_BLOCKS = 700

Logits = dict[tuple[int, int], Tensor]
"""Of a request's token at a position: what it was sampled from, float32 [V]."""


def make_prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    lengths = [1, 2, 15, 16, 17, 31, 63, 64, 65, 130, *rng.integers(1, 150, NUM_REQUESTS - 10)]
    prompts = [rng.integers(0, 256, n).tolist() for n in lengths]
    for prompt, first_token in zip(prompts, range(NUM_REQUESTS), strict=True):
        prompt[0] = first_token
    for i in range(12, NUM_REQUESTS, 4):  # two blocks and a part of the third
        prompts[i] = [*prompts[9][:40], *prompts[i]]
    return prompts


PROMPTS = make_prompts()


@dataclass(frozen=True)
class Setting:
    """How the engine runs. at_once: how many requests wait or run at a time."""

    at_once: int = NUM_REQUESTS
    max_num_seqs: int = NUM_REQUESTS
    max_num_batched_tokens: int = 512
    num_blocks: int = PLENTY_OF_BLOCKS
    block_size: int = BLOCK_SIZE
    has_prefix_caching: bool = False
    is_replayed: bool = True


@dataclass(frozen=True)
class Outcome:
    """What was said, and what happened meanwhile."""

    logits: Logits
    num_preemptions: int
    num_cached_tokens: int


class Engine:
    """A loaded model on one rank, to be run in many settings."""

    def __init__(
        self,
        folder: Path,
        kernels: Kernels,
        dtype: torch.dtype,
        quantization: Quantization | None,
        kv_cache: KVCacheDtype = "auto",
    ) -> None:
        placement = Placement(dtype, torch.device("cpu"), SingleRank(), 0, 1)
        model = build_model(load_model_config(folder), placement)
        names = model.entry_name
        self.runner = ModelRunner(model, kernels)
        fill_and_pack(model, kernels, lambda e: load_weights(folder, e, names), quantization)
        self.dtype, self.kv_cache = dtype, kv_cache
        self.alone = cache(lambda: self.run(Setting(at_once=1, max_num_batched_tokens=1024)))

    def run(self, setting: Setting, requests: Sequence[int] = range(NUM_REQUESTS)) -> Outcome:
        kv_format = kv_cache_format(self.kv_cache, self.dtype)
        layout = KVLayout(self.runner.model.cache_specs, kv_format, setting.block_size)
        groups = joined_groups([layout.groups])
        self.runner.allocate(
            kv_format,
            setting.num_blocks,
            setting.block_size,
            setting.max_num_seqs,
            MAX_MODEL_LEN,
            groups,
        )
        if setting.is_replayed:
            self.runner.capture(setting.max_num_batched_tokens)
        scheduler, _ = make_scheduler(
            num_blocks=setting.num_blocks,
            cache_groups=cache_groups(groups, setting.block_size),
            block_size=setting.block_size,
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=setting.has_prefix_caching,
        )
        said, waiting, deliveries = Recorder(self.runner), list(requests), Deliveries()
        while waiting or scheduler.num_requests:
            while waiting and scheduler.num_requests < setting.at_once:
                request = make_request(
                    waiting[0],
                    PROMPTS[waiting.pop(0)],
                    NUM_TOKENS,
                    block_size=setting.block_size,
                    max_model_len=MAX_MODEL_LEN,
                )
                request.sampling = msgspec.structs.replace(request.sampling, temperature=0.0)
                scheduler.add(request)
            deliveries.take(scheduler, said.execute(scheduler.schedule()))
        assert said.logits.keys() == {
            (i, len(PROMPTS[i]) + t) for i in requests for t in range(NUM_TOKENS)
        }
        num_cached = sum(deliveries.num_cached.values())
        return Outcome(said.logits, scheduler.counters.num_preemptions, num_cached)


class Recorder:
    """Runs plans and keeps the logits of every sampled token."""

    def __init__(self, runner: ModelRunner) -> None:
        self.logits: Logits = {}
        self._runner = runner
        self._requests: dict[int, int] = {}
        self._steps = record_steps(runner.batch)
        self._sampled: list[Tensor] = []
        assert runner.sampler is not None
        record_logits(runner.sampler, self._sampled)

    def execute(self, plan: SchedulerOutput):  # type: ignore[no-untyped-def]
        for new in plan.added:
            token_ids = np.frombuffer(new.token_ids, "<i4").tolist()
            fits = [i for i, prompt in enumerate(PROMPTS) if token_ids[: len(prompt)] == prompt]
            self._requests[new.row] = max(fits, key=lambda i: len(PROMPTS[i]))
        result = self._runner.execute(plan)
        for step, logits_RV in zip(self._steps, self._sampled, strict=False):
            for i, (row, position) in enumerate(
                zip(step.sample_rows.tolist(), step.sample_positions.tolist(), strict=True)
            ):
                key = self._requests[row], position
                assert key not in self.logits
                self.logits[key] = logits_RV[i]
        self._steps.clear()
        self._sampled.clear()
        return result


def num_different(actual: Outcome, expected: Outcome) -> int:
    return sum(
        not torch.equal(logits_V.view(torch.int32), expected.logits[key].view(torch.int32))
        for key, logits_V in actual.logits.items()
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.dtype], Path]:
    """A tiny model of either dtype, whose heads are whole vectors."""

    @cache
    def make(dtype: torch.dtype) -> Path:
        folder = tmp_path_factory.mktemp("model")
        return make_tiny_qwen3(folder, dtype=dtype, head_dim=32, tied=dtype == torch.bfloat16)

    return make


Kind = tuple[str, torch.dtype, Quantization | None, KVCacheDtype]
"""An instruction set, what the model's weights and activations are, and its KV cache."""

BEST, *OTHERS = list(runnable_libraries()) or [None]
DTYPES = torch.bfloat16, torch.float32
KINDS: list[Any] = [
    *((BEST, dtype, kind, "auto") for dtype in DTYPES for kind in (None, "int4")),
    *((other, torch.bfloat16, None, "auto") for other in OTHERS),
    (BEST, torch.bfloat16, None, "int8"),
    *in_campaign(((BEST, torch.float32, None, "int8"),)),
    *in_campaign(*(((BEST, dtype, "int8", "auto"),) for dtype in DTYPES)),
    *in_campaign(*(((other, torch.bfloat16, None, "int8"),) for other in OTHERS)),
]


@pytest.fixture(
    scope="module", params=KINDS, ids=lambda kind: "-".join(map(str, kind)).replace("torch.", "")
)
def engine(request: pytest.FixtureRequest, folders: Callable[[torch.dtype], Path]) -> Engine:
    kind: Kind = request.param
    name, *rest = kind
    if name is None:
        pytest.skip("nanocore was installed without a C++ compiler")
    kernels = CpuKernels(runnable_libraries()[name])
    return Engine(folders(kind[1]), kernels, *rest)


def test_among_64_others(engine: Engine) -> None:
    outcome = engine.run(Setting())
    assert num_different(outcome, engine.alone()) == 0


@pytest.mark.parametrize("budget", [*in_campaign(66), 79])
def test_in_chunks(engine: Engine, budget: int) -> None:
    outcome = engine.run(Setting(max_num_batched_tokens=budget))
    assert num_different(outcome, engine.alone()) == 0


@pytest.mark.parametrize("budget", [7, *in_campaign(1, 33)])
def test_in_small_chunks(engine: Engine, budget: int) -> None:
    setting = Setting(at_once=2, max_num_seqs=min(2, budget), max_num_batched_tokens=budget)
    outcome = engine.run(setting, range(8, 20))
    assert num_different(outcome, engine.alone()) == 0


@pytest.mark.parametrize("at_once", [*in_campaign(1), 5])
def test_after_another_request_filled_the_prefix(engine: Engine, at_once: int) -> None:
    outcome = engine.run(Setting(at_once=at_once, has_prefix_caching=True))
    assert outcome.num_cached_tokens > 200
    assert num_different(outcome, engine.alone()) == 0


@pytest.mark.parametrize("block_size", [*in_campaign(32), 64])
def test_in_blocks_of_another_size(engine: Engine, block_size: int) -> None:
    outcome = engine.run(Setting(max_num_batched_tokens=79, block_size=block_size))
    assert num_different(outcome, engine.alone()) == 0


@pytest.mark.parametrize("has_prefix_caching", [*in_campaign(False), True])
def test_preempted_and_resumed(engine: Engine, has_prefix_caching: bool) -> None:
    setting = Setting(num_blocks=30, has_prefix_caching=has_prefix_caching)
    outcome = engine.run(setting)
    assert outcome.num_preemptions > 3
    assert num_different(outcome, engine.alone()) == 0


workloads = st.builds(
    Setting,
    at_once=st.integers(1, NUM_REQUESTS),
    max_num_seqs=st.integers(1, 20),
    max_num_batched_tokens=st.integers(20, 200),
    num_blocks=st.integers(13, 80),  # at least those of the longest request
    has_prefix_caching=st.booleans(),
    is_replayed=st.booleans(),
)


@settings(max_examples=examples(4), deadline=None, derandomize=True)
@given(setting=workloads, requests=st.permutations(range(NUM_REQUESTS)))
def test_in_any_order_and_any_size_of_engine(
    engine: Engine, setting: Setting, requests: list[int]
) -> None:
    outcome = engine.run(setting, requests[:30])
    assert num_different(outcome, engine.alone()) == 0


def test_replayed_or_kernel_by_kernel(engine: Engine) -> None:
    outcome = engine.run(Setting(is_replayed=False))
    assert not engine.runner.is_captured
    assert num_different(outcome, engine.alone()) == 0
    engine.run(Setting(), [0])
    assert engine.runner.is_captured


@pytest.mark.parametrize("family", ["gpt2", "olmo2_ungrouped"])
def test_families_whose_layers_call_torch_between_kernels(family: str, tmp_path: Path) -> None:
    """Norms of rows, sums and copies: what torch computes in one way for any number of rows."""
    if BEST is None:
        pytest.skip("nanocore was installed without a C++ compiler")
    kernels = CpuKernels(runnable_libraries()[BEST])
    engine = Engine(BUILDERS[family](tmp_path), kernels, torch.float32, None)
    outcome = engine.run(Setting(max_num_batched_tokens=79), range(8, 24))
    assert not engine.runner.is_captured
    assert num_different(outcome, engine.run(Setting(at_once=1), range(8, 24))) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("family", "few"), [("qwen35", 10), *in_campaign(("lfm2", 13))])
def test_with_states(family: str, few: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """From whatever block a request goes on, and at whatever tokens its prompt is cut."""
    if BEST is None:
        pytest.skip("nanocore was installed without a C++ compiler")
    kernels = CpuKernels(runnable_libraries()[BEST])
    engine = Engine(BUILDERS[family](tmp_path), kernels, dtype, None)
    alone = engine.run(Setting(at_once=1, max_num_batched_tokens=1024))
    assert engine.runner.is_captured
    for setting in (
        Setting(),
        Setting(max_num_batched_tokens=79),
        Setting(max_num_batched_tokens=7, max_num_seqs=2),
        Setting(is_replayed=False, has_prefix_caching=True),
        Setting(num_blocks=few, has_prefix_caching=True),
        Setting(at_once=5, block_size=32, has_prefix_caching=True),
    ):
        outcome = engine.run(setting)
        assert num_different(outcome, alone) == 0
        assert (outcome.num_cached_tokens > 200) == setting.has_prefix_caching
        assert (outcome.num_preemptions > 0) == (setting.num_blocks == few)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral_window"])
def test_with_experts(family: str, quantization: Quantization | None, tmp_path: Path) -> None:
    """A token's choices, and what it gets of them, are its own; their steps are recorded, too."""
    if BEST is None:
        pytest.skip("nanocore was installed without a C++ compiler")
    kernels = CpuKernels(runnable_libraries()[BEST])
    dtype = torch.bfloat16 if family == "qwen2_moe" else torch.float32
    engine = Engine(BUILDERS[family](tmp_path), kernels, dtype, quantization)
    requests = range(8, 40)
    alone = engine.run(Setting(at_once=1, max_num_batched_tokens=1024), requests)
    assert engine.runner.is_captured
    for setting in (
        Setting(max_num_batched_tokens=79),
        Setting(num_blocks=30, has_prefix_caching=True),
        Setting(is_replayed=False),
    ):
        assert num_different(engine.run(setting, requests), alone) == 0


def test_torch_differs_in_this_comparison(folders: Callable[[torch.dtype], Path]) -> None:
    engine = Engine(folders(torch.bfloat16), TorchKernels(), torch.bfloat16, None)
    assert num_different(engine.run(Setting()), engine.alone()) > 10
    assert num_different(engine.run(Setting(at_once=1)), engine.alone()) == 0


@pytest.mark.parametrize(
    ("family", "flags", "words"),
    [
        ("qwen3_moe", {}, "with heads of 24 values part"),
        ("qwen3", {"block_size": 24}, "with --block-size 24 part"),
        ("narrow", {}, "with heads of 24 values part"),
        ("delta", {}, "with DeltaNet's heads of 16 and 48 values part"),
    ],
)
def test_what_torch_computes_for_them_is_refused_where_it_is_promised(
    tmp_path: Path, family: str, flags: dict[str, Any], words: str
) -> None:
    if family == "qwen3_moe":
        folder = BUILDERS[family](tmp_path)
    elif family == "delta":
        dims = {"linear_key_head_dim": 16, "linear_value_head_dim": 48}
        folder = make_tiny("qwen35", tmp_path, **dims)
    else:
        folder = make_tiny_qwen3(tmp_path, head_dim=24 if family == "narrow" else 16)
    config = make_worker_config(
        folder=str(folder), load_format="auto", batch_invariant=True, **flags
    )
    for start in (Worker, dry_run):
        with pytest.raises(ConfigError, match=words):
            start(config)
