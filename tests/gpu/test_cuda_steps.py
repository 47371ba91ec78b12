"""Steps on a CUDA device, with real streams and graphs; without one, on the fake device.

In float32, where Triton's kernels compute exactly enough for tokens to be those of a CPU. To be run
with TRITON_INTERPRET=0, see `tests/conftest.py`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nanocore.kernels.triton.launch import pdl
from nanocore.kernels.triton.triton_backend import TritonKernels
from nanocore.worker.communication.process_group import ProcessGroupCommunicator
from nanocore.worker.step import step_graphs
from tests.gpu.targets import CUDA, CUDA_MARKS, TARGETS, Target
from tests.model_families import BUILDERS
from tests.tiny_models import make_tiny_qwen3
from tests.worker.device_engine import (
    ASKED,
    answers_alone,
    assert_same_answers,
    expected,
    load_model,
    make_asking_wishes,
    make_wishes,
)


@pytest.fixture(autouse=True)
def _short_mixed_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "MIXED_TOKENS", (8, 24))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), head_dim=64)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize(
    "batch_invariant", [pytest.param(value, marks=CUDA_MARKS) for value in (False, True)]
)
def test_cuda_steps_give_the_tokens_of_a_cpu(
    folder: Path, depth: int, has_graphs: bool, batch_invariant: bool
) -> None:
    target = Target("cuda", lambda: TritonKernels(CUDA.device, batch_invariant))
    engine = target.engine(target.load(folder), depth, has_graphs=has_graphs)
    wishes = make_wishes(1, 5, 60, 33, 17, 4, 40, max_tokens=12)
    assert engine.run(wishes) == expected(load_model(folder), wishes)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("kinds", "depth", "has_graphs"),
    [
        *(((kind,), 2, True) for kind in ASKED),
        (tuple(ASKED), 3, True),
        (tuple(ASKED), 2, False),
    ],
    ids=str,
)
def test_what_requests_ask_for_is_what_a_cpu_says(
    folder: Path, target: Target, kinds: tuple[str, ...], depth: int, has_graphs: bool
) -> None:
    """Tokens under masks, edits and filters, log probabilities and embeddings, alone and mixed."""
    wishes = make_asking_wishes(*kinds)
    engine = target.engine(target.load(folder), depth, has_graphs=has_graphs)
    engine.run(wishes)
    assert_same_answers(engine.deliveries, answers_alone(load_model(folder), wishes))


@pytest.mark.parametrize("target", TARGETS)
def test_preempted_requests_go_on_with_their_tokens(folder: Path, target: Target) -> None:
    wishes = make_wishes(12, 14, 9, 16, max_tokens=25)
    engine = target.engine(target.load(folder), num_blocks=24)
    assert engine.run(wishes) == expected(load_model(folder), wishes)
    assert engine.scheduler.counters.num_preemptions > 0


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gemma2"])
def test_experts_windows_and_softcaps_give_the_tokens_of_a_cpu(
    tmp_path: Path, target: Target, family: str
) -> None:
    folder = BUILDERS[family](tmp_path)
    wishes = make_wishes(60, 5, 33, 17, 50, max_tokens=12)
    engine = target.engine(target.load(folder))
    assert engine.run(wishes) == expected(load_model(folder), wishes)


class Reduced(msgspec.Struct, frozen=True):
    """Sums over ranks, and then products of them, of one rank."""

    sum_TE: Tensor
    gathered_TT: Tensor


@pytest.fixture
def world_of_one(target: Target, tmp_path: Path) -> Iterator[ProcessGroupCommunicator]:
    """A rank by itself, joined by NCCL on CUDA. Kernels are chosen anew: see `launch.pdl`.

    NCCL leaves a world when no graph refers to it any more; so tests hold none when they compare.
    """
    communicator = ProcessGroupCommunicator(tmp_path / "store", 0, 1, [[0]], target.device)
    pdl.cache_clear()
    yield communicator
    gc.collect()
    dist.destroy_process_group()
    assert not dist.is_initialized()
    pdl.cache_clear()


def reduce_in_a_graph(
    target: Target, communicator: ProcessGroupCommunicator, inputs: list[Tensor]
) -> list[Reduced]:
    x_TE = inputs[0].clone()

    def work() -> Tensor:
        sum_TE = communicator.all_reduce(x_TE * 2) + 1
        gathered_RTT = communicator.all_gather(sum_TE @ sum_TE.t())
        return torch.cat((sum_TE.flatten(), gathered_RTT.flatten()))

    graph_capture = target.stream(1, has_graphs=True).graph_capture
    assert graph_capture is not None
    graph_capture.begin_set()
    found = []
    with torch.inference_mode():
        result, replay = graph_capture.capture(work)
        for own_TE in inputs:
            x_TE.copy_(own_TE)
            replay()
            sum_TE, gathered_TT = result.clone().split([x_TE.numel(), len(x_TE) ** 2])
            found.append(Reduced(sum_TE.view_as(x_TE), gathered_TT.view(len(x_TE), -1)))
    return found


@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor:FutureWarning")
@pytest.mark.parametrize("target", TARGETS)
def test_a_graph_replays_collectives_on_other_numbers(
    target: Target, world_of_one: ProcessGroupCommunicator
) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(8, 64, generator=generator).to(target.device) for _ in range(3)]
    found = reduce_in_a_graph(target, world_of_one, inputs)
    for reduced, x_TE in zip(found, inputs, strict=True):
        sum_TE = x_TE * 2 + 1
        torch.testing.assert_close(reduced.sum_TE, sum_TE)
        torch.testing.assert_close(reduced.gathered_TT, sum_TE @ sum_TE.t())


@pytest.mark.parametrize("target", TARGETS)
def test_a_world_of_one_gives_the_tokens_of_a_rank_alone(
    folder: Path, target: Target, world_of_one: ProcessGroupCommunicator
) -> None:
    wishes = make_wishes(1, 5, 60, 33, max_tokens=8)
    found = target.engine(target.load(folder, tp=world_of_one)).run(wishes)
    assert found == expected(load_model(folder), wishes)
