"""Rows whose logits are edited get the same tokens whatever else runs, wherever they run.

The model runner is given plans of the real scheduler, of the rows below: with chunks, common
prefixes, preemptions, neighbours and without. Each row's tokens are compared with those that it
gets alone, and these, step by step, with what the reference makes of the model's own logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from nanocore.kernels.candidates import NO_TOKEN
from nanocore.kernels.logit_edits import LogitEdits
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.communication.communicator import Communicator
from nanocore.worker.model_runner import DeviceQueue, ModelRunner
from nanocore.worker.placement import Placement
from nanocore.worker.plan import SchedulerOutput
from tests.fake_device import FakeGraphRecorder, FakeStream
from tests.logit_edits_reference import EditedRow, places_of
from tests.sampling_reference import make_rows, sample_whole
from tests.tiny_models import MAX_MODEL_LEN, make_tiny_qwen3
from tests.worker.device_engine import DeviceKernels
from tests.worker.ranks import run_ranks
from tests.worker.running import (
    BLOCK_SIZE,
    Sample,
    Script,
    make_runner,
    record_logits,
    run_script,
    write_script,
)

MAX_TOKENS = 14
CHUNK_TOKENS = 40
"""The first ones of a prompt, which is longer."""
STOPS = tuple(range(0, 256, 2))
"""Many, so that the tokens that min_tokens forbid would be sampled."""

PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.4, "frequency_penalty": 1.1, "presence_penalty": 0.6,
}  # fmt: skip
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0, **PENALTIES},
    {"temperature": 0.0},
    {"temperature": 0.9, "min_tokens": 8, "logit_bias": [(7, 28.0), (8, 58.0)]},
    {"temperature": 1.2, "top_k": 30, "top_p": 0.9},
    {
        "temperature": 0.7, "top_p": 0.95, "min_p": 0.01, "min_tokens": 3, **PENALTIES,
        "logit_bias": [(i, 6.0) for i in range(20)],
        "bad_words_token_ids": [[3], [4, 5], [5, 4], [6, 7, 8], [1, 1], [2, 2]],
    },
    {"temperature": 0.9},
    {"temperature": 0.8, "allowed_token_ids": [3, 5, 8, 250], "bad_words_token_ids": [[3, 3]]},
    {"temperature": 0.0, "logit_bias": [(9, 70.0), (10, 69.0)],
     "bad_words_token_ids": [[9, 9, 10, 9], [9, 9, 9], [9, 10, 10]]},
]  # fmt: skip


def make_edited_rows() -> list[EditedRow]:
    rng = np.random.default_rng(4)
    common = rng.integers(0, 256, 40).tolist()
    return [
        EditedRow(
            (common if i % 2 else []) + rng.integers(0, 256, 45 + 3 * i).tolist(),
            [],
            EngineSamplingParams(**requested),
            STOPS,
        )
        for i, requested in enumerate(ASKED)
    ]


ROWS = make_edited_rows()
PLACEMENT = Placement(torch.float32, torch.device("cpu"))
Tokens = list[list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), head_dim=16)


def make_plan(num_tokens: int, chunk: int = 0, **differences: Any) -> SchedulerOutput:
    column = np.array([0][: chunk > 0], "<i4")
    return SchedulerOutput(
        step=0,
        removed_rows=differences.get("removed_rows", b""),
        added=differences.get("added", []),
        block_rows=b"",
        block_ids=b"",
        chunk_rows=column.tobytes(),
        chunk_counts=(column + chunk).tobytes(),
        num_tokens=num_tokens,
    )


def alone(runner: ModelRunner, row: EditedRow, seed: int, logits: list[Tensor]) -> list[int]:
    """A row's tokens, each of which is what the reference samples from the logits of its step.

    logits: where the runner records them.
    """
    blocks = np.arange(-(-MAX_MODEL_LEN // BLOCK_SIZE)).astype("<i4").tobytes()
    new = msgspec.structs.replace(row.new_row(0, seed), block_ids=blocks)
    last = len(row.prompt) - CHUNK_TOKENS
    runner.execute(make_plan(CHUNK_TOKENS, CHUNK_TOKENS, added=[new]))
    plan = make_plan(last, last)
    for _ in range(MAX_TOKENS):
        (token_id,) = np.frombuffer(runner.execute(plan).token_ids, "<i4").tolist()
        assert token_id == by_reference(row, logits.pop(), seed)
        row = replace(row, output=[*row.output, token_id])
        plan = make_plan(1)
    runner.execute(make_plan(0, removed_rows=np.zeros(1, "<i4").tobytes()))
    return row.output


def by_reference(row: EditedRow, logits_RV: Tensor, seed: int) -> int:
    edited_RV = torch.from_numpy(row.edited(logits_RV[0].numpy()))[None]
    requested = row.sampling
    settings = requested.temperature, requested.top_k, requested.top_p, requested.min_p
    sampled = make_rows([settings], edited_RV.shape[1], [seed])
    return int(sample_whole(edited_RV, sampled, places_of([row]).positions_R))


@pytest.fixture(scope="module", params=["cpu", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def tokens(folder: Path, backend: str) -> Tokens:
    runner = make_runner(folder, PLACEMENT, backend=backend)
    logits: list[Tensor] = []
    assert runner.sampler is not None
    record_logits(runner.sampler, logits)
    return [alone(runner, row, i, logits) for i, row in enumerate(ROWS)]


def script_of(tokens: Tokens, chosen: Sequence[int], num_groups: int = 1) -> Script:
    """Plans of these rows together, in this order; seeds and stops are their own."""
    script = write_script(
        [ROWS[i].prompt for i in chosen],
        [tokens[i] for i in chosen],
        num_groups,
        [ROWS[i].sampling for i in chosen],
    )
    for plan in script.plans:
        for k, new in enumerate(plan.added):
            plan.added[k] = msgspec.structs.replace(
                new, seed=chosen[new.seed], stop_token_ids=list(STOPS)
            )
    return script


def said(samples: Sequence[Sample], chosen: Sequence[int]) -> dict[int, list[int]]:
    """Tokens by row; a token that was sampled twice is the same."""
    by_place: dict[tuple[int, int], int] = {}
    for sample in samples:
        place = chosen[sample.request], sample.index
        assert by_place.setdefault(place, sample.token_id) == sample.token_id
    return {i: [by_place[i, k] for k in range(MAX_TOKENS)] for i in chosen}


EVERY = list(range(len(ROWS)))


def test_every_edit_shows_in_the_tokens(tokens: Tokens, folder: Path, backend: str) -> None:
    assert len(set(tokens[0])) > 10
    assert tokens[2] == [7] * 8 + [8] * 6  # which is a stop
    assert set(tokens[6]) <= {3, 5, 8, 250}
    assert tokens[7].count(9) + tokens[7].count(10) >= 8  # or both end a bad sequence
    for row, output in zip(ROWS, tokens, strict=True):
        for bad in row.sampling.bad_words_token_ids:
            ends = [output[k : k + len(bad)] for k in range(MAX_TOKENS)]
            assert bad not in ends
    assert all(NO_TOKEN not in row for row in tokens)


@pytest.mark.parametrize("chosen", [EVERY, EVERY[::-1], [4, 0], [6, 3, 2]], ids=str)
def test_neighbours_their_order_and_preemptions_change_no_token(
    folder: Path, tokens: Tokens, backend: str, chosen: list[int]
) -> None:
    script = script_of(tokens, chosen)
    if len(chosen) == len(ROWS):
        assert script.num_preemptions > 0
        assert script.num_cached_tokens > 0
    samples = run_script(folder, script, backend=backend)
    assert said(samples, chosen) == {i: tokens[i] for i in chosen}


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2)])
def test_ranks_and_stages_change_no_token(
    folder: Path, tokens: Tokens, backend: str, tp_size: int, pp_size: int
) -> None:
    script = script_of(tokens, EVERY, num_groups=pp_size)
    samples = run_script(folder, script, tp_size, backend=backend)
    assert said(samples, EVERY) == dict(enumerate(tokens))


def on_a_device(
    folder: Path, script: Script, has_graphs: bool, tp_size: int
) -> dict[int, list[int]]:
    """Tokens by row of a device that runs behind the host, or of ranks that have one each."""

    def run(rank: Communicator) -> list[Sample]:
        queue = DeviceQueue(FakeStream(1), FakeGraphRecorder() if has_graphs else None)
        placement = replace(PLACEMENT, tp=rank)
        runner = make_runner(folder, placement, kernels=DeviceKernels(), queue=queue)
        samples = []
        for plan, expected in zip(script.plans, script.samples, strict=True):
            result = runner.execute(plan)
            rows, token_ids = (np.frombuffer(c, "<i4") for c in (result.rows, result.token_ids))
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                samples.append(Sample(*expected[row], token_id, torch.empty(0)))
        return samples

    results = [said(samples, EVERY) for samples in run_ranks(tp_size, run)]
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("backend", ["torch"], scope="module", indirect=True)
@pytest.mark.parametrize(("has_graphs", "tp_size"), [(False, 1), (True, 1), (True, 2)])
def test_a_device_and_its_graphs_change_no_token(
    folder: Path, tokens: Tokens, has_graphs: bool, tp_size: int
) -> None:
    script = script_of(tokens, EVERY)
    assert on_a_device(folder, script, has_graphs, tp_size) == dict(enumerate(tokens))


def test_steps_stage_and_launch_nothing_for_rows_that_ask_for_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited: list[int] = []

    class CountingKernels(DeviceKernels):
        def edit_logits(self, logits_RV: Tensor, edits: LogitEdits) -> None:
            edited.append(len(logits_RV))
            super().edit_logits(logits_RV, edits)

    stream = FakeStream(1)
    staged: list[int] = []
    stage = stream.stage
    monkeypatch.setattr(stream, "stage", lambda size: (staged.append(size), stage(size))[1])
    runner = make_runner(folder, PLACEMENT, kernels=CountingKernels(), queue=DeviceQueue(stream))
    row_bytes = []
    for requested in ({}, {"top_p": 0.9}, {"presence_penalty": 1.0}, {"logit_bias": [(3, 1.0)]}):
        row = EditedRow([5, 6, 7], [], EngineSamplingParams(temperature=0.5, **requested))
        new = msgspec.structs.replace(row.new_row(0), block_ids=np.zeros(1, "<i4").tobytes())
        runner.execute(make_plan(3, 3, added=[new]))
        runner.execute(make_plan(1))
        row_bytes.append(staged[-1])
        runner.execute(make_plan(0, removed_rows=np.zeros(1, "<i4").tobytes()))
    # Starts of four lists of one row, and those of no bad words; then a bias.
    assert [size - row_bytes[0] for size in row_bytes] == [0, 0, 36, 44]
    assert edited == [1] * 4
