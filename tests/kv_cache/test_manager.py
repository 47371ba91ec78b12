"""The KVCacheManager, with worked numbers at the boundaries."""

from __future__ import annotations

import numpy as np
import pytest

from nanocore.kv_cache import KeyChain, KVCacheManager

BLOCK_SIZE = 4


def keys_of(tokens: list[int]) -> KeyChain:
    chain = KeyChain(BLOCK_SIZE)
    chain.extend(np.array(tokens, "<i4").tobytes())
    return chain


def run(kv_cache: KVCacheManager, handle: int, tokens: list[int]) -> int:
    """Admit a request whole; returns the tokens it found cached."""
    chain = keys_of(tokens)
    hits = kv_cache.find_prefix(chain.keys, len(tokens))
    assert kv_cache.allocate(handle, len(tokens), hits) is not None
    kv_cache.register(handle, chain.keys, 0, len(chain.keys))
    return len(hits) * BLOCK_SIZE


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_are_the_tokens_rounded_up(num_tokens: int, num_blocks: int) -> None:
    kv_cache = KVCacheManager(10, BLOCK_SIZE)
    block_ids = kv_cache.allocate(1, num_tokens)
    assert block_ids is not None
    assert len(block_ids) == num_blocks
    assert kv_cache.num_free_blocks == 10 - num_blocks


def test_growing_within_a_block_takes_nothing() -> None:
    kv_cache = KVCacheManager(10, BLOCK_SIZE)
    kv_cache.allocate(1, 5)
    assert kv_cache.allocate(1, 8) == []
    assert kv_cache.allocate(1, 9) == [2]


def test_a_failed_allocation_touches_nothing() -> None:
    kv_cache = KVCacheManager(3, BLOCK_SIZE)
    assert run(kv_cache, 1, [1] * 8) == 0
    kv_cache.free(1)
    before = kv_cache._pool.free_ids()
    hits = kv_cache.find_prefix(keys_of([1] * 16).keys, 16)
    assert len(hits) == 2
    assert kv_cache.allocate(2, 16, hits) is None
    assert kv_cache._pool.free_ids() == before
    assert kv_cache.block_ids(2) == []


def test_a_full_hit_recomputes_the_last_block() -> None:
    kv_cache = KVCacheManager(10, BLOCK_SIZE)
    assert run(kv_cache, 1, list(range(8))) == 0
    assert run(kv_cache, 2, list(range(8))) == 4  # capped at 7 tokens, so one block
    assert run(kv_cache, 3, list(range(9))) == 8


def test_hits_in_the_free_list_count_against_free_capacity() -> None:
    kv_cache = KVCacheManager(3, BLOCK_SIZE)
    run(kv_cache, 1, list(range(8)))
    kv_cache.free(1)
    hits = kv_cache.find_prefix(keys_of(list(range(12))).keys, 12)
    assert kv_cache.can_admit(12, hits)
    kv_cache.allocate(9, 4)  # someone takes the one block that was never used
    assert not kv_cache.can_admit(12, hits)


def test_shared_blocks_do_not_count_against_free_capacity() -> None:
    kv_cache = KVCacheManager(3, BLOCK_SIZE)
    run(kv_cache, 1, list(range(8)))
    hits = kv_cache.find_prefix(keys_of(list(range(12))).keys, 12)
    assert kv_cache.can_admit(12, hits)
    assert run(kv_cache, 2, list(range(12))) == 8
    assert kv_cache.num_free_blocks == 0


def test_content_survives_freeing_until_its_memory_is_taken() -> None:
    kv_cache = KVCacheManager(4, BLOCK_SIZE)
    run(kv_cache, 1, list(range(8)))
    kv_cache.free(1)
    assert kv_cache.num_free_blocks == 4
    assert run(kv_cache, 2, list(range(9))) == 8
    kv_cache.free(2)
    kv_cache.allocate(3, 16)  # takes every block
    kv_cache.free(3)
    assert run(kv_cache, 4, list(range(9))) == 0


def test_memory_pressure_evicts_the_end_of_a_prefix_before_its_beginning() -> None:
    kv_cache = KVCacheManager(4, BLOCK_SIZE)
    run(kv_cache, 1, list(range(16)))
    kv_cache.free(1)
    kv_cache.allocate(2, 2 * BLOCK_SIZE)
    kv_cache.free(2)
    assert run(kv_cache, 3, list(range(16))) == 8


def test_reset_is_refused_while_blocks_are_held() -> None:
    kv_cache = KVCacheManager(4, BLOCK_SIZE)
    run(kv_cache, 1, list(range(8)))
    assert not kv_cache.reset_prefix_cache()
    assert kv_cache.num_cached_blocks == 2
    kv_cache.free(1)
    assert kv_cache.reset_prefix_cache()
    assert kv_cache.num_cached_blocks == 0
    assert run(kv_cache, 2, list(range(8))) == 0


def test_without_prefix_caching_nothing_is_found() -> None:
    kv_cache = KVCacheManager(4, BLOCK_SIZE, enable_prefix_caching=False)
    assert run(kv_cache, 1, list(range(8))) == 0
    assert run(kv_cache, 2, list(range(8))) == 0


def test_freeing_twice_or_the_unknown_is_harmless() -> None:
    kv_cache = KVCacheManager(4, BLOCK_SIZE)
    run(kv_cache, 1, [1, 2])
    kv_cache.free(1)
    kv_cache.free(1)
    kv_cache.free(99)
    assert kv_cache.num_free_blocks == 4
