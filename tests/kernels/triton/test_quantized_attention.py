"""Quantized caches in float16: fp8 under bfloat16 queries, both under float16 ones.

Nothing may leave float16's range, whatever queries and values are. Queries are bfloat16, which the
interpreter reads rightly; results are float32, for it would cut bfloat16 off.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanocore.kernels.triton.decode_attention import DecodeTiles, decode_attention
from nanocore.kernels.triton.paged_attention import PrefillTiles, prefill_attention
from tests.kernels.triton.paged_step import Heads, PagedStep, Piece, Sequence, draw_step

pytestmark = pytest.mark.campaign

HEADS, TILE = Heads(), 16
DECODES, CHUNKS = [5, 33], [(40, 18)]
ROUNDING = 2.0**-11
"""Of float16's weights, relative to the largest result; bfloat16's is eight times that."""


def run(step: PagedStep, dtype: torch.dtype = torch.bfloat16, num_programs: int = 3) -> Tensor:
    q_THD = step.q_THD().to(dtype)
    out_THD = torch.full(q_THD.shape, torch.nan)
    if step.num_decodes:
        decode_attention(
            q_THD,
            step.cache,
            step.metadata,
            step.spec,
            out_THD,
            DecodeTiles(TILE, num_warps=4, num_stages=2),
            num_programs,
        )
    prefill_attention(
        q_THD,
        step.cache,
        step.metadata,
        step.spec,
        out_THD,
        PrefillTiles(32, TILE, num_warps=4, num_stages=2),
        1,
        max_tokens=len(q_THD),
        max_seqs=len(step.pieces),
        has_decodes=False,
    )
    return out_THD


def scaled(
    q: float | Tensor = 1.0,
    k: float = 1.0,
    v: float | Tensor = 1.0,
    kv_cache: str = "fp8",
    softcap: float = 0.0,
    window: int = 0,
) -> PagedStep:
    """A step whose queries, keys and values are multiplied. Tensors: one factor for each token."""
    step = draw_step(HEADS, DECODES, CHUNKS, softcap=softcap, window=window)
    for piece in step.pieces:
        sequence = piece.sequence
        for x, factor in ((sequence.q_LHD, q), (sequence.k_LKD, k), (sequence.v_LKD, v)):
            is_each = isinstance(factor, Tensor)
            x.mul_(factor[: len(x), None, None] if is_each else factor)
        sequence.q_LHD.copy_(sequence.q_LHD.bfloat16())
    return replace(step, kv_cache=kv_cache)


def check(step: PagedStep, dtype: torch.dtype = torch.bfloat16) -> None:
    """Row by row: each is as near as its own largest number allows."""
    out, expected = run(step, dtype).double(), step.expected().double()
    largest = expected.abs().amax((1, 2), keepdim=True)
    assert out.isfinite().all()
    assert ((out - expected).abs() <= ROUNDING * largest + 1e-37).all()


@pytest.mark.parametrize(
    ("q", "k"),
    [(1, 1), (1e5, 1e-5), (1e-6, 1), (1e-6, 1e6), (1e-20, 1e20), (0, 1), (1, 0)],
)
def test_queries_and_keys_of_any_size(q: float, k: float) -> None:
    check(scaled(q, k))


@pytest.mark.parametrize("v", [1e-30, 1e-6, 1e5, 1e30, 0])
def test_values_of_any_size(v: float) -> None:
    check(scaled(v=v))


def test_a_softcap_caps_scores_and_not_what_they_were_brought_into_range_by() -> None:
    check(scaled(1e5, 1e-5, softcap=0.5))


def test_tokens_of_all_sizes_beside_each_other() -> None:
    """Tiles of small values and of large ones, and nothing at all; queries likewise."""
    size = 10.0 ** (torch.arange(40) * 7 % 13 - 6)
    check(scaled(q=size.clamp(max=30), v=size))
    size[::5] = 0
    size[20:] = 0
    check(scaled(v=size, window=9))


@pytest.mark.parametrize("seen", [3, 20])
def test_a_row_that_sees_mostly_a_small_value_loses_none_of_it(seen: int) -> None:
    """The others' weights are next to nothing: what is left is a number of the small one's size."""
    step = scaled(v=torch.where(torch.arange(40) == seen, 1e-5, 1.0))
    for piece in step.pieces:
        piece.sequence.k_LKD[:] = 0
        piece.sequence.k_LKD[seen : seen + 1] = 1
        piece.sequence.q_LHD[:] = 8
    check(replace(step, kv_cache="fp8"))  # stored anew


@pytest.mark.parametrize("kv_cache", ["int8", "fp8"])
@pytest.mark.parametrize("v", [1e-4, 1e4])
def test_models_of_float16_with_small_and_large_values(kv_cache: str, v: float) -> None:
    check(scaled(v=v, kv_cache=kv_cache), torch.float16)


@pytest.mark.usefixtures("products_in_order")
@pytest.mark.campaign
@pytest.mark.parametrize("chunks", [[16, 32], [7, 9, 30, 2]], ids=str)
@pytest.mark.parametrize("window", [0, 21])
def test_chunking_changes_no_bit_whatever_follows_in_a_tile(chunks: list[int], window: int) -> None:
    sequence, length, spec = Sequence.draw(48, HEADS), 0, HEADS.spec(window)
    sequence.v_LKD.mul_(10.0 ** (torch.arange(48) * 5 % 9 - 4)[:, None, None])
    parts = []
    for count in chunks:
        length += count
        parts.append(
            run(PagedStep(HEADS, [Piece(sequence, length, count)], 0, spec, kv_cache="fp8"))
        )
    whole = run(PagedStep(HEADS, [Piece(sequence, 48, 48)], 0, spec, kv_cache="fp8"))
    assert torch.equal(torch.cat(parts), whole)
