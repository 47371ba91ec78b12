"""Log probabilities of generated tokens and of prompts: right, however they come about.

The reference is transformers' logits of the whole text. On native kernels they are the same bits in
any chunks and beside any neighbours, and asking changes no token.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from nanocore.kernels.torch.backend import TorchKernels
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.placement import Placement
from nanocore.worker.sampling import slot_outputs
from nanocore.worker.step import step_graphs
from nanocore.worker.step.model_runner import ModelRunner
from tests.fake_device import FakeGraphRecorder, FakeStream
from tests.step_plans import make_plan
from tests.tiny_models import VOCAB_SIZE, make_tiny_qwen3
from tests.worker.device_engine import DeviceKernels
from tests.worker.planned_rows import (
    Asking,
    Entry,
    Said,
    entries,
    new_row,
    run,
    run_ranks_of,
    write_plans,
)
from tests.worker.running import BLOCK_SIZE, make_runner


def asks(logprobs: int | None, prompt_logprobs: int | None, **more: Any) -> EngineSamplingParams:
    more = {"temperature": 0.0} | more
    return EngineSamplingParams(logprobs=logprobs, prompt_logprobs=prompt_logprobs, **more)


def make_requests() -> list[Asking]:
    """Few tokens and all of them, with and without what changes how a row samples, and neither."""
    rng = np.random.default_rng(7)
    samplings = [
        asks(3, 2),
        asks(None, None, temperature=0.9),
        asks(0, 0, temperature=1.2, top_k=30, top_p=0.9),
        asks(-1, None),
        asks(None, -1, temperature=0.7),
        asks(2, 100, temperature=1.0, min_p=0.05),
        asks(70, 1),
    ]
    lengths = [30, 12, 41, 9, 17, 33, 1]
    return [
        Asking(rng.integers(0, VOCAB_SIZE - 1, length).tolist(), sampling)
        for length, sampling in zip(lengths, samplings, strict=True)
    ]


REQUESTS = make_requests()
SILENT = [
    replace(
        request,
        sampling=msgspec.structs.replace(request.sampling, logprobs=None, prompt_logprobs=None),
    )
    for request in REQUESTS
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), head_dim=32)


def one_rank() -> Placement:
    return Placement(torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def native(folder: Path) -> ModelRunner:
    runner = make_runner(folder, one_rank())
    assert runner.is_captured
    return runner


@pytest.fixture(scope="module")
def said(native: ModelRunner) -> Said:
    return run(native, write_plans(REQUESTS, 64))


def assert_same(actual: Said, expected: Said) -> None:
    assert actual.tokens == expected.tokens
    for one, other in (
        (actual.logprobs, expected.logprobs),
        (actual.prompt_logprobs, expected.prompt_logprobs),
    ):
        assert one.keys() == other.keys()
        for row in one:
            for (rank, ids, numbers), right in zip(one[row], other[row], strict=True):
                assert (ids[:1], len(ids)) == (right[1][:1], len(right[1]))
                assert numbers == pytest.approx(right[2], abs=2e-4)
                if len(ids) < VOCAB_SIZE:  # else two of so many may be as good as equal
                    assert (rank, ids) == right[:2]


def test_they_are_those_of_transformers(folder: Path, said: Said) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for row, request in enumerate(REQUESTS):
        text = [*request.prompt, *said.tokens[row]]
        assert len(said.tokens[row]) == request.num_tokens
        with torch.no_grad():
            logprobs_LV = model(torch.tensor([text])).logits[0].log_softmax(dim=1)
        num_prompt = len(request.prompt)
        for entries_of_row, first, last, requested in (
            (said.logprobs.get(row, []), num_prompt, len(text), request.sampling.logprobs),
            (
                said.prompt_logprobs.get(row, []),
                1,
                num_prompt,
                request.sampling.prompt_logprobs,
            ),
        ):
            if requested is None:
                assert entries_of_row == []
                continue
            assert len(entries_of_row) == last - first
            for place, entry in zip(range(first, last), entries_of_row, strict=True):
                check_entry(entry, logprobs_LV[place - 1], text[place], requested)


def check_entry(entry: Entry, logprobs_V: Tensor, token: int, requested: int) -> None:
    rank, ids, numbers = entry
    order = logprobs_V.sort(descending=True, stable=True).indices
    assert ids[0] == token
    assert len(ids) == 1 + (VOCAB_SIZE if requested < 0 else requested)
    assert numbers == pytest.approx(logprobs_V[torch.tensor(ids)].tolist(), abs=2e-4)
    if requested < 0:
        assert sorted(ids[1:]) == list(range(VOCAB_SIZE))
    else:
        assert ids[1:] == order[:requested].tolist()
        assert rank == order.tolist().index(token) + 1


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_of_any_size_say_the_same_bits(native: ModelRunner, said: Said, chunk: int) -> None:
    assert run(native, write_plans(REQUESTS, chunk)) == said


def test_a_request_alone_says_the_same_bits(native: ModelRunner, said: Said) -> None:
    for row, request in enumerate(REQUESTS):
        others = [Asking([1], asks(None, None), 1)] * row  # whose rows come before
        alone = run(native, write_plans([*others, request], 64))
        assert alone.tokens[row] == said.tokens[row]
        assert alone.logprobs.get(row) == said.logprobs.get(row)
        assert alone.prompt_logprobs.get(row) == said.prompt_logprobs.get(row)


def test_asking_changes_no_token(native: ModelRunner, said: Said) -> None:
    """Steps with prompts' are computed kernel by kernel, and others are replayed."""
    silent = run(native, write_plans(SILENT, 64))
    assert silent == Said(said.tokens)


def test_nothing_is_made_where_no_row_asks(
    native: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nobody requested")

    run(native, write_plans(REQUESTS, 64))
    native.execute(make_plan(removed=range(len(REQUESTS))))
    monkeypatch.setattr(slot_outputs, "LogprobSlots", refuse)
    monkeypatch.setattr(slot_outputs, "SlotOutputs", refuse)
    assert len(run(native, write_plans(SILENT, 7)).tokens) == len(SILENT)


def test_prompts_are_looked_at_a_few_rows_at_a_time(
    native: ModelRunner, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_outputs, "MAX_ROWS", 5)
    sizes: list[int] = []
    logits = native.stage.logits

    def recording(hidden_RE: Tensor) -> Tensor:
        sizes.append(len(hidden_RE))
        return logits(hidden_RE)

    monkeypatch.setattr(native.stage, "logits", recording)
    assert run(native, write_plans(REQUESTS, 64)) == said
    assert max(sizes) <= len(REQUESTS)  # of rows that sample
    assert sum(sizes) > sum(map(len, said.prompt_logprobs.values()))


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_ranks_say_what_one_does(
    folder: Path, said: Said, tp_size: int, pp_size: int, chunk: int, backend: str
) -> None:
    """The first rank of the last stage, that is; the others say tokens at most."""
    plans = write_plans(REQUESTS, chunk, said.tokens, num_groups=pp_size)
    results = run_ranks_of(folder, plans, tp_size, pp_size, backend)
    assert_same(results[-tp_size], said)
    for result in (*results[:-tp_size], *results[len(results) - tp_size + 1 :]):
        assert result.logprobs == result.prompt_logprobs == {}


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("has_graphs", [False, True])
def test_steps_in_flight_on_a_device_say_the_same(
    folder: Path,
    said: Said,
    depth: int,
    chunk: int,
    has_graphs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_graphs, "MIXED_TOKENS", (16, 48))
    graph_capture = FakeGraphRecorder() if has_graphs else None
    stream = FakeStream(depth, graph_capture)
    runner = make_runner(folder, one_rank(), kernels=DeviceKernels(), stream=stream)
    plans = write_plans(REQUESTS, chunk)
    assert_same(run(runner, plans, depth), said)
    if graph_capture is not None:
        assert 0 < graph_capture.num_replays < len(plans)


def test_stages_on_devices_say_the_same(folder: Path, said: Said) -> None:
    plans = write_plans(REQUESTS, 7, said.tokens, num_groups=2)
    first, last = run_ranks_of(folder, plans, 1, 2, on_devices=True)
    assert first == Said()
    assert_same(last, said)


def test_what_is_known_of_a_prompt_is_not_told_again(native: ModelRunner, said: Said) -> None:
    request = REQUESTS[0]
    right = said.prompt_logprobs[0]
    prompt_len = len(request.prompt)
    free = range(len(REQUESTS))
    native.execute(make_plan(removed=free))
    native.execute(make_plan([new_row(0, request)], {0: 20}))
    resumed = new_row(0, request, num_computed=BLOCK_SIZE, num_prompt_logprobs=20)
    output = native.execute(make_plan([resumed], {0: prompt_len - BLOCK_SIZE}, removed=[0]))
    assert [entry for _, entry in entries(output.prompt_logprobs)] == right[20:]
    assert [entry for _, entry in entries(output.logprobs)] == said.logprobs[0][:1]
    # In the middle of its output there is nothing left of the prompt to tell.
    resumed = new_row(0, request, said.tokens[0][:2], 0, prompt_len - 1)
    output = native.execute(make_plan([resumed], {0: prompt_len + 2}, removed=[0]))
    assert output.prompt_logprobs is None
    assert [entry for _, entry in entries(output.logprobs)] == said.logprobs[0][2:3]


def test_a_chunk_before_the_end_of_a_prompt_tells_its_part_and_samples_nothing(
    native: ModelRunner, said: Said
) -> None:
    native.execute(make_plan(removed=range(len(REQUESTS))))
    output = native.execute(make_plan([new_row(0, REQUESTS[0])], {0: 10}))
    assert (output.rows, output.token_ids, output.logprobs) == (b"", b"", None)
    assert [entry for _, entry in entries(output.prompt_logprobs)] == said.prompt_logprobs[0][:10]


def test_computed_tokens_whose_logprobs_are_not_known_are_refused(native: ModelRunner) -> None:
    native.execute(make_plan(removed=range(len(REQUESTS))))
    new = new_row(0, REQUESTS[0], num_computed=16, num_prompt_logprobs=15)
    with pytest.raises(AssertionError, match="16 tokens are computed, of which 15 have prompt"):
        native.execute(make_plan([new], {0: 14}))
    native.execute(make_plan(removed=[0]))


@pytest.mark.parametrize("is_device", [False, True])
def test_a_row_without_a_token_has_no_entry_and_its_neighbours_have_theirs(
    folder: Path, said: Said, is_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = FakeStream(1) if is_device else None
    kernels = DeviceKernels() if is_device else TorchKernels()
    runner = make_runner(folder, one_rank(), kernels=kernels, stream=stream)
    logits = runner.model.compute_logits
    three = [replace(REQUESTS[row], num_tokens=1) for row in (0, 3, 5)]
    three = [
        replace(request, sampling=msgspec.structs.replace(request.sampling, prompt_logprobs=None))
        for request in three
    ]

    def spoil(hidden_RE: Tensor, kernels: Any) -> Tensor:
        logits_RV = logits(hidden_RE, kernels).clone()
        logits_RV[1] = torch.nan
        return logits_RV

    monkeypatch.setattr(runner.model, "compute_logits", spoil)
    rows = [new_row(row, request) for row, request in enumerate(three)]
    chunks = {row: len(request.prompt) for row, request in enumerate(three)}
    output = runner.execute(make_plan(rows, chunks))
    token_ids = np.frombuffer(output.token_ids, "<i4").tolist()
    assert token_ids[1] == -1
    found = dict(entries(output.logprobs))
    assert list(found) == [0, 2]
    for row, request in ((0, 0), (2, 5)):
        assert found[row][1][0] == token_ids[row]
        if row == 0:  # greedy: the seed, which is the row, does not matter
            assert found[row][:2] == said.logprobs[request][0][:2]


def test_a_row_that_joins_others_which_decode_has_its_entries(
    native: ModelRunner, said: Said
) -> None:
    first, second = REQUESTS[0], REQUESTS[3]
    native.execute(make_plan(removed=range(len(REQUESTS))))
    native.execute(make_plan([new_row(0, first)], {0: len(first.prompt)}))
    alone = make_plan(num_tokens=1)
    assert [row for row, _ in entries(native.execute(alone).logprobs)] == [0]
    begin = make_plan([new_row(3, second)], {0: 0, 3: len(second.prompt)})
    assert entries(native.execute(begin).logprobs) == [(3, said.logprobs[3][0])]
    both = make_plan(num_tokens=2)
    assert entries(native.execute(both).logprobs) == [
        (0, said.logprobs[0][2]),
        (3, said.logprobs[3][1]),
    ]
    left = make_plan(removed=[0], num_tokens=1)
    assert entries(native.execute(left).logprobs) == [(3, said.logprobs[3][2])]
