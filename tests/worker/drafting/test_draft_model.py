"""A draft model beside the served one: its drafts are what a model of its weights would sample.

With the served model's own weights every draft is right, whatever the rows ask for, which shows
that K and V, positions and sampling are those of the served model. With others the tokens are those
of plain decoding all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanocore.kernels.interface import Kernels
from nanocore.kernels.kv_quantization import kv_cache_format
from nanocore.kernels.sampling import TokenPlaces
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.communication.communicator import SingleRank
from nanocore.worker.drafting.draft_model import DraftModel
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.step.batch_step import BatchStep
from nanocore.worker.step.drafts import Proposal
from nanocore.worker.step.model_runner import ModelRunner
from nanocore.worker.step.stream import Stream
from tests.campaign import examples
from tests.fake_device import FakeGraphRecorder, FakeStream
from tests.step_plans import int32, make_plan, make_row
from tests.tiny_models import make_tiny_qwen3
from tests.worker.device_engine import DeviceKernels, load_model
from tests.worker.drafted_plans import (
    BLOCK_SIZE,
    BLOCKS_OF_A_ROW,
    MAX_DRAFTS,
    NUM_ROWS,
    Driver,
    Heard,
)
from tests.worker.test_drafts import WISHES, alone, assert_same

REQUESTS = [number for number, wish in enumerate(WISHES) if wish.allowed is None]
"""Workers guess nothing for rows with masks."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return load_model(make_tiny_qwen3(tmp_path_factory.mktemp("model"), head_dim=16))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    """The model with some noise: it is often right."""
    return load_model(with_noise(make_tiny_qwen3(tmp_path_factory.mktemp("other"), head_dim=16)))


def with_noise(folder: Path) -> Path:
    path, generator = folder / "model.safetensors", torch.Generator().manual_seed(1)
    tensors = load_file(path)
    for tensor in tensors.values():
        noise = torch.randn(tensor.shape, generator=generator)
        tensor += 0.1 * tensor.std().nan_to_num() * noise
    save_file(tensors, path, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def truth(model: DecoderModel) -> list[Heard]:
    heard = [Heard() for _ in WISHES]
    for request in REQUESTS:
        heard[request] = alone(model, request)
    return heard


@dataclass
class Guess:
    """Drafts of a row. known: its tokens before, of which the first is the request's number."""

    known: list[int]
    drafts: list[int]


class RecordingDraftModel(DraftModel):
    """Keeps what it guessed, and of each step how many known tokens it computed."""

    def __init__(self, model: DecoderModel, kernels: Kernels) -> None:
        super().__init__(model, kernels, SingleRank())
        self.guesses: list[Guess] = []
        self.num_computed: list[int] = []

    def propose(self, step: BatchStep) -> Proposal:
        proposal = super().propose(step)
        self.num_computed.append(len(proposal.columns["draft_source_T"]))

        def guess(fields: Mapping[str, Tensor], places: TokenPlaces, is_certain: bool) -> Tensor:
            drafts_D = proposal.guess(fields, places, is_certain)
            for row in dict.fromkeys(places.rows_R.tolist()):
                of_row = places.rows_R == row
                known = places.token_table[row, : places.positions_R[of_row][0]].tolist()
                self.guesses.append(Guess(known, drafts_D[of_row].tolist()))
            return drafts_D

        return Proposal(proposal.columns, guess)


def make_runner(
    model: DecoderModel,
    proposer: DraftModel | None = None,
    stream: Stream | None = None,
    kernels: Kernels | None = None,
    budget: int = 120,
) -> ModelRunner:
    kernels = kernels or TorchKernels()
    runner = ModelRunner(model, kernels, stream=stream, max_drafts=MAX_DRAFTS, proposer=proposer)
    num_blocks = 1 + NUM_ROWS * BLOCKS_OF_A_ROW
    kv_format = kv_cache_format("auto", torch.float32)
    runner.allocate(kv_format, num_blocks, BLOCK_SIZE, NUM_ROWS, BLOCKS_OF_A_ROW * BLOCK_SIZE)
    runner.capture(budget)
    return runner


@settings(max_examples=examples(20), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    # The scheduler begins no step before a draft's result is in. With more steps in flight tokens
    # are right as well, but some guesses are not those of a model that computes all anew.
    depth=st.integers(0, 1),
    has_graphs=st.booleans(),
    is_same=st.booleans(),
)
@example(seed=0, depth=0, has_graphs=False, is_same=False)
@example(seed=1, depth=1, has_graphs=True, is_same=False)
def test_tokens_are_those_of_plain_decoding_and_equal_weights_guess_all_of_them(
    model: DecoderModel,
    other: DecoderModel,
    truth: list[Heard],
    seed: int,
    depth: int,
    has_graphs: bool,
    is_same: bool,
) -> None:
    stream = FakeStream(depth, FakeGraphRecorder() if has_graphs else None) if depth else None
    kernels = DeviceKernels() if depth else TorchKernels()
    proposer = RecordingDraftModel(model if is_same else other, kernels)
    runner = make_runner(model, proposer, stream, kernels)
    rng = np.random.default_rng(seed)
    driver = Driver(runner, WISHES, rng, max(1, depth), MAX_DRAFTS)
    heard = driver.run(rng.permutation(REQUESTS).tolist())
    for request in driver.aborted:
        got, right = heard[request], truth[request]
        assert got.tokens == right.tokens[: len(got.tokens)]
        heard[request] = right
    assert_same(heard, truth)
    if is_same:
        assert driver.seen["all right"]
        assert not driver.seen["some right"]
        assert not driver.seen["none right"]
    else:
        assert_anew(other, proposer.guesses[:: len(proposer.guesses) // 8 + 1])
        SEEN.update(driver.seen)


def assert_anew(draft: DecoderModel, guesses: list[Guess]) -> None:
    """Guesses are those of a model that computes all that is known anew."""
    runner = make_runner(draft)
    for guess in guesses:
        wish = WISHES[guess.known[0]]
        output = guess.known[len(wish.prompt) :]
        sampling = msgspec.structs.replace(wish.sampling, logprobs=None, prompt_logprobs=None)
        blocks = range(1, 1 + BLOCKS_OF_A_ROW)
        row = make_row(0, wish.prompt, sampling, output=output, blocks=blocks, seed=guess.known[0])
        plan, sampled = make_plan([row], {0: len(guess.known)}, removed=[0]), []
        for _ in guess.drafts:
            sampled += np.frombuffer(runner.execute(plan).token_ids, "<i4").tolist()
            plan = make_plan(num_tokens=1)
        assert guess.drafts == sampled


SEEN: Counter[str] = Counter()


def test_drafts_of_the_other_model_were_right_and_wrong() -> None:
    """Runs behind the property above, which draws enough of each even in few examples."""
    kinds = {"none right", "some right", "all right", "preempted"}
    assert kinds <= {kind for kind, count in SEEN.items() if count}


def take_steps(runner: ModelRunner, row: int, prompt: list[int], cached: int, first: int) -> None:
    """Compute a prompt whose first tokens are cached in blocks from 1 on, and then drafts."""
    num_blocks = -(-(len(prompt) + 1 + MAX_DRAFTS) // BLOCK_SIZE)
    num_cached = cached // BLOCK_SIZE
    blocks = [*range(1, 1 + num_cached), *range(first, first + num_blocks - num_cached)]
    new = make_row(
        row, prompt, EngineSamplingParams(temperature=0.0), num_computed=cached, blocks=blocks
    )
    others = dict.fromkeys(range(row), 0)
    runner.execute(make_plan([new], others | {row: len(prompt) - cached}))
    runner.execute(make_plan(chunks=others | {row: 1 + MAX_DRAFTS}))


def test_a_prefix_hit_is_computed_where_nobody_drafted(model: DecoderModel) -> None:
    proposer = RecordingDraftModel(model, TorchKernels())
    runner = make_runner(model, proposer)
    prompt = [*range(3, 14)]
    take_steps(runner, 0, prompt, 0, first=1)
    assert proposer.num_computed == [12]
    # The second row's blocks have K and V of eight tokens, and then four are left.
    take_steps(runner, 1, prompt, 8, first=11)
    assert proposer.num_computed == [12, 4]
    # The first block is another one's by now, which did not draft.
    removed = make_plan(removed=[0, 1], num_tokens=0)
    runner.execute(removed)
    other = make_row(0, prompt[:5], EngineSamplingParams(temperature=0.0), blocks=[1, 9])
    runner.execute(make_plan([other], {0: 5}))
    take_steps(runner, 1, prompt, 8, first=11)
    assert proposer.num_computed == [12, 4, 12]


def test_rows_of_a_step_share_a_prefix(model: DecoderModel) -> None:
    proposer = RecordingDraftModel(model, TorchKernels())
    runner = make_runner(model, proposer)
    prompt, greedy = [*range(3, 14)], EngineSamplingParams(temperature=0.0)
    rows = [
        make_row(0, prompt, greedy, blocks=[1, 2, 3, 4]),
        make_row(1, prompt, greedy, num_computed=8, blocks=[1, 2, 5, 6]),
    ]
    runner.execute(make_plan(rows, {0: 11, 1: 3}))
    counts = {0: 1 + MAX_DRAFTS, 1: 1 + MAX_DRAFTS}
    output = runner.execute(make_plan(chunks=counts))
    assert proposer.num_computed == [12 + 4]
    assert output.counts == int32(counts.values())


def test_a_row_that_lags_catches_up_in_chunks(model: DecoderModel) -> None:
    budget = 8
    proposer = RecordingDraftModel(model, TorchKernels())
    runner = make_runner(model, proposer, budget=budget)
    prompt = [*range(3, 23)]
    blocks = range(1, 1 + BLOCKS_OF_A_ROW)
    row = make_row(0, prompt, EngineSamplingParams(temperature=0.0), blocks=blocks)
    for first in range(0, 16, budget):
        runner.execute(make_plan([row] if first == 0 else [], {0: budget}))
    runner.execute(make_plan(chunks={0: 4}))
    counts = []
    for _ in range(6):
        output = runner.execute(make_plan(chunks={0: 1 + MAX_DRAFTS}))
        counts += np.frombuffer(output.counts, "<i4").tolist()
    assert proposer.num_computed[:2] == [budget, budget]
    assert counts[-2:] == [1 + MAX_DRAFTS] * 2
