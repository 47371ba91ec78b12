"""Weights that are not finite: requests that touch them end with an error, all others are as ever.

The loader, which refuses them, is made to let them pass: what overflows later looks the same. One
row of a tiny model's embedding is NaN, so that a prompt touches it or does not. The real
scheduler and model runner, on every path from logits to tokens.
"""

from __future__ import annotations

import queue
import shutil
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.kernels.kv_quantization import kv_cache_format
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.communication.communicator import Communicator, StageLinks
from nanocore.worker.layers.decoder import fill_and_pack
from nanocore.worker.loading import loader
from nanocore.worker.loading.loader import load_weights
from nanocore.worker.models import build_model, load_model_config
from nanocore.worker.placement import Placement
from nanocore.worker.plan import SchedulerOutput
from nanocore.worker.rank_messages import Quantization
from nanocore.worker.step.model_runner import ModelRunner
from nanocore.worker.step.pending_output import PendingOutput
from tests.fake_device import FakeGraphRecorder, FakeStream
from tests.fakes import Deliveries, make_request, make_scheduler
from tests.tiny_models import make_tiny_qwen3
from tests.worker.device_engine import DeviceKernels
from tests.worker.ranks import run_ranks
from tests.worker.running import World, make_kernels

BLOCK_SIZE = 16
NUM_BLOCKS = 14
BUDGET = 24
MAX_NUM_SEQS = 4
MAX_MODEL_LEN = 96
MAX_TOKENS = 5
DAMAGED = 380
SAMPLINGS = [
    EngineSamplingParams(temperature=0.0),
    EngineSamplingParams(temperature=0.9),
    EngineSamplingParams(temperature=1.2, top_p=0.9),
    EngineSamplingParams(temperature=1.0, top_k=9, min_p=0.01),
]


@dataclass(frozen=True)
class Way:
    """How tokens are computed. depth: steps in flight on a fake device; 0: on the host."""

    backend: str = "cpu"
    kv_cache_dtype: str = "auto"
    depth: int = 0
    dtype: torch.dtype = torch.float32
    quantization: Quantization | None = None


WAYS = {
    "native": Way(),
    "native, bfloat16": Way(dtype=torch.bfloat16),
    "native, int8": Way(quantization="int8"),
    "torch": Way("torch"),
    "torch, int8": Way("torch", quantization="int8"),
    "torch, fp8": Way("torch", quantization="fp8"),
    "int8 KV": Way(kv_cache_dtype="int8"),
    "device": Way("device", depth=2),
}


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_check_range", lambda *_: None)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), tied=False, head_dim=16)


@pytest.fixture(scope="module")
def damaged(healthy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damage(healthy, tmp_path_factory.mktemp("damaged"), "model.embed_tokens.weight", DAMAGED)


def damage(
    folder: Path, to: Path, name: str, row: int, value: float = torch.nan, column: int = 3
) -> Path:
    """A copy of the model with one weight that is not finite."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    weights = load_file(to / "model.safetensors")
    (weights[name][row] if weights[name].dim() == 2 else weights[name])[column] = value
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


def make_prompts() -> list[list[int]]:
    """Twelve, each other one with the damaged token somewhere; some are longer than a step."""
    rng = np.random.default_rng(8)
    prompts = [
        rng.integers(0, DAMAGED, n).tolist() for n in (5, 9, 40, 33, 1, 1, 17, 30, 8, 50, 6, 7)
    ]
    for i, prompt in enumerate(prompts[1::2]):
        prompt[i * 7 % len(prompt)] = DAMAGED
    return prompts


PROMPTS = make_prompts()


def make_runner(
    folder: Path, way: Way, placement: Placement | None = None, links: StageLinks | None = None
) -> ModelRunner:
    placement = placement or Placement(way.dtype, torch.device("cpu"))
    model = build_model(load_model_config(folder), placement)
    stream = FakeStream(way.depth, FakeGraphRecorder()) if way.depth else None
    kernels = DeviceKernels() if way.depth else make_kernels(way.backend)
    runner = ModelRunner(model, kernels, links, stream)
    names = model.entry_name
    fill_and_pack(model, kernels, lambda e: load_weights(folder, e, names), way.quantization)
    kv_format = kv_cache_format(way.kv_cache_dtype, way.dtype)
    runner.allocate(kv_format, NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, MAX_MODEL_LEN)
    runner.capture(BUDGET)
    return runner


def drive(
    begin: Callable[[SchedulerOutput], PendingOutput], depth: int = 1, num_groups: int = 1
) -> Deliveries:
    scheduler: Scheduler = make_scheduler(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=BUDGET,
        max_model_len=MAX_MODEL_LEN,
        num_groups=num_groups,
    )[0]
    for handle, prompt in enumerate(PROMPTS):
        request = make_request(
            handle, prompt, MAX_TOKENS, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN
        )
        request.sampling = SAMPLINGS[handle // 2 % len(SAMPLINGS)]
        scheduler.add(request)
    deliveries, in_flight = Deliveries(), deque[PendingOutput]()
    while scheduler.num_requests or in_flight:
        while len(in_flight) < depth and (group := scheduler.next_group()) is not None:
            in_flight.append(begin(scheduler.schedule(group)))
        deliveries.take(scheduler, in_flight.popleft().wait())
    assert scheduler.kv_cache.num_free_blocks == NUM_BLOCKS
    return deliveries


def check(deliveries: Deliveries, right: Deliveries) -> None:
    """Prompts with the damaged token have an error, and the others what they had without damage."""
    for handle, prompt in enumerate(PROMPTS):
        if DAMAGED in prompt:
            assert handle not in deliveries.tokens
            assert deliveries.finish_reasons[handle] == "error"
            assert "output token 1 are not finite" in deliveries.messages[handle]
        else:
            assert DAMAGED not in right.tokens[handle], "else it would be computed on"
            assert deliveries.tokens[handle] == right.tokens[handle]
            assert deliveries.finish_reasons[handle] == "length"


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_prompts_that_touch_it_end_with_an_error_and_others_are_as_ever(
    way: Way, healthy: Path, damaged: Path
) -> None:
    depth = max(1, way.depth)
    right = drive(make_runner(healthy, way).begin, depth)
    check(drive(make_runner(damaged, way).begin, depth), right)


def test_on_two_ranks(healthy: Path, damaged: Path) -> None:

    def of_rank(tp: Communicator) -> Deliveries:
        placement = Placement(torch.float32, torch.device("cpu"), tp)
        return drive(make_runner(damaged, Way(), placement).begin)

    right = drive(make_runner(healthy, Way()).begin)
    for deliveries in run_ranks(2, of_rank):
        check(deliveries, right)


def test_on_two_stages(healthy: Path, damaged: Path) -> None:
    world, plans = World(1, 2), queue.SimpleQueue[SchedulerOutput | None]()

    def of_rank(rank: Communicator) -> Deliveries | None:
        placement, links = world.join(rank.rank, torch.float32)
        runner = make_runner(damaged, Way(), placement, links)
        if placement.is_last_stage:
            try:
                return drive(lambda plan: (plans.put(plan), runner.begin(plan))[1], num_groups=2)
            finally:
                plans.put(None)
        while (plan := plans.get()) is not None:
            runner.execute(plan)
        return None

    right = drive(make_runner(healthy, Way()).begin)
    deliveries = run_ranks(2, of_rank)[1]
    assert deliveries is not None
    check(deliveries, right)


@pytest.mark.parametrize(
    "way", ["native", "native, int8", "torch", "torch, int8", "torch, fp8", "device"]
)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lm_head.weight", torch.nan),  # infinity may be minus infinity times a hidden state
        ("model.norm.weight", torch.nan),
        ("model.norm.weight", torch.inf),
        ("model.layers.1.mlp.down_proj.weight", torch.nan),
        ("model.layers.1.mlp.down_proj.weight", -torch.inf),
    ],
)
def test_where_every_prompt_touches_it_all_end_with_an_error(
    healthy: Path, tmp_path: Path, name: str, way: str, value: float
) -> None:
    folder = damage(healthy, tmp_path, name, 7, value)
    deliveries = drive(make_runner(folder, WAYS[way]).begin, max(1, WAYS[way].depth))
    assert set(deliveries.finish_reasons.values()) == {"error"}
    assert not deliveries.tokens


def test_attention_does_not_see_what_others_left(healthy: Path) -> None:
    """Blocks full of NaN and infinities change no token of those who are given them."""
    for way in (Way(), Way(dtype=torch.bfloat16), Way("torch"), Way(kv_cache_dtype="int8")):
        right = drive(make_runner(healthy, way).begin)
        runner = make_runner(healthy, way)
        for cache in runner.stage.kv_caches:
            spoil(cache.k_NSKD, cache.v_NSKD, cache.k_scale_NSK, cache.v_scale_NSK)
        assert drive(runner.begin).tokens == right.tokens


@torch.inference_mode()
def spoil(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and tensor.is_floating_point():
            tensor.fill_(torch.nan)
            tensor.flatten()[::3] = torch.inf
