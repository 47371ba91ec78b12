"""Rows with edited logits or with masks sample the same whatever else runs, wherever they run.

Which tokens a row with a mask may sample follows from the tokens that it has sampled, as a grammar
has it; so a mask that is told too early, or to another row, shows. Plans are those of the real
scheduler, with chunks, common prefixes and preemptions. Each row's tokens alone are compared, step
by step, with what the reference makes of the model's own logits, and others with these.
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
from numpy.typing import NDArray
from torch import Tensor

from nanocore.kernels.candidates import NO_TOKEN
from nanocore.kernels.logit_edits import LogitEdits
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.communication.communicator import Communicator, SingleRank
from nanocore.worker.placement import Placement
from nanocore.worker.plan import ModelRunnerOutput, NewRow, SchedulerOutput, TokenMasks
from nanocore.worker.step.model_runner import ModelRunner
from tests.campaign import in_campaign
from tests.fake_device import FakeGraphRecorder, FakeStream
from tests.logit_edits_reference import EditedRow, places_of
from tests.sampling_reference import make_rows, sample_whole
from tests.step_plans import int32, make_plan
from tests.tiny_models import make_tiny_qwen3
from tests.worker.device_engine import DeviceKernels
from tests.worker.masked_steps import Allowed, pack_masks, run_masked
from tests.worker.planned_rows import Said
from tests.worker.ranks import run_ranks
from tests.worker.running import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Script,
    World,
    make_runner,
    record_logits,
    write_script,
)

MAX_TOKENS = 14
CHUNK_TOKENS = 40
PLACEMENT = Placement(torch.float32, torch.device("cpu"))
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.4, "frequency_penalty": 1.1, "presence_penalty": 0.6,
}  # fmt: skip
EDITED: list[dict[str, Any]] = [
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
MASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 1.1, "top_p": 0.8, "top_k": 20},
    {"temperature": 0.0, "repetition_penalty": 1.4, "presence_penalty": 0.8,
     "logit_bias": [(i, 5.0) for i in range(40)]},
    {"temperature": 0.9},
    {"temperature": 1.3, "min_p": 0.02, "bad_words_token_ids": [[3], [4, 5]]},
    {"temperature": 0.8},
    {"temperature": 0.7},
]  # fmt: skip
STOPS = tuple(range(0, 256, 2))
"""Of edited rows. Many, so that the tokens that min_tokens forbid would be sampled."""


def make_rows_of(asked: list[dict[str, Any]], seed: int, stops: tuple[int, ...]) -> list[EditedRow]:
    """Rows of which each other one begins with a common prefix."""
    rng = np.random.default_rng(seed)
    common = rng.integers(0, 256, 40).tolist()
    prompts = [
        (common if i % 2 else []) + rng.integers(0, 256, 45 + 3 * i).tolist()
        for i in range(len(asked))
    ]
    return [
        EditedRow(prompt, [], EngineSamplingParams(**requested), stops)
        for prompt, requested in zip(prompts, asked, strict=True)
    ]


ROWS = make_rows_of(MASKED, 7, ()) + make_rows_of(EDITED, 4, STOPS)
EVERY = list(range(len(MASKED)))
"""Those with masks, but for FREE ones."""
FREE = 4
EVERY_EDITED = list(range(len(MASKED), len(ROWS)))
VOCAB_SIZE = 384
TOKENS = np.arange(VOCAB_SIZE)


def has_masks(row: int) -> bool:
    return row in EVERY and row != FREE


def allowed_after(row: int, output: Sequence[int]) -> NDArray[np.bool_] | None:
    last = output[-1] if output else row
    if not has_masks(row) or (row == 7 and len(output) % 2):
        return None
    if row == 6:  # one token alone
        return (37 * last + len(output)) % VOCAB_SIZE == TOKENS
    return (TOKENS + last) % 5 == row % 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), head_dim=16)


@pytest.fixture(scope="module", params=["cpu", *in_campaign("torch")])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def plan_of(counts: Sequence[int], new: Sequence[NewRow] = (), **more: Any) -> SchedulerOutput:
    chunks = {row: count for row, count in enumerate(counts) if count != 1}
    return make_plan(
        new, chunks, num_tokens=sum(counts), **{"step": 5, "awaits_masks": True} | more
    )


def new_rows(chosen: Sequence[int], **more: Any) -> list[NewRow]:
    rows, num_blocks = [], 0
    for k, i in enumerate(chosen):
        sampling = msgspec.structs.replace(ROWS[i].sampling, **more)
        num_tokens = len(ROWS[i].prompt) + MAX_TOKENS
        start, num_blocks = num_blocks, num_blocks - -num_tokens // BLOCK_SIZE
        new = replace(ROWS[i], sampling=sampling).new_row(k, seed=i)
        rows.append(msgspec.structs.replace(new, block_ids=int32(range(start, num_blocks))))
    assert num_blocks <= NUM_BLOCKS
    return rows


def alone(runner: ModelRunner, row: int, **more: Any) -> Said:
    said, last = Said(), len(ROWS[row].prompt) - CHUNK_TOKENS
    awaits = has_masks(row)
    plans = [
        plan_of([CHUNK_TOKENS], new_rows([row], **more), removed=range(8), awaits_masks=awaits),
        plan_of([last], awaits_masks=awaits),
        *[plan_of([1], awaits_masks=awaits)] * (MAX_TOKENS - 1),
    ]

    def allowed(_: int, rows: list[int]) -> Allowed:
        mask = allowed_after(row, said.tokens.get(0, []))
        return {0: mask} if rows and mask is not None else {}

    run_masked(runner, plans, allowed, lambda _, output: said.take(output))
    return said


@pytest.fixture(scope="module")
def tokens(folder: Path, backend: str) -> list[list[int]]:
    runner = make_runner(folder, PLACEMENT, backend=backend)
    assert runner.config.vocab_size == VOCAB_SIZE
    logits: list[Tensor] = []
    assert runner.sampler is not None
    record_logits(runner.sampler, logits)
    outputs = []
    for row in range(len(ROWS)):
        logits.clear()
        outputs.append(alone(runner, row).tokens[0])
        for k, logits_RV in enumerate(logits):
            assert outputs[-1][k] == by_reference(row, outputs[-1][:k], logits_RV)
    return outputs


def by_reference(row: int, output: list[int], logits_RV: Tensor) -> int:
    edited = replace(ROWS[row], output=output)
    edited_V = edited.edited(logits_RV[0].numpy())
    mask = allowed_after(row, output)
    if mask is not None:
        edited_V[~mask] = -np.inf
    requested = edited.sampling
    settings = requested.temperature, requested.top_k, requested.top_p, requested.min_p
    rows = make_rows([settings], VOCAB_SIZE, [row])
    return int(
        sample_whole(torch.from_numpy(edited_V)[None], rows, places_of([edited]).positions_R)
    )


def test_every_mask_shows_in_the_tokens(tokens: list[list[int]], folder: Path) -> None:
    for row in EVERY:
        for k, token_id in enumerate(tokens[row]):
            mask = allowed_after(row, tokens[row][:k])
            assert mask is None or mask[token_id]
        assert len(set(tokens[row])) > 3
    assert tokens[4] != tokens[1]


def test_every_edit_shows_in_the_tokens(tokens: list[list[int]]) -> None:
    edited = tokens[len(MASKED) :]
    assert len(set(edited[0])) > 10
    assert edited[2] == [7] * 8 + [8] * 6  # which is a stop
    assert set(edited[6]) <= {3, 5, 8, 250}
    assert edited[7].count(9) + edited[7].count(10) >= 8  # or both end a bad sequence
    for row, output in zip(ROWS[len(MASKED) :], edited, strict=True):
        for bad in row.sampling.bad_words_token_ids:
            ends = [output[k : k + len(bad)] for k in range(MAX_TOKENS)]
            assert bad not in ends
    assert all(NO_TOKEN not in row for row in tokens)


def script_of(tokens: list[list[int]], chosen: Sequence[int], num_groups: int = 1) -> Script:
    """Plans of these rows together, of which those await masks that have some."""
    rows = [ROWS[i] for i in chosen]
    script = write_script(
        [row.prompt for row in rows],
        [tokens[i] for i in chosen],
        num_groups,
        [row.sampling for row in rows],
    )
    plans = [
        msgspec.structs.replace(
            plan, awaits_masks=any(has_masks(chosen[request]) for request, _ in samples.values())
        )
        for plan, samples in zip(script.plans, script.samples, strict=True)
    ]
    for plan in plans:
        plan.added[:] = [
            msgspec.structs.replace(
                new, seed=chosen[new.seed], stop_token_ids=list(rows[new.seed].stop_token_ids)
            )
            for new in plan.added
        ]
    return replace(script, plans=plans)


def run_script(
    runner: ModelRunner,
    script: Script,
    tokens: list[list[int]],
    chosen: Sequence[int],
    depth: int = 1,
) -> dict[int, list[int]]:
    by_place: dict[tuple[int, int], int] = {}

    def allowed(number: int, rows: list[int]) -> Allowed:
        samples = script.samples[number]
        assert sorted(rows) == sorted(samples)
        masks = {
            row: allowed_after(chosen[request], tokens[chosen[request]][:index])
            for row, (request, index) in samples.items()
        }
        found = {row: mask for row, mask in masks.items() if mask is not None}
        return dict(reversed(found.items()))  # any order will do

    def take(number: int, output: ModelRunnerOutput) -> None:
        rows, ids = (np.frombuffer(c, "<i4").tolist() for c in (output.rows, output.token_ids))
        for row, token_id in zip(rows, ids, strict=True):
            request, index = script.samples[number][row]
            assert by_place.setdefault((chosen[request], index), token_id) == token_id

    run_masked(runner, script.plans, allowed, take, depth)
    if not runner.placement.is_last_stage:
        return {}
    return {i: [by_place[i, k] for k in range(MAX_TOKENS)] for i in chosen}


@pytest.mark.parametrize(
    "chosen",
    [
        *(EVERY, EVERY_EDITED, EVERY_EDITED[::-1], [12, 8], [14, 11, 10]),
        *in_campaign(EVERY[::-1], [4, 6, 1], [3, 4, 0], [12, 3, 9, 4]),
    ],
    ids=str,
)
def test_neighbours_their_order_and_preemptions_change_no_token(
    folder: Path, tokens: list[list[int]], backend: str, chosen: list[int]
) -> None:
    script = script_of(tokens, chosen)
    if len(chosen) == len(EVERY):
        assert script.num_preemptions > 0
        assert script.num_cached_tokens > 0
    assert any(plan.awaits_masks for plan in script.plans) == any(map(has_masks, chosen))
    runner = make_runner(folder, PLACEMENT, backend=backend)
    assert run_script(runner, script, tokens, chosen) == {i: tokens[i] for i in chosen}


@pytest.mark.parametrize(
    ("chosen", "tp_size", "pp_size"),
    [(EVERY, 2, 1), (EVERY_EDITED, 2, 1), (EVERY_EDITED, 1, 2), *in_campaign((EVERY, 1, 2))],
    ids=str,
)
def test_ranks_and_stages_change_no_token(
    folder: Path,
    tokens: list[list[int]],
    backend: str,
    chosen: list[int],
    tp_size: int,
    pp_size: int,
) -> None:
    script = script_of(tokens, chosen, num_groups=pp_size)
    world = World(tp_size, pp_size)

    def run(rank: Communicator) -> dict[int, list[int]]:
        placement, links = world.join(rank.rank, torch.float32)
        runner = make_runner(folder, placement, links, backend=backend)
        return run_script(runner, script, tokens, chosen)

    *others, last = run_ranks(tp_size * pp_size, run)
    assert last == {i: tokens[i] for i in chosen}
    assert others == ([last] if tp_size > 1 else [{}])


@pytest.mark.parametrize("backend", ["cpu"], scope="module", indirect=True)
@pytest.mark.parametrize(
    ("rows", "has_graphs", "tp_size", "depth"),
    [
        ("masked", True, 1, 2),
        *(("edited", False, 1, 1), ("edited", True, 1, 1), ("edited", True, 2, 1)),
        *in_campaign(("masked", False, 1, 1), ("masked", True, 1, 1), ("masked", False, 1, 2)),
        *in_campaign(("masked", True, 1, 3), ("masked", True, 2, 2)),
    ],
)
def test_a_device_its_graphs_and_steps_ahead_change_no_token(
    folder: Path, tokens: list[list[int]], rows: str, has_graphs: bool, tp_size: int, depth: int
) -> None:
    order = EVERY_EDITED if rows == "edited" else [FREE, *(i for i in EVERY if i != FREE)]
    script = script_of(tokens, order)
    assert len({plan.awaits_masks for plan in script.plans}) == (1 if rows == "edited" else 2)

    def run(rank: Communicator) -> dict[int, list[int]]:
        stream = FakeStream(depth, FakeGraphRecorder() if has_graphs else None)
        placement = replace(PLACEMENT, tp=rank)
        runner = make_runner(folder, placement, kernels=DeviceKernels(), stream=stream)
        outputs = run_script(runner, script, tokens, order, depth)
        assert stream.longest == min(depth, 2)  # masks need the result before
        return outputs

    assert run_ranks(tp_size, run) == [{i: tokens[i] for i in order}] * tp_size


def device_runner(folder: Path, depth: int = 1, placement: Placement = PLACEMENT) -> ModelRunner:
    stream = FakeStream(depth, FakeGraphRecorder())
    return make_runner(folder, placement, kernels=DeviceKernels(), stream=stream)


@pytest.mark.campaign
def test_log_probabilities_are_of_logits_without_masks(folder: Path) -> None:
    runner = make_runner(folder, PLACEMENT)
    logits: list[Tensor] = []
    assert runner.sampler is not None
    record_logits(runner.sampler, logits)
    for row in (0, 2, 3):
        logits.clear()
        said = alone(runner, row, logprobs=2, prompt_logprobs=3)
        sampled = [one for one in logits if len(one)]
        for token_id, (_, ids, values), logits_RV in zip(
            said.tokens[0], said.logprobs[0], sampled, strict=True
        ):
            expected_V = logits_RV[0].log_softmax(dim=0)
            likely = expected_V.topk(2).indices.tolist()
            assert ids == [token_id, *likely]
            torch.testing.assert_close(torch.tensor(values), expected_V[ids])
        assert len(said.prompt_logprobs[0]) == len(ROWS[row].prompt) - 1
        on_device = alone(device_runner(folder), row, logprobs=2, prompt_logprobs=3)
        assert on_device.tokens == said.tokens
        for name in ("logprobs", "prompt_logprobs"):
            for ours, theirs in zip(
                getattr(on_device, name)[0], getattr(said, name)[0], strict=True
            ):
                assert ours[:2] == theirs[:2]
                assert ours[2] == pytest.approx(theirs[2], abs=1e-4)


def first_plan(chosen: Sequence[int], removed: Sequence[int] = range(8)) -> SchedulerOutput:
    """The ends of these rows' prompts; each samples a token."""
    new = new_rows(chosen)
    return plan_of(
        [9] * len(new), [computed(n, n.num_prompt_tokens - 9) for n in new], removed=removed
    )


def computed(new: NewRow, num_tokens: int) -> NewRow:
    return msgspec.structs.replace(new, num_computed_tokens=num_tokens)


@pytest.mark.parametrize("where", ["cpu", *in_campaign("torch", "device")])
@pytest.mark.parametrize("tp_size", [2, *in_campaign(1)])
def test_a_row_that_may_sample_nothing_has_no_token_and_its_neighbours_have_theirs(
    folder: Path, where: str, tp_size: int
) -> None:
    rows = [0, 1, 2, 3, 4]
    nothing, one = np.zeros(VOCAB_SIZE, bool), np.arange(VOCAB_SIZE) == VOCAB_SIZE - 1

    def first_tokens(runner: ModelRunner, allowed: Allowed) -> list[int]:
        pending = runner.begin(first_plan(rows))
        pending.sample(pack_masks(5, allowed))
        output = pending.wait()
        assert np.frombuffer(output.rows, "<i4").tolist() == rows
        return np.frombuffer(output.token_ids, "<i4").tolist()

    def run(rank: Communicator) -> None:
        placement = replace(PLACEMENT, tp=rank)
        if where == "device":
            runner = device_runner(folder, placement=placement)
        else:
            runner = make_runner(folder, placement, backend=where)
        free = first_tokens(runner, {})
        assert NO_TOKEN not in free
        masked = first_tokens(runner, {3: nothing, 0: nothing, 1: one, 2: one})
        assert masked == [NO_TOKEN, VOCAB_SIZE - 1, VOCAB_SIZE - 1, NO_TOKEN, free[4]]
        masked = first_tokens(runner, {0: one, 1: nothing, 2: nothing, 3: one, 4: one})
        assert masked == [VOCAB_SIZE - 1, NO_TOKEN, NO_TOKEN, VOCAB_SIZE - 1, VOCAB_SIZE - 1]

    run_ranks(tp_size, run)


def test_nothing_is_done_for_masks_in_steps_that_await_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are sampled once, in the second phase if there is one."""
    stream, sampled = FakeStream(1), list[int]()
    staged: list[tuple[int, ...]] = []
    stage = stream.stage
    monkeypatch.setattr(
        stream,
        "stage",
        lambda *size, **phase: (staged.append(tuple(phase)), stage(*size, **phase))[1],
    )
    runner = make_runner(folder, PLACEMENT, kernels=DeviceKernels(), stream=stream)
    assert runner.sampler is not None
    sample_plain = runner.sampler.sample_plain

    def counting(logits_RV: Tensor, *args: Any, **more: Any) -> Tensor:
        sampled.append(len(logits_RV))
        return sample_plain(logits_RV, *args, **more)

    monkeypatch.setattr(runner.sampler, "sample_plain", counting)
    plan = first_plan([0, 1, 4])
    runner.execute(msgspec.structs.replace(plan, awaits_masks=False))
    assert (sampled, staged) == ([3], [()])
    pending = runner.begin(plan)
    pending.sample(pack_masks(5, {1: TOKENS < 9}))
    pending.wait()
    assert (sampled, staged) == ([3, 3], [(), (), ("phase",)])


@pytest.mark.parametrize("where", ["host", "device"])
def test_what_an_engine_may_not_do_is_told(folder: Path, where: str) -> None:
    def begun(**changes: Any) -> tuple[ModelRunner, Any]:
        runner = device_runner(folder) if where == "device" else make_runner(folder, PLACEMENT)
        plan = msgspec.structs.replace(first_plan([0, 4]), **changes)
        return runner, runner.begin(plan)

    mask = np.ones(VOCAB_SIZE, bool)
    good = pack_masks(5, {1: mask})
    runner, pending = begun()
    with pytest.raises(AssertionError, match="step 5 awaits masks"):
        pending.wait()
    nothing = plan_of([], step=6, awaits_masks=False)
    with pytest.raises(AssertionError, match="step 6: the one before it awaits masks"):
        runner.begin(nothing)
    with pytest.raises(AssertionError, match="masks of step 7 for step 5"):
        pending.sample(pack_masks(7, {}))
    pending.sample(good)
    with pytest.raises(AssertionError, match="step 5 awaits no masks"):
        pending.sample(good)
    pending.wait()
    with pytest.raises(AssertionError, match="step 6 has no tokens and awaits masks"):
        runner.begin(msgspec.structs.replace(nothing, awaits_masks=True))
    with pytest.raises(AssertionError, match="step 5 awaits no masks"):
        begun(awaits_masks=False)[1].sample(good)
    bad: dict[str, TokenMasks] = {
        r"masks of rows \[3\], more than it samples": pack_masks(5, {0: mask, 3: mask}),
        "11 words of masks of 1 rows, which have 12 each": pack_masks(5, {1: mask[:352]}),
        r"masks of rows \[1\], more than it samples": TokenMasks(
            step=5, rows=int32([1, 1]), words=good.words * 2
        ),
    }
    for words, masks in bad.items():
        with pytest.raises(AssertionError, match=words):
            begun()[1].sample(masks)


def test_a_stage_that_does_not_sample_awaits_nothing(folder: Path) -> None:
    placement, links = World(1, 2).join(0, torch.float32)
    assert isinstance(placement.tp, SingleRank)
    pending = make_runner(folder, placement, links).begin(first_plan([0]))
    assert pending.is_done()
    assert not pending.awaits_masks


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
    monkeypatch.setattr(
        stream, "stage", lambda layout: (staged.append(layout.num_bytes), stage(layout))[1]
    )
    runner = make_runner(folder, PLACEMENT, kernels=CountingKernels(), stream=stream)
    row_bytes = []
    for requested in ({}, {"top_p": 0.9}, {"presence_penalty": 1.0}, {"logit_bias": [(3, 1.0)]}):
        row = EditedRow([5, 6, 7], [], EngineSamplingParams(temperature=0.5, **requested))
        new = msgspec.structs.replace(row.new_row(0), block_ids=int32([0]))
        runner.execute(plan_of([3], [new], awaits_masks=False))
        runner.execute(plan_of([1], awaits_masks=False))
        row_bytes.append(staged[-1])
        runner.execute(plan_of([], removed=[0], awaits_masks=False))
    # An index; then starts of four lists of one row, and those of no bad words; then a bias. Each
    # column takes whole pieces of 16 bytes.
    assert [size - row_bytes[0] for size in row_bytes] == [0, 16, 16 + 48, 16 + 48]
    assert edited == [1] * 4
