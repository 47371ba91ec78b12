"""Decodes of several query tokens, on backends that take a sequence of any number of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.attention_step import make_metadata
from nanocore.kernels.attention import AttentionMetadata, AttentionSpec
from nanocore.kernels.kv_quantization import KVCacheFormat, kv_cache_format
from nanocore.worker.memory.kv_memory import KVLayout, KVMemory, KVSpec
from tests.campaign import examples
from tests.kernels.test_moved_blocks import make_kernels

BLOCK_SIZE, HEADS, CPU = 16, 4, torch.device("cpu")
SPECS = [AttentionSpec(0.3, window, softcap) for window in (0, 3, 30) for softcap in (0.0, 5.0)]
KERNELS = {name: make_kernels(name) for name in ("torch", "cpu")}


@settings(max_examples=examples(60), deadline=None)
@given(
    decodes=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 4)), min_size=1, max_size=5),
    chunks=st.lists(st.tuples(st.integers(20, 90), st.integers(1, 20)), max_size=2),
    spec=st.sampled_from(SPECS),
    kv_cache=st.sampled_from(["auto", "int8"]),
)
@pytest.mark.parametrize("backend", KERNELS)
def test_a_token_gets_the_same_bits_be_its_sequence_a_decode_or_a_chunk(
    backend: str,
    decodes: list[tuple[int, int]],
    chunks: list[tuple[int, int]],
    spec: AttentionSpec,
    kv_cache: str,
) -> None:
    seqs = [*((max(length, count), count) for length, count in decodes), *chunks]
    generator = torch.Generator().manual_seed(len(seqs))
    form = KVCacheFormat(torch.float32)
    if kv_cache == "int8":
        form = kv_cache_format(kv_cache, torch.float32, "cpu")
    cache = KVMemory(KVLayout([KVSpec(2, 32)], form, BLOCK_SIZE), 9, CPU).layer(0)
    cache.k_NSKD.copy_(torch.randint(-90, 90, cache.k_NSKD.shape, generator=generator))
    cache.v_NSKD.copy_(torch.randint(-90, 90, cache.v_NSKD.shape, generator=generator))
    for scale in (cache.k_scale_NSK, cache.v_scale_NSK):
        if scale is not None:
            scale.fill_(0.01)
    table = torch.randint(0, 9, (len(seqs), 6), generator=generator, dtype=torch.int32)
    as_chunks = make_metadata(seqs, table, num_padding=2, num_decodes=0)
    as_decodes = make_metadata(
        seqs, table, num_padding=2, num_decodes=len(decodes), decode_tokens=4
    )
    q_THD = torch.randn(len(as_chunks.positions_T), HEADS, 32, generator=generator)
    out, expected = (
        KERNELS[backend].paged_attention(q_THD, cache, metadata, spec)
        for metadata in (as_decodes, as_chunks)
    )
    assert torch.equal(out, expected)
    assert not out[-2:].any()


def test_the_reference_writes_zeros_for_padding_of_any_number_of_tokens() -> None:
    seqs, table = [(9, 3), (0, 4), (0, 0), (0, 1)], torch.zeros(4, 1, dtype=torch.int32)
    metadata = make_metadata(seqs, table, num_decodes=4, decode_tokens=4)
    cache = KVMemory(KVLayout([KVSpec(2, 32)], KVCacheFormat(torch.float32), BLOCK_SIZE), 1, CPU)
    q_THD = torch.randn(8, HEADS, 32)
    out_THD = KERNELS["torch"].paged_attention(q_THD, cache.layer(0), metadata, AttentionSpec(0.3))
    assert out_THD.isfinite().all()
    assert not out_THD[3:].any()


def bounds(query_start: list[int], num_decodes: int, decode_tokens: int) -> AttentionMetadata:
    table = torch.zeros(1, 1, dtype=torch.int32)
    metadata = make_metadata([(1, 1)], table, num_decodes=num_decodes, decode_tokens=decode_tokens)
    return replace(metadata, query_start=query_start)


def test_the_host_knows_how_many_tokens_are_of_decodes_unless_any_may_be_of_chunks() -> None:
    assert bounds([0, 1, 2, 9], 2, 1).num_decoded == 2
    assert bounds([0, 1, 2, 9], 0, 1).num_decoded == 0
    assert bounds([0, 4, 4, 6, 30], 3, 4).num_decoded == 6
    assert bounds([0, 4, 8, 12], 3, 4).num_decoded == 12
    assert bounds([0, 256, 256, 256], 3, 4).num_decoded == 0
    assert bounds([0, 1, 4, 9], 3, 1).num_decoded == 0
    assert bounds([0, 8, 8, 8, 8, 8], 5, 4).num_decoded == 0, "fewer tokens than decodes could have"
