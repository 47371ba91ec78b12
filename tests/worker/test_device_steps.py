"""Steps on a device that runs behind the host give the tokens of steps that are waited for.

The real scheduler plans up to three steps ahead; the device is a fake one, which runs a step when
its result is asked for and no earlier, so whatever the host took from a step in flight would be
wrong. Graphs are fakes that keep the host's values of their recording. The reference is the same
model on the host, one request at a time.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanocore.kernels.interface import Kernels
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.communication.communicator import Communicator
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.sampling.columns import kinds_of
from nanocore.worker.step import step_graphs
from nanocore.worker.step.step_graphs import graph_shapes
from nanocore.worker.step.step_memory import (
    STEP_FIELDS,
    Fields,
    StepShape,
    layout_of,
)
from tests.campaign import examples, in_campaign
from tests.fake_device import FakeGraphRecorder, FakeStream
from tests.fakes import Deliveries
from tests.model_families import BUILDERS
from tests.tiny_models import make_tiny_qwen3
from tests.worker.device_engine import (
    BLOCK_SIZE,
    BUDGET,
    MAX_NUM_SEQS,
    DeviceKernels,
    Engine,
    TritonEnds,
    Wish,
    expected,
    load_model,
)
from tests.worker.ranks import run_ranks
from tests.worker.running import World, make_runner, write_script


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return load_model(make_tiny_qwen3(tmp_path_factory.mktemp("model"), head_dim=16))


@pytest.fixture(autouse=True)
def _short_mixed_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "MIXED_TOKENS", (8, 24))


def check(tokens: dict[int, list[int]], right: dict[int, list[int]], wishes: list[Wish]) -> None:
    for handle, wish in enumerate(wishes):
        got = tokens.get(handle, [])
        if wish.abort_after is None:
            assert got == right[handle]
        else:  # it got what it got until it left
            assert got == right[handle][: len(got)]
            assert len(got) >= min(wish.abort_after, len(right[handle]))


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 380, length).tolist() for length in lengths]


MIXED = [
    Wish(prompt, max_tokens, EngineSamplingParams(temperature=heat, top_k=top_k, top_p=top_p))
    for prompt, (max_tokens, heat, top_k, top_p) in zip(
        prompts(1, 5, 23, 60, 9, 4, 30),
        [
            (9, 0.0, 0, 1.0),
            (1, 0.9, 0, 1.0),
            (12, 0.0, 0, 1.0),
            (6, 1.3, 5, 1.0),
            (17, 0.7, 0, 0.8),
            (3, 0.0, 0, 1.0),
            (8, 1.0, 3, 0.9),
        ],
        strict=True,
    )
]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("has_graphs", [False, True])
def test_steps_ahead_of_their_results_give_the_same_tokens(
    model: DecoderModel, depth: int, has_graphs: bool
) -> None:
    graph_capture = FakeGraphRecorder() if has_graphs else None
    engine = Engine(model, depth, graph_capture)
    check(engine.run(MIXED), expected(model, MIXED), MIXED)
    assert engine.stream.longest == depth
    if graph_capture is not None:
        assert graph_capture.num_records == len(
            graph_shapes("always", MAX_NUM_SEQS, BUDGET, BLOCK_SIZE)
        )
        assert graph_capture.num_replays > 10


@pytest.mark.parametrize(
    ("depth", "has_graphs"), [(2, True), *in_campaign((1, True), (2, False), (3, True))]
)
def test_masks_that_follow_from_the_result_before_give_the_same_tokens(
    model: DecoderModel, depth: int, has_graphs: bool
) -> None:
    wishes = [
        replace(
            wish,
            stop_token_ids=tuple(range(0, 384, 9)) if i == 2 else (),
            abort_after=3 if i == 4 else None,
            allowed=None if i == 3 else lambda output: (np.arange(384) + len(output)) % 6 == 0,
        )
        for i, wish in enumerate(MIXED)
    ]
    right = expected(model, wishes)
    assert all((token + k) % 6 == 0 for k, token in enumerate(right[0]))
    engine = Engine(model, depth, FakeGraphRecorder() if has_graphs else None)
    check(engine.run(wishes), right, wishes)
    assert engine.stream.longest == min(depth, 2)


@pytest.mark.campaign
def test_one_kernel_before_the_layers_and_one_after_give_the_same_tokens(
    model: DecoderModel,
) -> None:
    """Triton's, in graphs and without, of chunks, decodes and both."""
    wishes = [replace(wish, max_tokens=min(wish.max_tokens, 6)) for wish in MIXED]
    graph_capture = FakeGraphRecorder()
    engine = Engine(model, 3, graph_capture, num_blocks=26, kernels=TritonEnds())
    check(engine.run(wishes), expected(model, wishes), wishes)
    assert 0 < graph_capture.num_replays < engine.scheduler.counters.num_steps


def test_learned_positions_are_those_of_the_step_that_a_graph_replays(tmp_path: Path) -> None:
    model = load_model(BUILDERS["gpt2"](tmp_path))
    graph_capture = FakeGraphRecorder()
    check(Engine(model, 3, graph_capture).run(MIXED), expected(model, MIXED), MIXED)
    assert graph_capture.num_replays > 10


@pytest.mark.parametrize(
    "kernels",
    [
        pytest.param(DeviceKernels(), id="torch"),
        pytest.param(TritonEnds(), id="triton", marks=pytest.mark.campaign),
    ],
)
@pytest.mark.parametrize("num_blocks", [200, 6])
def test_states_are_those_of_the_steps_that_graphs_replay(
    num_blocks: int, kernels: Kernels, tmp_path: Path
) -> None:
    """Steps ahead compute tokens behind a request's end, and that of one that is preempted."""
    model = load_model(BUILDERS["lfm2"](tmp_path))
    wishes = MIXED[:4] + [Wish(MIXED[3].prompt[:48] + [i] * 9, 15 + i) for i in range(3)]
    (whole,) = expected(model, wishes[-1:]).values()
    wishes[-1] = replace(wishes[-1], stop_token_ids=(whole[7],))
    right = expected(model, wishes)
    engine = Engine(model, 3, FakeGraphRecorder(), num_blocks=num_blocks, kernels=kernels)
    check(engine.run(wishes), right, wishes)
    # Again, from what the cache has of them.
    engine.deliveries = Deliveries()
    check(engine.run(wishes), right, wishes)
    assert engine.scheduler.kv_cache.stats.hits > 60
    assert (engine.scheduler.counters.num_preemptions > 0) == (num_blocks == 6)


def test_a_stop_that_is_seen_a_step_late_ends_the_request_where_it_should(
    model: DecoderModel,
) -> None:
    (whole,) = expected(model, [Wish(MIXED[2].prompt, 30)]).values()
    wishes = [Wish(MIXED[2].prompt, 30, stop_token_ids=(whole[4],)), Wish(MIXED[1].prompt, 40)]
    tokens = Engine(model, 2, FakeGraphRecorder()).run(wishes)
    assert tokens[0] == whole[: whole.index(whole[4]) + 1]
    check(tokens, expected(model, wishes), wishes)


def test_rows_are_taken_anew_while_steps_of_their_last_owners_are_in_flight(
    model: DecoderModel,
) -> None:
    wishes = [Wish(prompt, 2 + i % 3) for i, prompt in enumerate(prompts(*[7] * 20))]
    engine = Engine(model, 3, FakeGraphRecorder())
    check(engine.run(wishes), expected(model, wishes), wishes)


@pytest.mark.parametrize(
    "kernels",
    [
        pytest.param(DeviceKernels(), id="torch"),
        pytest.param(TritonEnds(), id="triton", marks=pytest.mark.campaign),
    ],
)
def test_preempted_requests_go_on_with_their_tokens(model: DecoderModel, kernels: Kernels) -> None:
    wishes = [Wish(prompt, 25) for prompt in prompts(12, 14, 9, 16)]
    engine = Engine(model, 2, FakeGraphRecorder(), num_blocks=24, kernels=kernels)
    check(engine.run(wishes), expected(model, wishes), wishes)
    assert engine.scheduler.counters.num_preemptions > 0


def test_nothing_is_planned_for_rows_that_wait_for_their_last_token(model: DecoderModel) -> None:
    engine = Engine(model, 2)
    engine.run([Wish(MIXED[1].prompt, 1)])
    assert engine.scheduler.counters.num_steps == 1


@pytest.mark.parametrize(
    "kernels",
    [
        pytest.param(DeviceKernels(), id="torch"),
        pytest.param(TritonEnds(), id="triton", marks=pytest.mark.campaign),
    ],
)
@pytest.mark.parametrize("num_stages", [1, 2])
def test_two_ranks_on_devices_say_what_one_does(
    model: DecoderModel,
    tmp_path_factory: pytest.TempPathFactory,
    kernels: Kernels,
    num_stages: int,
) -> None:
    folder = make_tiny_qwen3(tmp_path_factory.mktemp("ranks"), head_dim=16)
    wishes = [Wish(prompt, 6) for prompt in prompts(9, 40, 3, 21)]
    outputs = list(expected(model, wishes).values())
    script = write_script([wish.prompt for wish in wishes], outputs, num_groups=num_stages)
    world = World(2 // num_stages, num_stages)

    def run(rank: Communicator) -> list[tuple[int, int, int]]:
        placement, links = world.join(rank.rank, torch.float32)
        stream = FakeStream(1)
        runner = make_runner(folder, placement, links, kernels=kernels, stream=stream)
        said = []
        for plan, samples in zip(script.plans, script.samples, strict=True):
            result = runner.execute(plan)
            rows, token_ids = (np.frombuffer(c, "<i4") for c in (result.rows, result.token_ids))
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                said.append((*samples[row], token_id))
        return said

    first, second = run_ranks(2, run)
    assert first == ([] if num_stages == 2 else second)
    assert {(r, i): token for r, i, token in second} == {
        (r, i): token for r, output in enumerate(outputs) for i, token in enumerate(output)
    }


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_workload_gives_the_tokens_of_requests_alone(
    model: DecoderModel, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    sampling = st.builds(
        EngineSamplingParams,
        temperature=st.sampled_from([0.0, 0.8]),
        top_k=st.sampled_from([0, 0, 7]),
        min_p=st.sampled_from([0.0, 0.1]),
    )
    wishes = [
        Wish(
            prompt,
            data.draw(st.integers(1, 14)),
            data.draw(sampling),
            stop_token_ids=tuple(range(data.draw(st.sampled_from([0, 40])))),
            abort_after=data.draw(st.sampled_from([None, None, None, 2])),
        )
        for prompt in prompts(*lengths)
    ]
    engine = Engine(
        model,
        depth=data.draw(st.integers(1, 3)),
        graph_capture=data.draw(st.sampled_from([None, FakeGraphRecorder()])),
        num_blocks=data.draw(st.integers(26, 60)),
        budget=data.draw(st.integers(MAX_NUM_SEQS, BUDGET)),
    )
    check(engine.run(wishes), expected(model, wishes), wishes)


def test_decodes_of_every_row_have_a_graph_whatever_their_number() -> None:
    for max_num_seqs in (1, 3, 8, 100, 256, 300):
        shapes = graph_shapes("decodes", max_num_seqs, 8192, 64)
        assert max(shape.num_tokens for shape in shapes) == max_num_seqs
        assert all(shape.is_uniform for shape in shapes)
    sizes = [shape.num_tokens for shape in graph_shapes("decodes", 256, 8192, 64)]
    assert sizes == [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16)][::-1]


def test_mixed_graphs_have_room_for_every_row_and_for_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_graphs, "MIXED_TOKENS", (256, 512, 1024, 2048))
    shapes = [s for s in graph_shapes("always", 256, 1024, 64) if not s.is_uniform]
    assert [shape.num_tokens for shape in shapes] == [1024, 512]
    assert shapes[1] == StepShape(512, 257, 257, 512 // 64 + 257, is_uniform=False)
    assert graph_shapes("never", 256, 1024, 64) == []


@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 64])
def test_columns_lie_apart_and_aligned_whatever_their_number(size: int) -> None:
    shape = StepShape(size + 7, size, size + 1, 2 * size, is_uniform=False)
    sampled = {"rows": np.zeros(size + 3, np.int64), "temperature": np.zeros(size // 2, np.float32)}
    layout = layout_of(shape, kinds_of(sampled))
    memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    fields = Fields(layout, memory)
    views = {name: fields[name] for name in layout.places}
    for i, view in enumerate(views.values()):
        assert (view.data_ptr() - memory.data_ptr()) % 16 == 0
        view.fill_(i + 1)
    for i, view in enumerate(views.values()):
        assert (view == i + 1).all()
    lengths = {name: len(view) for name, view in views.items()}
    expected = {"rows_T": size + 7, "rows_B": size, "query_start_A": size + 1, "num_decodes_1": 1,
                "sample_index_R": size + 1, "block_ids_W": 2 * size, "rows": size + 3,
                "temperature": size // 2}  # fmt: skip
    assert lengths.items() >= expected.items()
    # What a graph reads is where it is without the rest.
    names = [field.name for field in STEP_FIELDS]
    of_graph = Fields(layout_of(shape, ()), memory)
    assert [*layout_of(shape, ()).places] == names
    assert all(of_graph[name].data_ptr() == views[name].data_ptr() for name in names)
