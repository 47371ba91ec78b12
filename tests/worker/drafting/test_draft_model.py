"""A draft model beside the served one: its drafts are what a model of its weights would sample.

With the served model's own weights every draft is right, whatever the rows ask for, which shows
that K and V, positions and sampling are those of the served model. With others the tokens are those
of plain decoding all the same.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanocore.kernels.interface import Kernels
from nanocore.kernels.kv_quantization import kv_cache_format
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.worker.communication.communicator import SingleRank
from nanocore.worker.drafting.draft_model import DraftModel
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.step.model_runner import ModelRunner
from nanocore.worker.step.stream import Stream
from tests.campaign import examples
from tests.fake_device import FakeGraphRecorder, FakeStream
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
    return load_model(make_tiny_qwen3(tmp_path_factory.mktemp("other"), head_dim=24))


@pytest.fixture(scope="module")
def truth(model: DecoderModel) -> list[Heard]:
    heard = [Heard() for _ in WISHES]
    for request in REQUESTS:
        heard[request] = alone(model, request)
    return heard


def make_runner(
    model: DecoderModel,
    draft: DecoderModel,
    stream: Stream | None = None,
    kernels: Kernels | None = None,
    budget: int = 120,
) -> ModelRunner:
    kernels = kernels or TorchKernels()
    proposer = DraftModel(draft, kernels, SingleRank())
    runner = ModelRunner(model, kernels, stream=stream, max_drafts=MAX_DRAFTS, proposer=proposer)
    num_blocks = 1 + NUM_ROWS * BLOCKS_OF_A_ROW
    kv_format = kv_cache_format("auto", torch.float32)
    runner.allocate(kv_format, num_blocks, BLOCK_SIZE, NUM_ROWS, BLOCKS_OF_A_ROW * BLOCK_SIZE)
    runner.capture(budget)
    return runner


@settings(max_examples=examples(20), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    depth=st.integers(0, 3),
    has_graphs=st.booleans(),
    is_same=st.booleans(),
)
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
    draft = model if is_same else other
    runner = make_runner(model, draft, stream, DeviceKernels() if depth else None)
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
