"""The attention kernels against dense attention in float64, and their bits against each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanocore.kernels.attention import KVCache
from nanocore.kernels.triton.decode_attention import DecodeTiles, decode_attention
from nanocore.kernels.triton.paged_attention import (
    PrefillTiles,
    choose_num_programs,
    choose_num_shares,
    paged_attention,
    prefill_attention,
)
from tests.campaign import in_campaign
from tests.kernels.triton.paged_step import Heads, PagedStep, Piece, Sequence, draw_step

HEADS = Heads()
TILE = 16


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "nanocore.kernels.triton.paged_attention.decode_tiles",
        lambda *_: DecodeTiles(TILE, num_warps=4, num_stages=2),
    )
    monkeypatch.setattr(
        "nanocore.kernels.triton.paged_attention.prefill_tiles",
        lambda *_, **__: PrefillTiles(32, TILE, 4, 2),
    )
    monkeypatch.setattr("nanocore.kernels.triton.paged_attention.MIN_PART_TILES", 1)


def check(step: PagedStep, atol: float = 2e-6, **options: object) -> None:
    out_THD = step.run(**options)  # type: ignore[arg-type]
    torch.testing.assert_close(out_THD.double(), step.expected().double(), rtol=1e-5, atol=atol)


def run_decodes(step: PagedStep, keys: int, num_programs: int) -> Tensor:
    out_THD = torch.full(step.q_THD().shape, torch.nan)
    tiles = DecodeTiles(keys, num_warps=4, num_stages=2)
    decode_attention(
        step.q_THD(), step.cache, step.metadata, step.spec, out_THD, tiles, num_programs
    )
    return out_THD


@pytest.mark.parametrize(
    ("block_size", "tile_ends_after"),
    [
        (4, 1), (48, 0),
        *in_campaign((4, -1), (4, 0), (48, -1), (48, 1)),
        *in_campaign(*((size, after) for size in (16, 32) for after in (-1, 0, 1))),
    ],
)  # fmt: skip
def test_contexts_that_end_at_the_edge_of_a_block_or_of_a_tile(
    block_size: int, tile_ends_after: int
) -> None:
    edges = [n + tile_ends_after for n in (block_size, TILE, 2 * TILE)]
    chunks = [(edges[2], edges[2]), (edges[1], 9), (edges[0], 2)]
    check(draw_step(HEADS, [1, *edges], chunks, block_size=block_size))


@pytest.mark.parametrize(
    "heads",
    [
        Heads(2, 2),
        Heads(6, 2),
        *in_campaign(Heads(4, 2), Heads(4, 1), Heads(8, 1), Heads(20, 1, 32)),
    ],
    ids=str,
)
def test_groups_of_any_number_of_heads(heads: Heads) -> None:
    check(draw_step(heads, [5, 37], [(40, 7), (19, 19)]), num_sms=4)


@pytest.mark.parametrize("head_dim", [24, *in_campaign(48, 96)])
def test_head_dims_that_are_no_power_of_two(head_dim: int) -> None:
    check(draw_step(Heads(4, 2, head_dim), [5, 37], [(40, 18)]), num_sms=4)


@pytest.mark.parametrize(
    ("window", "block_size"),
    [(2 * TILE + 1, 64), *in_campaign((1, 4), (5, 64), (TILE, 4), (1000, 4))],
)
def test_a_window_hides_what_is_farther_back(window: int, block_size: int) -> None:
    step = draw_step(
        HEADS, [1, 5, 33, 70], [(70, 45), (21, 21)], window=window, block_size=block_size
    )
    check(step, num_sms=8)
    check(step, batch_invariant=True)


def test_tiles_that_the_window_has_left_are_not_read() -> None:
    sequence = Sequence.draw(100, HEADS)
    hidden = Sequence(sequence.q_LHD, sequence.k_LKD.clone(), sequence.v_LKD.clone())
    hidden.k_LKD[: 4 * TILE] = torch.nan
    hidden.v_LKD[: 4 * TILE] = torch.nan
    for num_queries in (1, 9):
        pieces = [Piece(hidden, 100, num_queries)]
        step = PagedStep(HEADS, pieces, int(num_queries == 1), HEADS.spec(window=20))
        visible = PagedStep(HEADS, [Piece(sequence, 100, num_queries)], step.num_decodes, step.spec)
        assert torch.equal(step.run(), visible.run())


@pytest.mark.parametrize("softcap", [0.5, *in_campaign(50.0)])
def test_softcap(softcap: float) -> None:
    check(draw_step(HEADS, [1, 33], [(40, 18)], softcap=softcap), num_sms=4)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_softcap_of_scores_beyond_what_powers_can_hold() -> None:
    step = draw_step(HEADS, [33], [(40, 18)], softcap=1.0)
    for piece in step.pieces:
        piece.sequence.q_LHD.mul_(1000)
    check(step, atol=1e-4)  # float32 knows scores of a thousand no better, nor their tanh near 0


def test_scores_so_large_that_powers_overflow_without_a_peak() -> None:
    step = draw_step(HEADS, [33, 3], [(40, 18)])
    for piece in step.pieces:
        piece.sequence.q_LHD.mul_(300)
    out_THD = step.run(num_sms=4)
    torch.testing.assert_close(out_THD.double(), step.expected(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("kv_cache", "block_size"),
    [("int8", 64), *in_campaign(("fp8", 4), ("int8", 4), ("fp8", 64))],
)
def test_quantized_caches(kv_cache: str, block_size: int) -> None:
    step = draw_step(
        HEADS, [1, 33, 64], [(40, 18), (70, 70)], kv_cache=kv_cache, block_size=block_size
    )
    check(step, num_sms=8)


@pytest.mark.parametrize(
    ("num_programs", "keys", "block_size", "window"),
    [
        (1, 16, 4, 0),
        (33, 16, 4, 0),
        (2, 16, 16, 40),
        (8, 32, 64, 0),
        *in_campaign(*((num_programs, 16, 4, 0) for num_programs in (2, 3, 5, 8))),
        *in_campaign((1, 16, 16, 40), (8, 16, 16, 40), (1, 32, 64, 0), (3, 32, 64, 0)),
    ],
)
@pytest.mark.parametrize("max_few", [0, 8])
def test_contexts_in_any_number_of_parts(
    num_programs: int,
    keys: int,
    block_size: int,
    window: int,
    max_few: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Merged by the last program that has a part, or by a kernel.

    Twice, as two layers: what the first one has counted is forgotten.
    """
    monkeypatch.setattr("nanocore.kernels.triton.decode_attention.FEW_SEQS", max_few)
    step = draw_step(HEADS, [1, 90, 0, 47], block_size=block_size, window=window)
    for _ in range(2):
        out_THD = run_decodes(step, keys, num_programs)
        torch.testing.assert_close(out_THD.double(), step.expected(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("num_sms", "batch_invariant"), [(100, False), *in_campaign((1, False), (1, True), (100, True))]
)
def test_padding_gets_zeros(num_sms: int, batch_invariant: bool) -> None:
    step = draw_step(
        HEADS, [7, 0, 21, 0], [(19, 5), (0, 40)], num_padding=3, spare_columns=2, block_size=16
    )
    check(step, num_sms=num_sms, batch_invariant=batch_invariant)


def test_a_step_of_padding_alone_gets_zeros() -> None:
    check(draw_step(HEADS, [0, 0], [(0, 3)], num_padding=1))


@pytest.mark.parametrize("num_decodes", [*in_campaign(0, 4), 2])
def test_fewer_decodes_than_at_capture(num_decodes: int) -> None:
    """The graph's upper bounds: any sequence could be a decode, and any could be a chunk."""
    decodes, chunks = [33, 18, 5, 40][:num_decodes], [(50, 31), (20, 20), (7, 2)]
    padding = [(0, 0), (0, 9)]
    step = draw_step(HEADS, decodes, chunks + padding, max_decodes=len(decodes) + 5)
    check(step, num_sms=4)


def test_the_exact_number_of_programs_is_enough() -> None:
    """Outside graphs, where the host knows how many chunks there are."""
    check(draw_step(HEADS, [33, 18, 5], [(50, 31), (20, 20), (7, 2), (9, 8), (90, 17)]))
    check(draw_step(HEADS, [33, 18, 5], [(2, 2)]), batch_invariant=True)


def test_a_block_table_much_wider_than_contexts() -> None:
    check(draw_step(HEADS, [1, 33], [(40, 18)], spare_columns=500), num_sms=8)


@pytest.mark.usefixtures("products_in_order")
@pytest.mark.parametrize(
    "chunks", [[7, 9, 30, 2], *in_campaign([48], [16, 32], [1] * 3 + [45])], ids=str
)
@pytest.mark.parametrize("window", [*in_campaign(0), 21])
def test_chunking_changes_no_bit_of_a_prompt(chunks: list[int], window: int) -> None:
    sequence, length, spec = Sequence.draw(48, HEADS), 0, HEADS.spec(window)
    parts = []
    for count in chunks:
        length += count
        parts.append(PagedStep(HEADS, [Piece(sequence, length, count)], 0, spec).run())
    whole = PagedStep(HEADS, [Piece(sequence, 48, 48)], 0, spec).run()
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.usefixtures("products_in_order")
@pytest.mark.parametrize("window", [0, pytest.param(21, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("kv_cache", ["auto", pytest.param("int8", marks=pytest.mark.campaign)])
def test_batch_invariance_of_every_bit(window: int, kv_cache: str) -> None:
    """A token alone, decoded beside others, within a chunk, and in a captured step's padding."""
    sequence, spec = Sequence.draw(53, HEADS), HEADS.spec(window)
    others = [Sequence.draw(n, HEADS, seed=1) for n in (80, 3, 30)]

    def last_token(before: list[Piece], count: int, after: list[Piece], **options: int) -> Tensor:
        pieces = [*before, Piece(sequence, 53, count), *after]
        num_decodes = sum(piece.num_queries == 1 for piece in pieces)
        step = PagedStep(HEADS, pieces, num_decodes, spec, kv_cache=kv_cache, **options)
        end = step.metadata.query_start[len(before) + 1]
        return step.run(num_sms=50, batch_invariant=True)[end - 1]

    alone = last_token([], 1, [])
    decodes = [Piece(other, other.q_LHD.shape[0]) for other in others]
    chunks = [Piece(others[0], 70, 22), Piece(others[2], 30, 30)]
    assert torch.equal(last_token(decodes, 1, chunks), alone)
    assert torch.equal(last_token([], 53, []), alone)
    assert torch.equal(last_token(decodes[:1], 10, chunks), alone)
    padding = [Piece(sequence, 0), Piece(sequence, 0, 13)]
    assert torch.equal(last_token(decodes, 1, padding, spare_columns=9, max_decodes=9), alone)


@pytest.mark.parametrize(("num_kv_heads", "expected"), [(1, 264), (8, 33), (300, 1)])
def test_shares_are_two_for_each_multiprocessor(num_kv_heads: int, expected: int) -> None:
    assert choose_num_shares(num_kv_heads, num_sms=132) == expected


@pytest.mark.parametrize(("max_seqs", "expected"), [(1, 33), (32, 33), (64, 64), (256, 256)])
def test_programs_of_decodes_fill_multiprocessors_or_are_one_for_each_sequence(
    max_seqs: int, expected: int
) -> None:
    assert choose_num_programs(max_seqs, num_kv_heads=8, num_sms=132, per_sm=2) == expected
    assert choose_num_programs(max_seqs, 8, num_sms=1, per_sm=2) == max_seqs


@pytest.mark.parametrize("block_size", [4, *in_campaign(16)])
@pytest.mark.parametrize("num_queries", [1, 3])
def test_a_cache_of_more_elements_than_int32_counts(
    tmp_path: Path, num_queries: int, block_size: int
) -> None:
    num_kv_heads, head_dim = HEADS.num_kv, HEADS.dim
    num_blocks = 2**31 // (block_size * num_kv_heads * head_dim) + 8
    shape = num_blocks, block_size, num_kv_heads, head_dim
    # A file of holes: only what is touched takes memory.
    size = num_blocks * block_size * num_kv_heads * head_dim
    path = str(tmp_path / "cache")
    values = torch.from_file(path, shared=True, size=size, dtype=torch.float32).view(shape)
    step = draw_step(HEADS, [20], block_size=block_size)
    piece = Piece(step.pieces[0].sequence, 20, num_queries)
    step = PagedStep(HEADS, [piece], int(num_queries == 1), HEADS.spec(), block_size)
    near_BM = step.metadata.block_table.long()
    step.metadata.block_table.add_(num_blocks - step.cache.k_NSKD.shape[0])
    far_BM = step.metadata.block_table.long()
    values[far_BM[0]] = step.cache.k_NSKD[near_BM[0]]
    expected = paged_attention(
        step.q_THD(),
        KVCache(step.cache.k_NSKD, step.cache.k_NSKD),
        replace(step.metadata, block_table=near_BM.int()),
        step.spec,
        num_sms=1,
        batch_invariant=False,
    )
    step.cache = KVCache(values, values)
    assert torch.equal(step.run(), expected)


def test_kernels_of_chunks_and_of_decodes_agree() -> None:
    step = draw_step(HEADS, [50, 9, 33])
    out_THD = torch.full(step.q_THD().shape, torch.nan)
    prefill_attention(
        step.q_THD(),
        step.cache,
        step.metadata,
        step.spec,
        out_THD,
        PrefillTiles(32, 32, num_warps=4, num_stages=2),
        1,
        max_tokens=3,
        max_seqs=3,
        has_decodes=True,
    )
    torch.testing.assert_close(out_THD, run_decodes(step, 32, 2), rtol=1e-5, atol=1e-6)
