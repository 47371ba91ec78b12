"""Paged attention against a dense float64 computation, sequence by sequence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanocore.kernels import torch_attention
from nanocore.kernels.interface import AttentionSpec
from tests.campaign import examples
from tests.kernels.paged_case import HEAD_DIM, PLAIN, PagedCase

MIXED = [(5, 1), (31, 1), (1, 1), (2, 2), (40, 7), (64, 64), (48, 33)]


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(
    "seqs",
    [
        [(1, 1)],
        [(17, 17)],
        [(16, 16), (32, 16), (33, 16)],
        [(1, 1), (16, 1), (17, 1), (40, 1)],
        MIXED,
    ],
)
def test_mixed_batches_equal_dense_attention(
    seqs: list[tuple[int, int]], block_size: int, heads: int, kv_heads: int
) -> None:
    case = PagedCase(seqs, block_size, heads, kv_heads, seed=len(seqs) + block_size)
    torch.testing.assert_close(case.run().double(), case.expected(), atol=2e-5, rtol=2e-5)


@st.composite
def paged_cases(draw: st.DrawFn) -> PagedCase:
    lengths = st.integers(1, 50)
    decodes = [(length, 1) for length in draw(st.lists(lengths, max_size=4))]
    chunks = [
        (past + count, count)
        for past, count in draw(
            st.lists(st.tuples(st.integers(0, 50), st.integers(2, 30)), max_size=3)
        )
    ]
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4]))
    spec = AttentionSpec(
        scale=draw(st.sampled_from([HEAD_DIM**-0.5, 0.5])),
        window=draw(st.sampled_from([0, 1, 2, 3, 4, 5, 8, 9, 16, 33, 100])),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])),
    )
    return PagedCase(
        seqs=decodes + chunks or [(3, 3)],
        block_size=draw(st.sampled_from([1, 2, 4, 8])),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        seed=draw(st.integers(0, 1000)),
        spec=spec,
        kv_cache=draw(st.sampled_from(["auto", "auto", "int8", "fp8"])),
        num_padding=draw(st.sampled_from([0, 3])),
    )


@given(case=paged_cases(), small_pieces=st.booleans())
@settings(max_examples=examples(200), deadline=None, derandomize=True)
def test_windows_softcaps_quantized_caches_and_padding_equal_dense_attention(
    case: PagedCase, small_pieces: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if small_pieces:
            patch.setattr(torch_attention, "MAX_GATHERED_BYTES", 1 << 12)
            patch.setattr(torch_attention, "MAX_PIECE_QUERIES", 5)
        out = case.run().double()
    num_tokens = len(out) - case.num_padding
    torch.testing.assert_close(out[:num_tokens], case.expected(), atol=2e-5, rtol=2e-5)
    assert (out[num_tokens:] == 0).all()


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_pieces_of_any_size_give_what_one_piece_gives(
    monkeypatch: pytest.MonkeyPatch, softcap: float
) -> None:
    case = PagedCase(MIXED, spec=replace(PLAIN, softcap=softcap), seed=3)
    whole = case.run()
    monkeypatch.setattr(torch_attention, "MAX_GATHERED_BYTES", 1 << 13)
    monkeypatch.setattr(torch_attention, "MAX_SCORES", 300)
    torch.testing.assert_close(case.run(), whole)


def test_a_window_reads_only_the_blocks_it_reaches() -> None:
    window, block_size = 6, 4
    case = PagedCase([(31, 1), (30, 5)], block_size, spec=replace(PLAIN, window=window))
    case.run()
    for i, (length, count) in enumerate(case.seqs):
        oldest = length - count - window + 1
        unseen = case.block_table[i, : oldest // block_size].long()
        assert len(unseen)
        case.cache.k_NSKD[unseen] = case.cache.v_NSKD[unseen] = torch.nan  # would spread if read
    metadata = replace(case.metadata(), slot_mapping_T=torch.empty(0, dtype=torch.int64))
    q_THD = torch.cat(case.q)
    out = case.kernels.paged_attention(q_THD, case.cache, metadata, case.spec)
    torch.testing.assert_close(out.double(), case.expected(), atol=2e-5, rtol=2e-5)


def test_the_scores_of_a_softcapped_chunk_are_written_out_in_bounded_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    largest = 0
    attend = torch_attention.softcapped_attention

    def watch(q: torch.Tensor, k: torch.Tensor, *args: object) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, q.shape[:-1].numel() * k.shape[-2])
        return attend(q, k, *args)

    monkeypatch.setattr(torch_attention, "softcapped_attention", watch)
    monkeypatch.setattr(torch_attention, "MAX_SCORES", 2000)
    PagedCase([(200, 150)], spec=replace(PLAIN, softcap=2.0)).run()
    assert 1000 < largest <= 2000
