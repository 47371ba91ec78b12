"""Rows with drafts get the tokens that they get without, whatever the drafts are.

Drafts are right, wrong and half right; rows are aborted and preempted, sample with masks, edits and
log probabilities, and several steps are in flight on a device that is a fake.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanocore.kernels.interface import Kernels
from nanocore.kernels.kv_quantization import kv_cache_format
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.memory.kv_groups import joined_groups
from nanocore.worker.memory.kv_memory import KVLayout
from nanocore.worker.step import step_graphs
from nanocore.worker.step.drafts import verify
from nanocore.worker.step.model_runner import ModelRunner
from nanocore.worker.step.stream import Stream
from tests.campaign import examples, in_campaign
from tests.fake_device import FakeGraphRecorder, FakeStream
from tests.model_families import BUILDERS
from tests.tiny_models import make_tiny_qwen3
from tests.worker.device_engine import DeviceKernels, load_model
from tests.worker.drafted_plans import (
    BLOCK_SIZE,
    BLOCKS_OF_A_ROW,
    MAX_DRAFTS,
    NUM_ROWS,
    Driver,
    Heard,
    TruthTeller,
    Wish,
)


def make_wishes() -> list[Wish]:
    rng = np.random.default_rng(3)
    requested = [
        {"temperature": 0.0},
        {"temperature": 0.9, "logprobs": 2},
        {"temperature": 1.1, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 1},
        {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 1.1},
        {"temperature": 0.9, "presence_penalty": 0.6, "logit_bias": [(7, 9.0)], "logprobs": 1},
        {"temperature": 0.8, "bad_words_token_ids": [[3, 3]], "min_tokens": 3},
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.95},
    ]
    return [
        Wish(
            [i, *rng.integers(0, 300, int(rng.integers(1, 30))).tolist()],
            int(rng.integers(1, 14)),
            EngineSamplingParams(**one),
            (lambda output: (np.arange(384) + len(output)) % 6 < 2) if i >= 7 else None,
        )
        for i, one in enumerate(requested)
    ]


WISHES = make_wishes()


@pytest.fixture(scope="module", params=["qwen3", "qwen35", *in_campaign("lfm2")])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    folder = tmp_path_factory.mktemp("model")
    if request.param == "qwen3":
        return load_model(make_tiny_qwen3(folder, head_dim=16))
    return load_model(BUILDERS[request.param](folder))


@pytest.fixture(scope="module")
def truth(model: DecoderModel) -> list[Heard]:
    return [alone(model, request) for request in range(len(WISHES))]


@pytest.fixture(autouse=True)
def _short_mixed_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "MIXED_TOKENS", (8, 24))


def make_runner(
    model: DecoderModel,
    stream: Stream | None = None,
    proposer: TruthTeller | None = None,
    kernels: Kernels | None = None,
) -> ModelRunner:
    max_drafts = 0 if proposer is None else MAX_DRAFTS
    runner = ModelRunner(
        model, kernels or TorchKernels(), stream=stream, max_drafts=max_drafts, proposer=proposer
    )
    kv_format = kv_cache_format("auto", torch.float32)
    groups = joined_groups([KVLayout(model.cache_specs, kv_format, BLOCK_SIZE).groups])
    num_slabs = (1 + NUM_ROWS * BLOCKS_OF_A_ROW) * len(groups)
    sizes = BLOCK_SIZE, NUM_ROWS, BLOCKS_OF_A_ROW * BLOCK_SIZE
    runner.allocate(kv_format, num_slabs, *sizes, groups=groups)
    runner.capture(120)
    return runner


def alone(model: DecoderModel, request: int) -> Heard:
    driver = Driver(make_runner(model), WISHES, np.random.default_rng(0), 1, is_rough=False)
    return driver.run([request])[request]


def assert_same(heard: list[Heard], truth: list[Heard]) -> None:
    for got, right in zip(heard, truth, strict=True):
        assert got.tokens == right.tokens
        for ours, theirs in (
            (got.logprobs, right.logprobs),
            (got.prompt_logprobs, right.prompt_logprobs),
        ):
            assert [rank for rank, *_ in ours] == [rank for rank, *_ in theirs]
            assert [ids for _, ids, _ in ours] == [ids for _, ids, _ in theirs]
            for (*_, one), (*_, other) in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(one, other, atol=1e-4)


SEEN: Counter[str] = Counter()


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    depth=st.integers(0, 3),
    wrong=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    has_graphs=st.booleans(),
)
def test_any_drafts_give_the_tokens_of_none(
    model: DecoderModel, truth: list[Heard], seed: int, depth: int, wrong: float, has_graphs: bool
) -> None:
    proposer = TruthTeller(WISHES, wrong, seed)
    proposer.truth = [heard.tokens for heard in truth]
    stream = FakeStream(depth, FakeGraphRecorder() if has_graphs else None) if depth else None
    runner = make_runner(model, stream, proposer, DeviceKernels() if depth else None)
    rng = np.random.default_rng(seed)
    driver = Driver(runner, WISHES, rng, max(1, depth), MAX_DRAFTS, proposer)
    heard = driver.run([*rng.permutation(len(WISHES)).tolist()])
    for request in driver.aborted:
        got, right = heard[request], truth[request]
        assert got.tokens == right.tokens[: len(got.tokens)]
        heard[request] = right
    assert_same(heard, truth)
    SEEN.update(driver.seen)
    SEEN["aborted"] += len(driver.aborted)


def test_every_kind_of_step_was_among_them() -> None:
    """Runs behind the property above, which draws enough of each even in few examples."""
    kinds = {f"{count} drafts" for count in range(MAX_DRAFTS + 1)}
    kinds |= {"none right", "some right", "all right", "preempted", "aborted", "late", "in flight"}
    kinds |= {"planned drafts"}
    assert kinds <= {kind for kind, count in SEEN.items() if count}


def test_a_row_gets_its_tokens_up_to_the_first_that_was_not_its_draft() -> None:
    token_ids = torch.tensor([5, 6, 7, 5, 6, 9, 5, 5, -1, 8])
    owner = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 3, 3])
    drafted = torch.tensor([0, 1, 3, 6, 7, 8])
    drafts = torch.tensor([5, 6, 9, 5, 5, 4], dtype=torch.int32)
    starts = torch.tensor([0, 3, 5, 6])
    assert verify(token_ids, drafts, drafted, owner, starts).tolist() == [3, 1, 1, 2]
