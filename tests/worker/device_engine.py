"""The real scheduler and model runner, on the host or on a fake device that runs behind it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.engine_core.process.cache_size import cache_groups
from nanocore.engine_core.requests.request import Request
from nanocore.kernels.attention import AttentionMetadata, AttentionSpec, KVCache
from nanocore.kernels.interface import Kernels
from nanocore.kernels.kv_quantization import KVCacheFormat, kv_cache_format
from nanocore.kernels.linear_weight import TokenEmbedding
from nanocore.kernels.logit_edits import TokenMask
from nanocore.kernels.sampling import Noise, TokenPlaces
from nanocore.kernels.states import ConvFilters, StateCache
from nanocore.kernels.step import BegunStep, GraphSupport, StepRows
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.kernels.triton import norm, sampling, states
from nanocore.kernels.triton.begin_step import begin_step
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.communication.communicator import Communicator, SingleRank
from nanocore.worker.layers.decoder import DecoderModel, fill_and_pack
from nanocore.worker.loading.loader import load_weights
from nanocore.worker.memory.kv_groups import joined_groups
from nanocore.worker.memory.kv_memory import KVLayout
from nanocore.worker.models import build_model, load_model_config
from nanocore.worker.placement import Placement
from nanocore.worker.plan import SchedulerOutput
from nanocore.worker.rank_messages import Quantization
from nanocore.worker.step.model_runner import ModelRunner
from nanocore.worker.step.pending_output import PendingOutput
from nanocore.worker.step.stream import Stream
from tests.fake_device import FakeGraphRecorder, FakeStream
from tests.fakes import Deliveries, make_request, make_scheduler
from tests.worker.masked_steps import pack_masks
from tests.worker.running import record_steps

BLOCK_SIZE = 4
MAX_NUM_SEQS = 5
MAX_MODEL_LEN = 96
BUDGET = 48


class DeviceKernels(TorchKernels):
    """The reference, told nothing by the host: as kernels that a graph replays."""

    graph_support: GraphSupport = "always"

    def paged_attention(
        self, q_THD: Tensor, cache: KVCache, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        lengths = metadata.seq_lens_B.tolist()
        starts = metadata.query_start_A.tolist()
        num_decodes = int(metadata.num_decodes_1)
        assert num_decodes <= metadata.num_decodes
        assert starts[-1] <= metadata.query_start[-1]
        assert len(lengths) == len(metadata.seq_lens)
        if metadata.query_start[-1] == metadata.num_decoded:
            assert num_decodes == len(lengths), "no kernel for chunks is launched"
        out_THD = torch.zeros_like(q_THD)
        for i, length in enumerate(lengths):
            tokens = slice(starts[i], starts[i + 1])
            num_tokens = starts[i + 1] - starts[i]
            if length == 0 or num_tokens == 0:
                continue
            assert num_tokens <= metadata.decode_tokens or i >= num_decodes
            alone = replace(
                metadata,
                num_decodes=int(i < num_decodes),
                query_start=[0, num_tokens],
                seq_lens=[length],
                seq_lens_B=metadata.seq_lens_B[i : i + 1],
                block_table=metadata.block_table[i : i + 1],
            )
            out_THD[tokens] = super().paged_attention(q_THD[tokens], cache, alone, spec)
        return out_THD


class TritonEnds(DeviceKernels):
    """What is before a step's layers, and after, by Triton's kernels; of layers, convolutions.

    For ranks that are threads: one at a time, which Triton's interpreter asks for.
    """

    _interpreter = threading.Lock()

    def short_conv(
        self, x: Tensor, filters: ConvFilters, cache: StateCache, metadata: AttentionMetadata
    ) -> Tensor:
        with self._interpreter:
            return states.short_conv(x, filters, cache, metadata)

    def begin_step(self, rows: StepRows, embedding: TokenEmbedding | None) -> BegunStep:
        with self._interpreter:
            return begin_step(rows, embedding)

    def select_add_rms_norm(
        self, x_TE: Tensor, residual_TE: Tensor, index_R: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        with self._interpreter:
            return norm.select_add_rms_norm(x_TE, residual_TE, index_R, weight, eps)

    def best_token(
        self,
        logits_RV: Tensor,
        first_token: int,
        noise: Noise | None = None,
        places: TokenPlaces | None = None,
        mask: TokenMask | None = None,
    ) -> tuple[Tensor, Tensor]:
        with self._interpreter:
            return sampling.best_token(logits_RV, first_token, noise, places, mask)


@dataclass(frozen=True)
class Wish:
    """A request. abort_after: tokens after which its client leaves.

    allowed: of the tokens that it was given, those that it may sample next, as bool [V].
    """

    prompt: list[int]
    max_tokens: int
    sampling: EngineSamplingParams = EngineSamplingParams(temperature=0.0)
    stop_token_ids: tuple[int, ...] = ()
    abort_after: int | None = None
    allowed: Callable[[list[int]], NDArray[np.bool_]] | None = None

    def request(self, handle: int) -> Request:
        made = make_request(
            handle,
            self.prompt,
            self.max_tokens,
            block_size=BLOCK_SIZE,
            stop_token_ids=self.stop_token_ids,
            max_model_len=MAX_MODEL_LEN,
        )
        made.sampling = msgspec.structs.replace(
            self.sampling, max_tokens=self.max_tokens, stop_token_ids=list(self.stop_token_ids)
        )
        return made


def make_wishes(*lengths: int, max_tokens: int = 3) -> list[Wish]:
    """Random prompts of these lengths that sample in turn: greedy, with a temperature, filtered."""
    rng = np.random.default_rng(5)
    samplings = [
        EngineSamplingParams(temperature=0.0),
        EngineSamplingParams(temperature=0.8),
        EngineSamplingParams(temperature=1.1, top_k=20, top_p=0.9),
    ]
    return [
        Wish(rng.integers(0, 380, length).tolist(), max_tokens, samplings[i % len(samplings)])
        for i, length in enumerate(lengths)
    ]


ASKED: dict[str, list[dict[str, Any]]] = {
    "masks": [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"temperature": 1.1, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.0, "presence_penalty": 0.8, "logit_bias": [(i, 5.0) for i in range(40)]},
    ],
    "logprobs": [
        {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
        {"temperature": 0.9, "logprobs": -1},
        {"temperature": 1.2, "logprobs": 0, "prompt_logprobs": 0, "top_k": 30, "top_p": 0.9},
        {"temperature": 0.7, "prompt_logprobs": -1},
    ],
    "edits": [
        {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 1.1},
        {"temperature": 0.9, "presence_penalty": 0.6, "logit_bias": [(7, 9.0), (8, 9.5)]},
        {"temperature": 0.8, "allowed_token_ids": [3, 5, 8, 250], "bad_words_token_ids": [[3, 3]]},
        {"temperature": 1.0, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2},
    ],
    "filters": [
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 0.8, "top_p": 0.8},
        {"temperature": 1.1, "min_p": 0.05},
        {"temperature": 1.0, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    ],
    "embeddings": [
        {"pooling": "last"},
        {"temperature": 0.0},
        {"pooling": "mean"},
        {"temperature": 0.8, "logprobs": 1},
    ],
}
"""What requests ask for beside a plain token, by kind; with masks, each has one, too."""


def allow_a_sixth(output: list[int]) -> NDArray[np.bool_]:
    """Tokens that a request with a mask may sample next: others after each token."""
    return (np.arange(384) + len(output)) % 6 == 0


def make_asking_wishes(*kinds: str, max_tokens: int = 8) -> list[Wish]:
    """Requests of these kinds in turn, of which some are longer than a step's budget."""
    requested = [(kind, one) for own in zip(*(ASKED[kind] for kind in kinds), strict=True)
             for kind, one in zip(kinds, own, strict=True)]  # fmt: skip
    rng = np.random.default_rng(11)
    return [
        Wish(
            rng.integers(0, 380, (29, 5, 60, 1, 17, 40)[i % 6]).tolist(),
            1 if "pooling" in one else max_tokens + i % 3,
            EngineSamplingParams(**one),
            allowed=allow_a_sixth if kind == "masks" else None,
        )
        for i, (kind, one) in enumerate(requested)
    ]


class Engine:
    """The scheduler and a runner.

    depth: steps in flight; 0: a runner on the host. kernels: of a device. stream: of a device
    that is no fake.
    """

    def __init__(
        self,
        model: DecoderModel,
        depth: int,
        graph_capture: FakeGraphRecorder | None = None,
        num_blocks: int = 200,
        budget: int = BUDGET,
        kernels: Kernels | None = None,
        stream: Stream | None = None,
    ) -> None:
        self.stream = FakeStream(max(1, depth), graph_capture)
        if depth and stream is None:
            stream = self.stream
        kernels = (kernels or DeviceKernels()) if depth else TorchKernels()
        self.runner = ModelRunner(model, kernels, stream=stream)
        layout = KVLayout(model.cache_specs, self.kv_format, BLOCK_SIZE)
        self.kv_groups = joined_groups([layout.groups])
        self.num_slabs, self.budget = num_blocks * len(self.kv_groups), budget
        self.allocate()
        self.scheduler, _ = make_scheduler(
            num_blocks=self.num_slabs,
            cache_groups=cache_groups(self.kv_groups, BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
        )
        self.depth = max(1, depth)
        self.deliveries = Deliveries()

    @property
    def kv_format(self) -> KVCacheFormat:
        return kv_cache_format("auto", self.runner.placement.dtype)

    def allocate(self) -> None:
        sizes = self.num_slabs, BLOCK_SIZE, MAX_NUM_SEQS, MAX_MODEL_LEN
        self.runner.allocate(self.kv_format, *sizes, self.kv_groups)
        self.runner.capture(self.budget)

    def run(self, wishes: list[Wish]) -> dict[int, list[int]]:
        for handle, wish in enumerate(wishes):
            self.scheduler.add(wish.request(handle))
        in_flight: deque[PendingOutput] = deque()
        masks = MaskFinder(self.runner, wishes, self.deliveries)
        while self.scheduler.num_requests or in_flight:
            while len(in_flight) < self.depth and self.scheduler.next_group() is not None:
                if in_flight and in_flight[-1].awaits_masks:
                    break
                plan = masks.ask(self.scheduler.schedule())
                in_flight.append(self.runner.begin(plan))
                if len(in_flight) == 1:
                    masks.tell(in_flight[0])
            output = in_flight.popleft().wait()
            for handle, wish in enumerate(wishes):
                tokens = self.deliveries.tokens.get(handle, [])
                if wish.abort_after is not None and len(tokens) >= wish.abort_after:
                    self.scheduler.abort(handle)
            self.deliveries.take(self.scheduler, output)
            if len(in_flight) == 1:
                masks.tell(in_flight[0])
        return self.deliveries.tokens


class MaskFinder:
    """Has steps await masks whose rows are of requests that have some, and tells them."""

    def __init__(self, runner: ModelRunner, wishes: list[Wish], deliveries: Deliveries) -> None:
        self._wishes, self._deliveries = wishes, deliveries
        self._steps = record_steps(runner.batch)
        self._owners: dict[int, int] = {}
        self._step = 0

    def ask(self, plan: SchedulerOutput) -> SchedulerOutput:
        for row in np.frombuffer(plan.removed_rows, "<i4").tolist():
            self._owners.pop(row, None)  # it may be of an earlier run
        self._owners |= {new.row: new.seed for new in plan.added}
        self._step = plan.step
        asks = any(self._wishes[owner].allowed for owner in self._owners.values())
        return msgspec.structs.replace(plan, awaits_masks=asks and plan.num_tokens > 0)

    def tell(self, pending: PendingOutput) -> None:
        if not pending.awaits_masks:
            return
        masks = {}
        for row in self._steps[-1].sample_rows.tolist():
            find = self._wishes[self._owners[row]].allowed
            if find is not None:
                masks[row] = find(self._deliveries.tokens.get(self._owners[row], []))
        pending.sample(pack_masks(self._step, masks))


def load_model(
    folder: Path,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    quantization: Quantization | None = None,
    tp: Communicator | None = None,
) -> DecoderModel:
    placement = Placement(dtype, torch.device(device), tp or SingleRank())
    model = build_model(load_model_config(folder), placement)
    names = model.entry_name
    fill_and_pack(model, TorchKernels(), lambda e: load_weights(folder, e, names), quantization)
    return model


def expected(model: DecoderModel, wishes: list[Wish]) -> dict[int, list[int]]:
    return answers_alone(model, wishes).tokens


def answers_alone(model: DecoderModel, wishes: list[Wish]) -> Deliveries:
    all_of_them = Deliveries()
    for handle, wish in enumerate(wishes):
        engine = Engine(model, depth=0)
        masks = MaskFinder(engine.runner, wishes, engine.deliveries)
        engine.scheduler.add(wish.request(handle))
        while engine.scheduler.num_requests:
            pending = engine.runner.begin(masks.ask(engine.scheduler.schedule()))
            masks.tell(pending)
            engine.deliveries.take(engine.scheduler, pending.wait())
        for found, own in zip(_answers(all_of_them), _answers(engine.deliveries), strict=True):
            found |= own
    return all_of_them


def assert_same_answers(found: Deliveries, right: Deliveries) -> None:
    """Whether tokens are equal, and numbers but for the rounding of other kernels."""
    assert found.tokens == right.tokens
    for ours, theirs in (
        (found.logprobs, right.logprobs),
        (found.prompt_logprobs, right.prompt_logprobs),
    ):
        assert ours.keys() == theirs.keys()
        for handle in ours:
            for (rank, one), (other_rank, other) in zip(ours[handle], theirs[handle], strict=True):
                assert abs(rank - other_rank) <= 1  # of neighbours that are as good as equal
                assert one[0][0] == other[0][0]
                numbers, others = ([number for _, number in own] for own in (one, other))
                np.testing.assert_allclose(numbers, others, atol=2e-3)
    assert found.embeddings.keys() == right.embeddings.keys()
    for handle, embedding in found.embeddings.items():
        ours_E, right_E = (np.frombuffer(x, "<f4") for x in (embedding, right.embeddings[handle]))
        np.testing.assert_allclose(ours_E, right_E, atol=1e-3 * float(np.abs(right_E).max()))


def _answers(deliveries: Deliveries) -> list[dict[int, Any]]:
    return [
        deliveries.tokens,
        deliveries.logprobs,
        deliveries.prompt_logprobs,
        deliveries.embeddings,
    ]
