"""Embeddings: what transformers' last hidden states say, by every family, however they come about.

On native kernels they are the same bits in any chunks and beside any neighbours.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.placement import Placement
from nanocore.worker.sampling import slot_outputs
from nanocore.worker.sampling.slot_outputs import WantedPrompt, pooled_sums
from nanocore.worker.step.model_runner import ModelRunner
from tests.campaign import in_campaign
from tests.fake_device import FakeStream
from tests.model_families import BUILDERS, ONE_OF_EACH, exact_model
from tests.step_plans import make_plan
from tests.tiny_models import make_tiny_qwen3
from tests.worker.device_engine import DeviceKernels
from tests.worker.planned_rows import Asking, Said, new_row, run, run_ranks_of, write_plans
from tests.worker.running import make_runner

LAST, MEAN = (EngineSamplingParams(pooling=kind) for kind in ("last", "mean"))
GREEDY = EngineSamplingParams(temperature=0.0, prompt_logprobs=1, logprobs=0)


def make_requests() -> list[Asking]:
    rng = np.random.default_rng(5)
    samplings = [(MEAN, 40), (GREEDY, 12), (LAST, 33), (MEAN, 1), (LAST, 1), (GREEDY, 25)]
    return [
        Asking(rng.integers(0, 256, length).tolist(), sampling, 4 if sampling is GREEDY else 1)
        for sampling, length in [*samplings, (MEAN, 50)]
    ]


REQUESTS = make_requests()
POOLED = [row for row, request in enumerate(REQUESTS) if request.sampling is not GREEDY]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), head_dim=32)


def one_rank(dtype: torch.dtype = torch.float32) -> Placement:
    return Placement(dtype, torch.device("cpu"))


@pytest.fixture(scope="module")
def native(folder: Path) -> ModelRunner:
    runner = make_runner(folder, one_rank())
    assert runner.is_captured
    return runner


@pytest.fixture(scope="module")
def said(native: ModelRunner) -> Said:
    found = run(native, write_plans(REQUESTS, 64))
    assert sorted(found.embeddings) == POOLED
    return found


def transformers_embeddings(folder: Path, dtype: torch.dtype) -> dict[int, np.ndarray]:
    model = exact_model(folder, dtype=dtype)
    hidden: list[torch.Tensor] = []
    model.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: hidden.append(inputs[0][0].float())
    )
    with torch.no_grad():
        for row in POOLED:
            model(torch.tensor([REQUESTS[row].prompt]), use_cache=False)
    return {
        row: (hidden_TE[-1] if REQUESTS[row].sampling is LAST else hidden_TE.mean(dim=0)).numpy()
        for row, hidden_TE in zip(POOLED, hidden, strict=True)
    }


def vectors(said: Said) -> dict[int, np.ndarray]:
    return {row: np.frombuffer(embedding, "<f4") for row, embedding in said.embeddings.items()}


def assert_close(
    found: dict[int, np.ndarray], expected: dict[int, np.ndarray], most: float = 3e-4
) -> None:
    assert found.keys() == expected.keys()
    for row, embedding in found.items():
        assert embedding.shape == expected[row].shape
        scale = np.abs(expected[row]).max()
        assert np.abs(embedding - expected[row]).max() <= most * scale


@pytest.mark.parametrize(
    "family", [*ONE_OF_EACH, *in_campaign(*(name for name in BUILDERS if name not in ONE_OF_EACH))]
)
def test_every_family_says_what_transformers_says(family: str, tmp_path: Path) -> None:
    folder = BUILDERS[family](tmp_path)
    runner = make_runner(folder, one_rank())
    assert runner.kv_memory is not None
    found = run(runner, write_plans(REQUESTS, 7, num_cache_groups=len(runner.kv_memory.blocks)))
    assert_close(vectors(found), transformers_embeddings(folder, torch.float32))


def test_in_bfloat16_they_are_as_close_as_it_allows(folder: Path) -> None:
    runner = make_runner(folder, one_rank(torch.bfloat16))
    found = run(runner, write_plans(REQUESTS, 64))
    assert_close(vectors(found), transformers_embeddings(folder, torch.float32), 0.1)


@pytest.mark.parametrize("chunk", [1, 7, 33])
def test_chunks_of_any_size_say_the_same_bits(native: ModelRunner, said: Said, chunk: int) -> None:
    assert run(native, write_plans(REQUESTS, chunk)) == said


@pytest.mark.parametrize("row", POOLED)
def test_a_request_alone_says_the_same_bits(native: ModelRunner, said: Said, row: int) -> None:
    others = [Asking([1], LAST, 1)] * row  # whose rows come before
    alone = run(native, write_plans([*others, REQUESTS[row]], 64))
    assert alone.embeddings[row] == said.embeddings[row]


def test_neighbours_say_what_they_say_without_them(native: ModelRunner, said: Said) -> None:
    plain = EngineSamplingParams(temperature=0.0)
    without = [
        replace(one, sampling=plain) if one.sampling is not GREEDY else one for one in REQUESTS
    ]
    found = run(native, write_plans(without, 64))
    assert found.embeddings == {}
    assert (found.logprobs, found.prompt_logprobs) == (said.logprobs, said.prompt_logprobs)


def test_a_row_whose_request_is_gone_starts_again(native: ModelRunner, said: Said) -> None:
    row = POOLED[-1]
    begun = write_plans(REQUESTS, 7)
    cut = next(
        number
        for number, plan in enumerate(begun)
        if row in np.frombuffer(plan.chunk_rows, "<i4") and not plan.added
    )
    run(native, begun[:cut])  # some of its tokens are summed up
    assert run(native, write_plans(REQUESTS, 64)) == said


def test_nothing_is_made_where_no_row_asks(
    native: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nobody requested")

    run(native, write_plans(REQUESTS, 64))
    monkeypatch.setattr(slot_outputs, "WantedPrompt", refuse)
    monkeypatch.setattr(slot_outputs, "SlotOutputs", refuse)
    plain = [Asking(one.prompt, EngineSamplingParams()) for one in REQUESTS]
    assert len(run(native, write_plans(plain, 7)).tokens) == len(plain)


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2), (2, 2)])
def test_the_first_rank_of_the_last_stage_says_what_one_does(
    folder: Path, said: Said, tp_size: int, pp_size: int, chunk: int
) -> None:
    plans = write_plans(REQUESTS, chunk, said.tokens, num_groups=pp_size)
    results = run_ranks_of(folder, plans, tp_size, pp_size)
    assert_close(vectors(results[-tp_size]), vectors(said))
    assert all(result.embeddings == {} for result in results[:-tp_size])


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("chunk", [7, 64])
def test_steps_in_flight_on_a_device_say_the_same(
    folder: Path, said: Said, depth: int, chunk: int
) -> None:
    stream = FakeStream(depth)
    runner = make_runner(folder, one_rank(), kernels=DeviceKernels(), stream=stream)
    found = run(runner, write_plans(REQUESTS, chunk), depth)
    assert found.tokens == said.tokens
    assert_close(vectors(found), vectors(said))


def test_stages_on_devices_say_the_same(folder: Path, said: Said) -> None:
    plans = write_plans(REQUESTS, 7, said.tokens, num_groups=2)
    first, last = run_ranks_of(folder, plans, 1, 2, on_devices=True)
    assert first == Said()
    assert_close(vectors(last), vectors(said))


def test_tokens_that_a_mean_needs_cannot_be_computed_already(native: ModelRunner) -> None:
    native.execute(make_plan(removed=range(8)))
    asking = Asking([1] * 20, MEAN, 1)
    with pytest.raises(AssertionError, match="16 tokens are computed, and it needs those from 0"):
        native.begin(make_plan([new_row(0, asking, num_computed=16)], num_tokens=4))
    native.execute(make_plan(removed=[0]))


# -- sums -----------------------------------------------------------------------------------------


def mean_of(hidden_NE: torch.Tensor, row_N: torch.Tensor, row: int, scale: float = 1.0) -> list:
    sums = pooled_sums(hidden_NE, row_N, int(row_N.max()) + 1, scale)
    pooled = WantedPrompt(row, 0, int((row_N == row).sum()), sums=sums[row].numpy())
    return pooled.mean().tolist()


def test_a_mean_is_that_of_exact_numbers() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden_NE = torch.randn(1000, 8, generator=generator) * torch.logspace(-6, 3, 8)
    hidden_NE[0], hidden_NE[-1] = 2.0**22, -(2.0**22)
    row_N = torch.randint(0, 2, (1000,), generator=generator)
    row_N[0] = row_N[-1] = 1
    for row in (0, 1):
        own = hidden_NE[row_N == row].double()
        expected = [math.fsum(column) / len(own) for column in own.T.tolist()]
        assert mean_of(hidden_NE, row_N, row) == np.array(expected, "<f4").tolist()


def test_the_order_of_tokens_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(4)
    hidden_NE = torch.randn(500, 16, generator=generator) * 1e3
    whole = pooled_sums(hidden_NE, torch.zeros(500, dtype=torch.int64), 1)
    monkeypatch.setattr(slot_outputs, "MAX_POOLED_TOKENS", 3)
    order = torch.randperm(500, generator=generator)
    assert torch.equal(pooled_sums(hidden_NE[order], torch.zeros_like(order), 1), whole)


def test_one_token_is_itself_and_a_divisor_is_undone() -> None:
    hidden_NE = torch.randn(1, 32, generator=torch.Generator().manual_seed(5))
    row_N = torch.zeros(1, dtype=torch.int64)
    assert mean_of(hidden_NE, row_N, 0) == hidden_NE[0].tolist()
    assert mean_of(hidden_NE / 8, row_N, 0, scale=8.0) == hidden_NE[0].tolist()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 3e38])
def test_a_number_that_is_none_spoils_the_mean_of_its_row_alone(number: float) -> None:
    hidden_NE = torch.ones(4, 3)
    hidden_NE[1, 2] = number
    row_N = torch.tensor([0, 1, 0, 1])
    assert mean_of(hidden_NE, row_N, 0) == [1.0, 1.0, 1.0]
    assert all(map(math.isnan, mean_of(hidden_NE, row_N, 1)))
