"""Model runners on every rank of a small engine, given the real scheduler's plans.

What the scheduler plans depends on how many tokens there are and, through the prefix cache, on
which. Both are known beforehand where a test knows what the model should say: so a `Script` of
plans is written first, with chunks, mixed batches, shared prefixes and preemptions, and then every
rank runs it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from benchmarks.attention_step import make_metadata
from nanocore.engine_core.process.cache_size import cache_groups
from nanocore.kernels.cpu.cpu_backend import CpuKernels
from nanocore.kernels.cpu.library import find_library
from nanocore.kernels.interface import Kernels
from nanocore.kernels.kv_quantization import kv_cache_format
from nanocore.kernels.logit_edits import TokenMask
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.kv_cache import FULL
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.communication.communicator import Communicator, SingleRank, StageLinks
from nanocore.worker.communication.shared_memory import (
    ShmChannel,
    ShmCommunicator,
    create_channel,
    create_group_region,
)
from nanocore.worker.layers.decoder import DecoderModel, fill_and_pack
from nanocore.worker.layers.linear import StepContext
from nanocore.worker.loading.formats.checkpoint_format import folder_format
from nanocore.worker.loading.gguf.gguf_files import is_gguf
from nanocore.worker.loading.gguf.gguf_format import GgufFormat
from nanocore.worker.loading.loader import load_weights
from nanocore.worker.loading.weights import WeightFormat
from nanocore.worker.memory.kv_groups import KVGroup, joined_groups
from nanocore.worker.memory.kv_memory import KVLayout
from nanocore.worker.models import build_model, load_model_config, model_class
from nanocore.worker.placement import Placement
from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput
from nanocore.worker.rank_messages import Quantization
from nanocore.worker.sampling.columns import SamplingMetadata
from nanocore.worker.sampling.sampler import TokenSampler
from nanocore.worker.step.batch_step import BatchStep
from nanocore.worker.step.input_batch import InputBatch
from nanocore.worker.step.model_runner import ModelRunner
from nanocore.worker.step.stream import Stream
from tests.fakes import Deliveries, make_request, make_scheduler
from tests.tiny_models import MAX_MODEL_LEN
from tests.worker.ranks import run_ranks

BLOCK_SIZE = 16
NUM_BLOCKS = 33
MAX_NUM_SEQS = 8
MAX_NUM_BATCHED_TOKENS = 96
BUFFER_BYTES = 1 << 16


@dataclass(frozen=True)
class Script:
    """Plans, and of each the rows that sample: of which request which token, counted from 0.

    kv_groups: of the model's layers.
    """

    plans: list[SchedulerOutput]
    samples: list[dict[int, tuple[int, int]]]
    num_groups: int
    num_preemptions: int
    num_cached_tokens: int
    kv_groups: Sequence[KVGroup] = ()


@dataclass(frozen=True)
class Sample:
    """What a model said: token number `index` of a request. logits_V: float32."""

    request: int
    index: int
    token_id: int
    logits_V: Tensor


def write_script(
    prompts: Sequence[list[int]],
    outputs: Sequence[list[int]],
    num_groups: int = 1,
    samplings: Sequence[EngineSamplingParams] | None = None,
    kv_groups: Sequence[KVGroup] = (),
    num_slabs: int = NUM_BLOCKS,
    first: int = 0,
) -> Script:
    """The plans by which each prompt gets its output. num_groups: pipeline stages.

    samplings: of each request, whose number is its seed; without them all are greedy. kv_groups: of
    the model's layers; without them all keep every token. first: the request that comes first, and
    those after it; the ones before it come last.
    """
    groups = cache_groups(kv_groups, BLOCK_SIZE) or FULL
    scheduler, executor = make_scheduler(
        num_blocks=num_slabs,
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        num_groups=num_groups,
        cache_groups=groups,
    )
    known = {
        (*prompt, *output[:index]): (request, index)
        for request, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        for index in range(len(output))
    }
    sampled: list[tuple[int, int]] = []

    def sample(context: list[int]) -> int:
        request, index = known[tuple(context)]
        sampled.append((request, index))
        return outputs[request][index]

    executor.sample = sample
    for request in (*range(first, len(prompts)), *range(first)):
        prompt, output = prompts[request], outputs[request]
        sizes = {"block_size": BLOCK_SIZE, "max_model_len": MAX_MODEL_LEN}
        added = make_request(request, prompt, len(output), **sizes)
        own = EngineSamplingParams(temperature=0.0) if samplings is None else samplings[request]
        added.sampling = msgspec.structs.replace(own, max_tokens=len(output))
        scheduler.add(added)
    deliveries, in_flight = Deliveries(), deque[ModelRunnerOutput]()
    plans, samples = [], []
    while scheduler.num_requests or in_flight:
        while len(in_flight) < num_groups and (group := scheduler.next_group()) is not None:
            plans.append(scheduler.schedule(group))
            sampled.clear()
            in_flight.append(executor.execute(plans[-1]))
            rows = np.frombuffer(in_flight[-1].rows, "<i4").tolist()
            samples.append(dict(zip(rows, sampled, strict=True)))
        deliveries.take(scheduler, in_flight.popleft())
    assert [deliveries.tokens[i] for i in range(len(outputs))] == list(outputs)
    return Script(
        plans,
        samples,
        num_groups,
        scheduler.counters.num_preemptions,
        sum(deliveries.num_cached.values()),
        kv_groups,
    )


def model_groups(folder: Path) -> list[KVGroup]:
    """The groups of a model's layers, for `make_runner` and `write_script`."""
    model = build_model(load_model_config(folder), Placement(torch.float32, torch.device("cpu")))
    kv_format = kv_cache_format("auto", torch.float32)
    return joined_groups([KVLayout(model.cache_specs, kv_format, BLOCK_SIZE).groups])


def make_runner(
    folder: Path,
    placement: Placement,
    links: StageLinks | None = None,
    kv_cache_dtype: str = "auto",
    backend: str = "cpu",
    model: DecoderModel | None = None,
    kernels: Kernels | None = None,
    stream: Stream | None = None,
    quantization: Quantization | None = None,
    max_model_len: int = MAX_MODEL_LEN,
    enforce_eager: bool = False,
    kv_groups: Sequence[KVGroup] = (),
) -> ModelRunner:
    """One rank, its weights loaded, ready for plans.

    model: to be loaded, or one is built. kernels: others than the backend's.
    max_model_len: served positions. enforce_eager: steps are not recorded. kv_groups: of all ranks'
    layers, if there are several.
    """
    model = model or build_model(load_model_config(folder), placement)
    runner = ModelRunner(model, kernels or make_kernels(backend), links, stream, enforce_eager)
    names = model.entry_name
    fill_and_pack(model, runner.kernels, lambda e: load_weights(folder, e, names), quantization)
    kv_format = kv_cache_format(kv_cache_dtype, placement.dtype)
    num_groups = len({spec.kind for spec in model.cache_specs})
    sizes = NUM_BLOCKS * num_groups, BLOCK_SIZE, MAX_NUM_SEQS, max_model_len
    runner.allocate(kv_format, *sizes, kv_groups)
    runner.capture(MAX_NUM_BATCHED_TOKENS)
    return runner


def stored_format(folder: Path, dtype: torch.dtype = torch.float32) -> WeightFormat | None:
    if is_gguf(folder):
        return GgufFormat(folder, load_model_config(folder).attention.head_dim, dtype)
    return folder_format(folder, model_class(load_model_config(folder).architecture).common_name)


def make_kernels(backend: str, *, keeps_activations: bool = False) -> Kernels:
    """A backend with one thread: ranks are threads in these tests, and would share its pool."""
    if backend == "torch":
        return TorchKernels()
    library = find_library()
    assert library is not None, "nanocore was installed without a C++ compiler"
    cores = sorted(os.sched_getaffinity(0))[:1]
    return CpuKernels(library, cores, keeps_activations=keeps_activations)


def step_of(kernels: Kernels) -> StepContext:
    """A step for layers that see nothing but its kernels."""
    return StepContext(
        kernels, make_metadata([(1, 1)], torch.zeros(1, 1, dtype=torch.int32), 16), {}
    )


def run_script(
    folder: Path,
    script: Script,
    tp_size: int = 1,
    dtype: torch.dtype = torch.float32,
    kv_cache_dtype: str = "auto",
    backend: str = "cpu",
    quantization: Quantization | None = None,
    *,
    keeps_activations: bool = False,
) -> list[Sample]:
    world = World(tp_size, script.num_groups)

    def run(rank: Communicator) -> list[Sample]:
        placement, links = world.join(rank.rank, dtype)
        placement = replace(placement, weight_format=stored_format(folder, dtype))
        kernels = make_kernels(backend, keeps_activations=keeps_activations)
        runner = make_runner(
            folder, placement, links, kv_cache_dtype, kernels=kernels, quantization=quantization,
            kv_groups=script.kv_groups,
        )  # fmt: skip
        return run_runner(runner, script)

    results = run_ranks(tp_size * script.num_groups, run)[-tp_size:]
    whole = []
    for samples in zip(*results, strict=True):
        first = samples[0]
        assert {sample.token_id for sample in samples} == {first.token_id}
        logits_V = torch.cat([sample.logits_V for sample in samples])
        whole.append(Sample(first.request, first.index, first.token_id, logits_V))
    return whole


class World:
    """The shared memory of all ranks."""

    def __init__(self, tp_size: int, pp_size: int) -> None:
        self.tp_size, self.pp_size = tp_size, pp_size
        self.regions = [create_group_region(tp_size, BUFFER_BYTES) for _ in range(pp_size)]
        # Buffers shorter than a step's hidden states, which then travel in pieces.
        self.channels = [create_channel(BUFFER_BYTES, 2) for _ in range(tp_size * (pp_size - 1))]

    def __del__(self) -> None:
        for fd in self.regions + self.channels:
            os.close(fd)

    def join(self, rank: int, dtype: torch.dtype) -> tuple[Placement, StageLinks]:
        stage, tp_rank = divmod(rank, self.tp_size)
        tp: Communicator = SingleRank()
        if self.tp_size > 1:
            tp = ShmCommunicator(self.regions[stage], tp_rank, self.tp_size, BUFFER_BYTES)

        def channel(index: int) -> ShmChannel | None:
            if not 0 <= index < len(self.channels):
                return None
            return ShmChannel(self.channels[index], BUFFER_BYTES, 2)

        links = StageLinks(receive=channel(rank - self.tp_size), send=channel(rank))
        return Placement(dtype, torch.device("cpu"), tp, stage, self.pp_size), links


def run_runner(runner: ModelRunner, script: Script) -> list[Sample]:
    logits: list[Tensor] = []
    if runner.sampler is not None:
        record_logits(runner.sampler, logits)
    said = []
    for plan, expected in zip(script.plans, script.samples, strict=True):
        logits.clear()
        result = runner.execute(plan)
        if not runner.placement.is_last_stage:
            continue
        rows = np.frombuffer(result.rows, "<i4").tolist()
        token_ids = np.frombuffer(result.token_ids, "<i4").tolist()
        assert sorted(rows) == sorted(expected)
        for i, (row, token_id) in enumerate(zip(rows, token_ids, strict=True)):
            said.append(Sample(*expected[row], token_id, logits[0][i]))
    return said


def record_logits(sampler: TokenSampler, logits: list[Tensor]) -> None:
    """Have the sampler append what it samples from to this list."""
    sample = sampler.sample

    def recording(logits_SV: Tensor, sampling: SamplingMetadata, mask: TokenMask | None) -> Tensor:
        logits.append(logits_SV.clone())
        return sample(logits_SV, sampling, mask)

    sampler.sample = recording  # type: ignore[method-assign]


def record_steps(batch: InputBatch) -> list[BatchStep]:
    steps: list[BatchStep] = []
    advance = batch.advance

    def recording(plan: SchedulerOutput) -> BatchStep:
        steps.append(advance(plan))
        return steps[-1]

    batch.advance = recording  # type: ignore[method-assign]
    return steps
