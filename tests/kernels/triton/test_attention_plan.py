"""How attention is dealt out to programs: every tile of keys once, and none with much to do."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from benchmarks.attention_step import make_metadata
from nanocore.kernels.attention import AttentionMetadata, AttentionSpec
from nanocore.kernels.step import BegunStep
from nanocore.kernels.triton import attention_plan, decode_attention
from nanocore.kernels.triton import paged_attention as chunks_module
from nanocore.kernels.triton.attention_plan import Items, plan_step
from nanocore.kernels.triton.decode_attention import DecodePlan, Decodes, DecodeTiles, plan_decodes
from nanocore.kernels.triton.paged_attention import PrefillTiles, paged_attention
from nanocore.worker.step.step_graphs import padded_steps
from nanocore.worker.step.step_memory import BlockTable, RowTables, StepShape
from tests.campaign import in_campaign
from tests.kernels.layered_cache import layered
from tests.kernels.triton.paged_step import Heads, PagedStep, Piece, Sequence, draw_step

HEADS = Heads()
TILE, QUERIES = 16, 4
NUM_SMS, NUM_SHARES = 8, 8
"""With two KV heads two for each multiprocessor."""


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        chunks_module,
        "decode_tiles",
        lambda *_: DecodeTiles(TILE, num_warps=4, num_stages=2, per_sm=2),
    )
    monkeypatch.setattr(
        chunks_module, "prefill_tiles", lambda *_, **__: PrefillTiles(2 * QUERIES, TILE, 4, 2)
    )
    monkeypatch.setattr(chunks_module, "MIN_PART_TILES", 1)


def as_int(value: Any) -> int:
    return value if isinstance(value, int) else int(value.handle.data.item())


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    for module in (decode_attention, chunks_module):
        attend: Any = module.attend

        def counted(*args: Any, attend: Any = attend, **kwargs: Any) -> Any:
            first, end = (as_int(x) for x in args[5:7])
            found.append(max(0, end - first))
            return attend(*args, **kwargs)

        monkeypatch.setattr(module, "attend", counted)
    return found


def check(step: PagedStep, num_sms: int = NUM_SMS) -> None:
    out_THD = step.run(num_sms)
    torch.testing.assert_close(out_THD.double(), step.expected().double(), rtol=1e-5, atol=2e-6)


def with_bounds(step: PagedStep, max_len: int) -> PagedStep:
    num_seqs, num_tokens = len(step.pieces), step.metadata.query_start[-1]
    step.metadata = replace(
        step.metadata,
        num_decodes=num_seqs,
        query_start=[0] + [num_tokens] * num_seqs,
        seq_lens=[max_len] * num_seqs,
    )
    return step


@pytest.mark.campaign
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_long_context_among_many_decodes_is_read_by_many_programs(
    spans: list[int], is_mixed: bool
) -> None:
    """A decode step of more rows than were ever split, and a mixed one as a graph has it."""
    others, long = [7] * (3 if is_mixed else 66), 40 * TILE
    step = draw_step(HEADS, [*others, long], [(9, 5)] if is_mixed else [], block_size=16)
    check(with_bounds(step, 50 * TILE) if is_mixed else step)
    assert sum(spans) >= 2 * (40 + len(others))  # in each of two KV heads
    assert max(spans) <= 1.5 * (40 + len(others)) / NUM_SHARES


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("has_bounds", [*in_campaign(False), True])
def test_a_short_chunk_over_a_long_context_is_read_by_many_programs(
    spans: list[int], has_bounds: bool
) -> None:
    step = draw_step(HEADS, [5, 20], [(40 * TILE, 3), (18, 18)], block_size=16)
    check(with_bounds(step, 50 * TILE) if has_bounds else step)
    assert sum(spans) >= 2 * 40
    assert max(spans) <= 40 // 4


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("num_decodes", [9, *in_campaign(12)])
def test_equal_contexts_of_many_decodes_stay_whole(spans: list[int], num_decodes: int) -> None:
    check(draw_step(HEADS, [5 * TILE] * num_decodes))
    assert spans == [5] * 2 * num_decodes


@pytest.mark.usefixtures("small_tiles", "products_in_order")
def test_batch_invariant_nothing_is_split(spans: list[int]) -> None:
    sequence = Sequence.draw(20 * TILE, HEADS)
    pieces = [Piece(sequence, 20 * TILE), Piece(Sequence.draw(9, HEADS), 9, 4)]
    step = PagedStep(HEADS, pieces, 1, HEADS.spec())
    step.run(NUM_SMS, batch_invariant=True)
    assert sum(spans[:2]) + sum(spans[2:]) == 2 * (20 + 1)
    assert max(spans) >= 19  # and the last one, which has a mask


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 5.0, "window": 33},
        *in_campaign({"window": 100}, {"kv_cache": "int8", "block_size": 16}, {"kv_cache": "fp8"}),
        *in_campaign({"spare_columns": 30, "num_padding": 3}),
    ],
    ids=str,
)
def test_split_decodes_and_chunks_are_as_exact_as_whole_ones(options: dict[str, Any]) -> None:
    """Some tiles of the first queries of a chunk hold nothing that its rows see."""
    decodes, chunks = [150, 3, 0, 17], [(180, 7), (0, 5), (30, 3)]
    step = draw_step(HEADS, decodes, chunks, **options)
    check(with_bounds(step, 200), num_sms=20)


@pytest.mark.campaign
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("heads", [Heads(6, 2, 24), Heads(20, 1, 32)], ids=str)
def test_parts_of_any_group_and_head_dim(heads: Heads) -> None:
    check(draw_step(heads, [100, 9], [(100, 5)]), num_sms=10)


@pytest.mark.campaign
@pytest.mark.usefixtures("small_tiles")
def test_hundreds_of_sequences(spans: list[int]) -> None:
    lengths = [1 + i % 9 for i in range(200)]
    lengths[77], lengths[199] = 20 * TILE, 12 * TILE + 1
    check(draw_step(Heads(2, 1), lengths, block_size=16), num_sms=10)
    assert max(spans) <= 1.5 * (198 + 20 + 13) / 20


@dataclass
class Recording:
    """Launches, to be repeated: the same kernels, grids and operands, whatever is in memory."""

    launches: list[Callable[[], None]]

    def replay(self) -> None:
        for launch in self.launches:
            launch()


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    found = Recording([])
    call = GridExecutor.__call__

    def recorded(executor: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        found.launches.append(partial(call, executor, *args, **kwargs))
        return call(executor, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", recorded)
    return found


def tensors(step: PagedStep) -> list[Tensor]:
    metadata, cache = step.metadata, step.cache
    return [
        metadata.seq_lens_B, metadata.query_start_A, metadata.num_decodes_1,
        metadata.block_table, cache.k_NSKD, cache.v_NSKD,
    ]  # fmt: skip


@pytest.mark.campaign
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("window", [0, pytest.param(50, marks=pytest.mark.campaign)])
def test_launches_of_one_step_serve_another_one_of_other_lengths(
    recording: Recording, window: int
) -> None:
    draw, none = partial(draw_step, HEADS, window=window), (0, 0)
    steps = [
        draw([5, 33, 40], [(150, 8), (90, 7), none]),
        draw([150, 5], [(33, 9), (90, 2), (40, 5), none]),
        draw([], [(5, 4), (33, 3), (40, 1), (90, 1), (150, 9), none]),
        draw([90, 40, 33, 150], [(5, 1), (0, 13)]),
    ]
    first = with_bounds(steps[0], 150)
    memory, q_THD = tensors(first), first.q_THD()
    out_THD = paged_attention(
        q_THD, first.cache, first.metadata, first.spec, num_sms=10, batch_invariant=False
    )
    for step in steps[1:]:
        for here, there in zip(memory, tensors(step), strict=True):
            here.copy_(there)
        q_THD.copy_(step.q_THD())
        out_THD.fill_(torch.nan)
        recording.replay()
        torch.testing.assert_close(out_THD.double(), step.expected(), rtol=1e-5, atol=2e-6)


@pytest.mark.usefixtures("small_tiles")
def test_layers_of_one_window_share_a_plan_and_others_have_their_own() -> None:
    step = draw_step(HEADS, [250, 9], block_size=16)
    plans: list[dict[int, DecodePlan]] = []
    for window in (60, 0, 60, 0):
        layer = replace(step, spec=HEADS.spec(window))
        layer.metadata = step.metadata
        check(layer)
        kept = step.metadata.scratch.items()
        plans.append({items.window: plan for items, plan in kept if isinstance(plan, DecodePlan)})
    assert [list(kept) for kept in plans] == [[60], [60, 0], [60, 0], [60, 0]]
    for kept in plans[1:]:
        assert all(kept[window] is plan for window, plan in plans[1].items())
        assert kept[60] is plans[0][60]


def metadata_of(decodes: list[int], chunks: list[tuple[int, int]]) -> AttentionMetadata:
    seqs = [*((length, 1) for length in decodes), *chunks]
    table = torch.empty(1, max(length for length, _ in seqs), dtype=torch.int32)
    return make_metadata(seqs, table, num_decodes=len(decodes))


def expected_items(
    metadata: AttentionMetadata, items: Items
) -> list[tuple[tuple[int, ...], tuple[int, int]]]:
    """(token, queries, position, sequence, its length) and (first, end) tile of each item."""
    found = []
    size = items.queries
    num_decodes = 0 if items.has_decodes else metadata.num_decodes
    for seq in range(num_decodes, len(metadata.seq_lens)):
        start, end = metadata.query_start[seq : seq + 2]
        length = metadata.seq_lens[seq]
        for token in range(start, end, size):
            count = min(size, end - token)
            position = length - (end - token)
            last_key = max(0, position + count)
            first_key = max(0, position - items.window + 1) if items.window else 0
            tiles = first_key // items.keys, -(-last_key // items.keys)
            found.append(((token, count, position, seq, length), tiles))
    return found


def random_steps(rng: random.Random) -> tuple[list[int], list[tuple[int, int]]]:
    longest = rng.choice([30, 300, 1000])
    decodes = [rng.choice([0, 1, rng.randrange(30), longest]) for _ in range(rng.randrange(40))]
    chunks = []
    for _ in range(rng.randrange(1, 12)):
        count = rng.randrange(1, rng.choice([3, 40]))
        chunks.append((rng.choice([0, count, count + rng.randrange(longest)]), count))
    return decodes, chunks


@pytest.mark.parametrize("seed", [*range(6), *in_campaign(*range(6, 20))])
def test_each_tile_of_each_item_is_in_one_part_and_no_part_is_long(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(attention_plan, "PLAN_BLOCK", rng.choice([8, 16, 1024]))
    metadata = metadata_of(*random_steps(rng))
    queries, has_decodes = rng.choice([(4, False), (4, True), (1, False)])
    items = Items(
        queries=queries,
        keys=16,
        window=rng.choice([0, 1, 50]),
        has_decodes=has_decodes,
        max_items=metadata.query_start[-1] // queries + len(metadata.seq_lens),
        block_size=1,
        num_shares=rng.choice([1, 2, 7, 33, 264]),
        min_tiles=rng.choice([1, 3]),
    )
    check_plan(metadata, items)


def test_the_largest_batch_with_contexts_of_a_million_tokens() -> None:
    decodes = [(1 << 20) - i for i in range(3)] + [1000 + i for i in range(1021)]
    metadata = metadata_of(decodes, [(1 << 20, 16000 - 1024), (0, 3)])
    items = Items(
        queries=2, keys=16, window=0, has_decodes=False, max_items=8000 + 1026, block_size=1,
        num_shares=264, min_tiles=1,
    )  # fmt: skip
    check_plan(metadata, items)
    check_decode_plan(metadata, Decodes(1024, 1, 16, window=0, num_programs=396))


@pytest.mark.parametrize(
    ("window", "width", "can_split"),
    [(0, 16, False), (0, 48, False), (0, 49, True), (30, 1000, False), (31, 1000, True)],
)
def test_where_one_part_is_always_enough_nothing_is_merged(
    window: int, width: int, can_split: bool
) -> None:
    table_BM = torch.empty(2, width, dtype=torch.int32)
    metadata = replace(metadata_of([5], [(8, 4)]), block_table=table_BM)
    items = Items(4, 16, window, False, 3, block_size=1, num_shares=9, min_tiles=3)
    assert (plan_step(metadata, items).merges_M4 is not None) == can_split


def check_plan(metadata: AttentionMetadata, items: Items) -> None:
    plan = plan_step(metadata, items)
    expected = expected_items(metadata, items)
    total = sum(end - first for _, (first, end) in expected)
    share = max(-(-total // items.num_shares), items.min_tiles)
    parts, merges = plan.parts_P8.tolist(), []
    if plan.merges_M4 is not None:
        rows = plan.merges_M4.tolist()
        merges = rows[: rows[-1][0]]
    num_sums, num_whole, num_merges = 0, 0, 0
    for item, (first, end) in expected:
        num_parts = max(1, (end - first + share // 2) // share)
        if num_parts == 1:
            num_whole += 1
            assert parts[-num_whole] == [*item, first, end, -1]
            continue
        own = parts[num_sums : num_sums + num_parts]
        ends = [part[6] for part in own]
        assert [part[:6] for part in own] == [[*item, tile] for tile in (first, *ends[:-1])]
        assert ends[-1] == end
        assert all(1 <= part[6] - part[5] <= 1.5 * share for part in own)
        assert [part[7] for part in own] == list(range(num_sums, num_sums + num_parts))
        assert merges[num_merges] == [*item[:2], num_sums, num_parts]
        num_sums, num_merges = num_sums + num_parts, num_merges + 1
    assert [part[1] for part in parts[num_sums : len(parts) - num_whole]] == [0] * (
        len(parts) - num_sums - num_whole
    )
    assert len(merges) == num_merges
    assert num_sums <= plan.num_sums


@pytest.mark.parametrize("seed", [*range(6), *in_campaign(*range(6, 20))])
def test_all_programs_of_decodes_have_as_many_tiles(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(decode_attention, "PLAN_BLOCK", rng.choice([8, 16, 1024]))
    monkeypatch.setattr(decode_attention, "FEW_BLOCK", rng.choice([1, 32]))
    monkeypatch.setattr(decode_attention, "FEW_SEQS", rng.choice([0, 1000]))
    decodes, chunks = random_steps(rng)
    metadata = metadata_of([*decodes, 5], chunks)
    num_programs, window = rng.choice([1, 2, 7, 49, 396]), rng.choice([0, 1, 50])
    check_decode_plan(metadata, Decodes(len(decodes) + 3, 2, 16, window, num_programs))


def check_decode_plan(metadata: AttentionMetadata, decodes: Decodes) -> None:
    plan = plan_decodes(metadata, decodes)
    parts, starts = plan.parts_P8.tolist(), plan.first_parts.tolist()
    lengths, window = metadata.seq_lens[: metadata.num_decodes], decodes.window
    tiles = [
        (max(0, n - window) // decodes.keys if window else 0, -(-n // decodes.keys))
        for n in lengths
    ]
    share = -(-sum(max(1, end - first) for first, end in tiles) // decodes.num_programs)
    number = 0
    for seq, (length, (first, end)) in enumerate(zip(lengths, tiles, strict=True)):
        own = [part for part in parts[number : starts[-1]] if part[0] == seq]
        assert own == parts[number : number + len(own)]
        assert all(part[:2] == [seq, length] for part in own)
        assert all(part[4:6] == [number, len(own)] for part in own)
        ends = [part[3] for part in own]
        assert [part[2] for part in own] == [first, *ends[:-1]]
        assert ends[-1] == end
        assert all(part[3] > part[2] for part in own) or length == 0
        number += len(own)
    assert starts[0] == 0
    assert starts[-1] == number <= len(parts)
    weights = [max(1, part[3] - part[2]) for part in parts[:number]]
    sizes = [sum(weights[a:b]) for a, b in pairwise(starts)]
    num_busy = -(-sum(sizes) // share)
    assert sizes[: num_busy - 1] == [share] * (num_busy - 1)
    assert 0 < sizes[num_busy - 1] <= share
    assert not any(sizes[num_busy:])
    assert plan.arrivals_BK is None or not plan.arrivals_BK.any()
    if plan.merges_M4 is not None:
        rows = plan.merges_M4.tolist()
        own = {part[0]: part[4:6] for part in parts[:number] if part[5] > 1}
        assert rows[: rows[-1][0]] == [[seq, 1, *numbers] for seq, numbers in own.items()]


@pytest.mark.parametrize(
    ("num_tokens", "max_seqs", "block_size"), [*in_campaign((300, 40, 64), (8, 5, 4)), (24, 5, 4)]
)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_step_of_padding_with_a_graphs_bounds_writes_no_memory_of_others(
    monkeypatch: pytest.MonkeyPatch,
    num_tokens: int,
    max_seqs: int,
    block_size: int,
    batch_invariant: bool,
) -> None:
    num_seqs, guard, empty = max_seqs + 1, 300, torch.empty
    shape = StepShape(
        num_tokens, num_seqs, num_seqs, num_tokens // block_size + num_seqs, is_uniform=False
    )
    tables = RowTables(BlockTable(num_seqs, 24), 96, block_size, None)
    [(_, _, inputs)] = padded_steps([shape], tables, torch.device("cpu"))
    guarded: list[tuple[int, Tensor]] = []

    def with_guards(*size: Any, **options: Any) -> Tensor:
        if options.get("dtype") != torch.int32:
            return empty(*size, **options)
        rows = torch.full((size[0] + 2 * guard, *size[1:]), -77, dtype=torch.int32)
        guarded.append((size[0], rows))
        return rows[guard : guard + size[0]]

    monkeypatch.setattr(torch, "empty", with_guards)
    tables = [torch.zeros(num_seqs, 24, dtype=torch.int32)]
    (metadata,) = inputs.attention(BegunStep(tables, None, None))
    q_THD = torch.randn(num_tokens, 4, 16)
    cache = layered(torch.zeros(2, block_size, 2, 16), torch.zeros(2, block_size, 2, 16))
    out_THD = paged_attention(
        q_THD, cache, metadata, AttentionSpec(0.25), num_sms=132, batch_invariant=batch_invariant
    )
    assert not out_THD.any()
    assert len(guarded) >= 2 - batch_invariant
    for size, rows in guarded:
        assert (rows[:guard] == -77).all()
        assert (rows[guard + size :] == -77).all()
