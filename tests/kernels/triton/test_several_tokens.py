"""Decodes of several query tokens, one and its drafts: rows of one tile, causal among them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from nanocore.kernels.attention import AttentionMetadata
from nanocore.kernels.triton import paged_attention as attention_module
from nanocore.kernels.triton.decode_attention import DecodePlan, DecodeTiles
from nanocore.kernels.triton.paged_attention import PrefillTiles
from tests.campaign import examples, in_campaign
from tests.kernels.triton.paged_step import Heads, PagedStep, Piece, Sequence

TILE, SEED = 16, 28
HEADS = (Heads(), Heads(6, 2), Heads(3, 3), Heads(4, 1, 24))


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "decode_tiles", lambda *_: DecodeTiles(TILE, 4, 2))
    monkeypatch.setattr(
        attention_module, "prefill_tiles", lambda *_, **__: PrefillTiles(32, TILE, 4, 2)
    )
    monkeypatch.setattr(attention_module, "MIN_PART_TILES", 1)


def draw(rng: random.Random, heads: Heads, longest: int, fewest: int, most: int) -> Piece:
    """A piece of so many tokens; some are padding."""
    count, seed = rng.randint(fewest, most), rng.randrange(1000)
    length = max(count, rng.choice((rng.randint(1, 20), rng.randint(1, longest))))
    is_padding = rng.random() < 0.1
    return Piece(Sequence.draw(length, heads, seed), 0 if is_padding else length, count)


def random_step(rng: random.Random) -> PagedStep:
    heads, most = rng.choice(HEADS), rng.choice((2, 3, 5, 8))
    num_decodes = rng.choice((1, 2, 6, 10))
    longest = 220 if num_decodes < 10 else 70
    pieces = [draw(rng, heads, longest, 0, most) for _ in range(num_decodes)]
    pieces += [draw(rng, heads, 60, 1, 40) for _ in range(rng.choice((0, 0, 1, 3)))]
    spec = heads.spec(rng.choice((0, 0, 7, 40)), rng.choice((0.0, 0.0, 5.0)))
    step = PagedStep(
        heads, pieces, num_decodes, spec, block_size=rng.choice((4, 16, 48)),
        kv_cache=rng.choice(("auto", "auto", "int8", "fp8")), decode_tokens=most,
    )  # fmt: skip
    num_tokens, num_seqs = step.metadata.query_start[-1], len(pieces)
    match rng.choice(("exact", "decodes", "mixed")):
        case "decodes" if num_seqs == num_decodes:
            starts = [most * i for i in range(num_seqs + 1)]
            step.num_padding = starts[-1] - num_tokens
            step.metadata = bounds(step, starts)
        case "mixed" if num_tokens > most:
            step.metadata = bounds(step, [0] + [num_tokens] * num_seqs)
        case _:
            step.num_padding = rng.choice((0, 3))
    return step


def bounds(step: PagedStep, starts: list[int]) -> AttentionMetadata:
    """What a graph was captured with: see `HostBounds.of_shape`."""
    num_seqs = len(step.pieces)
    lengths = [max(piece.seq_len for piece in step.pieces)] * num_seqs
    return replace(step.metadata, num_decodes=num_seqs, query_start=starts, seq_lens=lengths)


def reached(step: PagedStep) -> set[str]:
    """What of the kernels a step has come by."""
    metadata, decodes = step.metadata, step.pieces[: step.num_decodes]
    names = {f"cache {step.kv_cache}", f"heads {step.heads.num}/{step.heads.num_kv}"}
    names |= {"window"} if step.spec.window else set()
    names |= {"softcap"} if step.spec.softcap else set()
    names |= {"chunks"} if len(step.pieces) > step.num_decodes else set()
    if metadata.query_start[-1] > int(metadata.query_start_A[-1]):
        names.add("a graph of decodes, with tokens of nobody")
    if metadata.num_decodes > step.num_decodes:
        names.add("a graph of decodes and chunks")
    for piece in decodes:
        if piece.num_queries in (0, step.decode_tokens):
            names.add("all tokens" if piece.num_queries else "no tokens")
        names |= {"padding"} if piece.seq_len == 0 and piece.num_queries else set()
    [plan] = [plan for plan in metadata.scratch.values() if isinstance(plan, DecodePlan)]
    merged = "a kernel" if plan.merges_M4 is not None else "the last program"
    for *_, num_parts, _, count in plan.parts_P8[: int(plan.first_parts[-1])].tolist():
        names |= {f"{min(count, 2)} tokens merged by {merged}"} if num_parts > 1 else {"whole"}
    return names


# What few steps from SEED come by.
EVERYTHING = {
    "cache auto", "cache int8", "cache fp8", "heads 4/2", "heads 6/2", "heads 3/3", "heads 4/1",
    "window", "softcap", "chunks", "no tokens", "all tokens", "padding", "whole",
    "a graph of decodes, with tokens of nobody", "a graph of decodes and chunks",
    "1 tokens merged by a kernel", "2 tokens merged by a kernel",
    "1 tokens merged by the last program", "2 tokens merged by the last program",
}  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [SEED, *in_campaign(*range(4))])
def test_decodes_of_any_numbers_of_tokens_attend_as_dense_attention_does(seed: int) -> None:
    rng, found = random.Random(seed), set[str]()
    for _ in range(examples(30)):
        step = random_step(rng)
        check(step, rng.choice((1, 4, 24)))
        found |= reached(step)
    assert seed != SEED or found == EVERYTHING


def check(step: PagedStep, num_sms: int, batch_invariant: bool = False) -> None:
    out_THD = step.run(num_sms, batch_invariant)
    torch.testing.assert_close(out_THD.double(), step.expected().double(), rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("is_tile_too_wide", [True, False])
def test_decodes_that_are_chunks_to_the_kernels_leave_nothing_unwritten(
    monkeypatch: pytest.MonkeyPatch, is_tile_too_wide: bool
) -> None:
    """Batch-invariant they always are, and otherwise if a tile of their rows would be too wide."""
    heads, empty = Heads(8, 2), torch.empty
    pieces = [Piece(Sequence.draw(length, heads), length, 2) for length in (30, 2, 77)]
    step = PagedStep(heads, pieces, 3, heads.spec(), decode_tokens=4, num_padding=6)
    step.metadata = bounds(step, [0, 4, 8, 12])
    monkeypatch.setattr(attention_module, "MAX_TILE", 16 * 16 - is_tile_too_wide)
    monkeypatch.setattr(torch, "empty", lambda *size, **kind: empty(*size, **kind).fill_(-7))
    check(step, 4)
    assert is_tile_too_wide != any(
        isinstance(x, DecodePlan) for x in step.metadata.scratch.values()
    )
    step.metadata.scratch.clear()
    check(step, 4, batch_invariant=True)
