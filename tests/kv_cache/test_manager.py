"""The KVCacheManager, with worked numbers at the boundaries."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from nanocore.kv_cache import Capacity, KeyChain, KVCacheManager, PrefixCacheStats
from nanocore.kv_cache.block_key import DigestFunction
from nanocore.kv_cache.events import BlockRemoved, BlockStored, KVEvent
from tests.kv_cache.counts import free_ids, num_fenced_blocks

BLOCK_SIZE = 4


def keys_of(tokens: list[int], digest: DigestFunction = xxhash.xxh3_128_digest) -> KeyChain:
    chain = KeyChain(BLOCK_SIZE, digest=digest)
    chain.extend(np.array(tokens, "<i4").tobytes())
    return chain


def run(
    kv_cache: KVCacheManager,
    handle: int,
    tokens: list[int],
    digest: DigestFunction = xxhash.xxh3_128_digest,
) -> int:
    """Admit a request whole; returns the tokens it found cached."""
    chain = keys_of(tokens, digest)
    prefix = kv_cache.find_prefix(chain.keys, len(tokens))
    assert kv_cache.allocate(handle, len(tokens), prefix) is not None
    kv_cache.register(handle, chain.keys, len(chain.keys))
    return len(prefix.blocks) * BLOCK_SIZE


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_are_the_tokens_rounded_up(num_tokens: int, num_blocks: int) -> None:
    kv_cache = KVCacheManager(Capacity(10, BLOCK_SIZE))
    block_ids = kv_cache.allocate(1, num_tokens) or []
    assert len(block_ids) == num_blocks
    assert kv_cache.num_free_blocks == 10 - num_blocks


def test_growing_within_a_block_takes_nothing() -> None:
    kv_cache = KVCacheManager(Capacity(10, BLOCK_SIZE))
    kv_cache.allocate(1, 5)
    assert kv_cache.allocate(1, 8) == []
    assert kv_cache.allocate(1, 9) == [2]


def test_a_failed_allocation_touches_nothing() -> None:
    kv_cache = KVCacheManager(Capacity(3, BLOCK_SIZE))
    assert run(kv_cache, 1, [1] * 8) == 0
    kv_cache.free(1)
    before = free_ids(kv_cache.pool)
    prefix = kv_cache.find_prefix(keys_of([1] * 16).keys, 16)
    assert len(prefix.blocks) == 2
    assert kv_cache.allocate(2, 16, prefix) is None
    assert free_ids(kv_cache.pool) == before
    assert kv_cache.block_ids(2) == []


def test_a_full_hit_recomputes_the_last_block() -> None:
    kv_cache = KVCacheManager(Capacity(10, BLOCK_SIZE))
    assert run(kv_cache, 1, list(range(8))) == 0
    assert run(kv_cache, 2, list(range(8))) == 4  # capped at 7 tokens, so one block
    assert run(kv_cache, 3, list(range(9))) == 8


def test_hits_in_the_free_list_count_against_free_capacity() -> None:
    kv_cache = KVCacheManager(Capacity(3, BLOCK_SIZE))
    run(kv_cache, 1, list(range(8)))
    kv_cache.free(1)
    prefix = kv_cache.find_prefix(keys_of(list(range(12))).keys, 12)
    assert kv_cache.can_allocate(99, 12, prefix)
    kv_cache.allocate(9, 4)  # someone takes the one block that was never used
    assert not kv_cache.can_allocate(99, 12, prefix)


def test_shared_blocks_do_not_count_against_free_capacity() -> None:
    kv_cache = KVCacheManager(Capacity(3, BLOCK_SIZE))
    run(kv_cache, 1, list(range(8)))
    prefix = kv_cache.find_prefix(keys_of(list(range(12))).keys, 12)
    assert kv_cache.can_allocate(99, 12, prefix)
    assert run(kv_cache, 2, list(range(12))) == 8
    assert kv_cache.num_free_blocks == 0


def test_content_survives_freeing_until_its_memory_is_taken() -> None:
    kv_cache = KVCacheManager(Capacity(4, BLOCK_SIZE))
    run(kv_cache, 1, list(range(8)))
    kv_cache.free(1)
    assert kv_cache.num_free_blocks == 4
    assert run(kv_cache, 2, list(range(9))) == 8
    kv_cache.free(2)
    kv_cache.allocate(3, 16)  # takes every block
    kv_cache.free(3)
    assert run(kv_cache, 4, list(range(9))) == 0


def test_memory_pressure_evicts_the_end_of_a_prefix_before_its_beginning() -> None:
    kv_cache = KVCacheManager(Capacity(4, BLOCK_SIZE))
    run(kv_cache, 1, list(range(16)))
    kv_cache.free(1)
    kv_cache.allocate(2, 2 * BLOCK_SIZE)
    kv_cache.free(2)
    assert run(kv_cache, 3, list(range(16))) == 8


def test_reset_is_refused_while_blocks_are_held() -> None:
    kv_cache = KVCacheManager(Capacity(4, BLOCK_SIZE))
    run(kv_cache, 1, list(range(8)))
    assert not kv_cache.reset_prefix_cache()
    assert kv_cache.num_cached_blocks == 2
    kv_cache.free(1)
    assert kv_cache.reset_prefix_cache()
    assert kv_cache.num_cached_blocks == 0
    assert run(kv_cache, 2, list(range(8))) == 0


def test_without_prefix_caching_nothing_is_found() -> None:
    kv_cache = KVCacheManager(Capacity(4, BLOCK_SIZE), enable_prefix_caching=False)
    assert run(kv_cache, 1, list(range(8))) == 0
    assert run(kv_cache, 2, list(range(8))) == 0


def test_freeing_twice_or_the_unknown_is_harmless() -> None:
    kv_cache = KVCacheManager(Capacity(4, BLOCK_SIZE))
    run(kv_cache, 1, [1, 2])
    kv_cache.free(1)
    kv_cache.free(1)
    kv_cache.free(99)
    assert kv_cache.num_free_blocks == 4


def test_copies_are_not_cached_twice_and_a_held_one_takes_over_from_a_free_one() -> None:
    kv_cache = KVCacheManager(Capacity(4, BLOCK_SIZE))
    chain = keys_of([1] * 4)
    for handle in (1, 2):
        kv_cache.allocate(handle, 4)
        kv_cache.register(handle, chain.keys, 1)
    assert kv_cache.num_cached_blocks == 1
    kv_cache.free(1)  # findable, and free
    kv_cache.allocate(3, 4)
    kv_cache.register(3, chain.keys, 1)
    (found,) = kv_cache.find_prefix(keys_of([1] * 5).keys, 5).blocks
    assert [found.block_id] == kv_cache.block_ids(3)
    assert free_ids(kv_cache.pool)[0] == 0  # the free copy is taken next


def test_blocks_wait_for_the_last_step_that_may_write_them() -> None:
    kv_cache = KVCacheManager(Capacity(4, BLOCK_SIZE))
    kv_cache.allocate(1, 8)
    kv_cache.allocate(2, 4)
    kv_cache.free(1, after_step=7)
    kv_cache.free(2, after_step=7)
    assert (kv_cache.num_free_blocks, num_fenced_blocks(kv_cache)) == (1, 3)
    kv_cache.complete(5)
    assert kv_cache.num_free_blocks == 1
    kv_cache.complete(7)
    assert (kv_cache.num_free_blocks, num_fenced_blocks(kv_cache)) == (4, 0)


def test_blocks_held_back_are_found_and_shared() -> None:
    kv_cache = KVCacheManager(Capacity(4, BLOCK_SIZE))
    run(kv_cache, 1, list(range(8)))
    kv_cache.free(1, after_step=3)
    assert run(kv_cache, 2, list(range(9))) == 8
    kv_cache.complete(3)
    assert kv_cache.num_free_blocks == 1


def test_the_hit_rate_is_that_of_recent_requests() -> None:
    stats = PrefixCacheStats(window_requests=2)
    assert stats.hit_rate == 0.0
    stats.record(100, 0)
    stats.record(50, 40)
    stats.record(50, 30)
    assert stats.hit_rate == 0.7
    assert (stats.queries, stats.hits) == (200, 70)


def test_what_follows_a_free_block_is_still_found_when_a_held_copy_takes_its_place() -> None:
    # 1 leaves blocks 0 and 1; 2, which did not look them up, holds a copy of the first.
    kv_cache = KVCacheManager(Capacity(6, BLOCK_SIZE))
    run(kv_cache, 1, list(range(8)))
    kv_cache.free(1)
    assert kv_cache.allocate(2, 5) == [2, 3]
    kv_cache.register(2, keys_of(list(range(5))).keys, 1)
    prefix = kv_cache.find_prefix(keys_of(list(range(9))).keys, 9)
    assert [block.block_id for block in prefix.blocks] == [2, 1]


def test_a_digest_shared_by_other_parents_never_serves_what_follows_the_wrong_one() -> None:
    def last_block_only(data: bytes) -> bytes:
        return data[-16:]

    # The second blocks are equal, follow different first ones, and have one digest.
    kv_cache = KVCacheManager(Capacity(8, BLOCK_SIZE))
    run(kv_cache, 1, [1] * 4 + [5] * 4, last_block_only)
    run(kv_cache, 2, [2] * 4 + [5] * 4 + [7] * 4, last_block_only)
    mixed = keys_of([1] * 4 + [5] * 4 + [7] * 5, last_block_only)
    assert len(kv_cache.find_prefix(mixed.keys, 13).blocks) == 1
    second = keys_of([2] * 4 + [5] * 4 + [7] * 5, last_block_only)
    found = [block.block_id for block in kv_cache.find_prefix(second.keys, 13).blocks]
    assert found == kv_cache.block_ids(2)


def test_a_digest_shared_by_other_contents_never_serves_what_follows_the_wrong_one() -> None:
    def first_blocks_collide(data: bytes) -> bytes:
        return b"x" * 16 if len(data) == 16 else xxhash.xxh3_128_digest(data)

    kv_cache = KVCacheManager(Capacity(8, BLOCK_SIZE))
    run(kv_cache, 1, [1] * 4, first_blocks_collide)
    run(kv_cache, 2, [2] * 4 + [7] * 4, first_blocks_collide)
    mixed = keys_of([1] * 4 + [7] * 5, first_blocks_collide)
    assert kv_cache.find_prefix(mixed.keys, 9).blocks == []
    second = keys_of([2] * 4 + [7] * 5, first_blocks_collide)
    assert len(kv_cache.find_prefix(second.keys, 9).blocks) == 2


def test_a_digest_that_changes_its_content_is_removed_before_it_is_stored_again() -> None:
    kv_cache = KVCacheManager(Capacity(8, BLOCK_SIZE))
    events: list[KVEvent] = []
    kv_cache.subscribe(lambda batch: events.extend(batch.events))
    for handle in (1, 2):
        run(kv_cache, handle, [handle] * 4, lambda _: b"x" * 16)
    kv_cache.publish_events()
    contents = [np.array([handle] * 4, "<i4").tobytes() for handle in (1, 2)]
    assert events == [
        BlockStored([b"x" * 16], None, contents[0], BLOCK_SIZE),
        BlockRemoved([b"x" * 16]),
        BlockStored([b"x" * 16], None, contents[1], BLOCK_SIZE),
    ]


def test_the_parent_of_blocks_stored_after_a_known_one_is_that_one() -> None:
    kv_cache = KVCacheManager(Capacity(8, BLOCK_SIZE))
    chain = keys_of(list(range(12)))
    kv_cache.allocate(1, 4)
    kv_cache.register(1, chain.keys, 1)
    events: list[KVEvent] = []
    kv_cache.subscribe(lambda batch: events.extend(batch.events))
    kv_cache.allocate(2, 12)  # did not look up; its first block is a copy
    kv_cache.register(2, chain.keys, 3)
    kv_cache.publish_events()
    digests = [digest for digest, _ in chain.keys]
    tokens = np.arange(4, 12, dtype="<i4").tobytes()
    assert events == [BlockStored(digests[1:], digests[0], tokens, BLOCK_SIZE)]


def test_without_prefix_caching_nothing_is_remembered() -> None:
    kv_cache = KVCacheManager(Capacity(4, BLOCK_SIZE), enable_prefix_caching=False)
    run(kv_cache, 1, list(range(8)))
    assert kv_cache.num_cached_blocks == 0


def test_a_salted_prompts_events_tell_the_salt_apart_from_the_tokens() -> None:
    kv_cache = KVCacheManager(Capacity(4, BLOCK_SIZE))
    events: list[KVEvent] = []
    kv_cache.subscribe(lambda batch: events.extend(batch.events))
    tokens = np.arange(12, dtype="<i4").tobytes()
    chain = KeyChain(BLOCK_SIZE, {"cache_salt": "a"})
    chain.extend(tokens)
    kv_cache.allocate(1, 12)
    kv_cache.register(1, chain.keys, 2)
    kv_cache.register(1, chain.keys, 3)
    kv_cache.publish_events()
    digests = [digest for digest, _ in chain.keys]
    assert events == [
        BlockStored(digests[:2], None, tokens[:32], BLOCK_SIZE, b"cache_salt:1:a"),
        BlockStored(digests[2:], digests[1], tokens[32:], BLOCK_SIZE),
    ]


def test_parents_of_equal_digest_and_content_but_different_prefixes_are_not_confused() -> None:
    def last_block_only(data: bytes) -> bytes:
        return data[-16:]

    # 2's second block takes the place of 1's; 1's third block stays, and follows 1's second.
    kv_cache = KVCacheManager(Capacity(8, BLOCK_SIZE))
    run(kv_cache, 1, [1] * 4 + [5] * 4 + [7] * 4, last_block_only)
    run(kv_cache, 2, [2] * 4 + [5] * 4, last_block_only)
    chain = keys_of([2] * 4 + [5] * 4 + [7] * 5, last_block_only)
    found = [block.block_id for block in kv_cache.find_prefix(chain.keys, 13).blocks]
    assert found == kv_cache.block_ids(2)


def test_what_is_forgotten_is_not_found_though_others_hold_it() -> None:
    kv_cache = KVCacheManager(Capacity(8, 4))
    chain = KeyChain(4)
    chain.extend(np.arange(12, dtype="<i4").tobytes())
    kv_cache.allocate(1, 12)
    kv_cache.register(1, chain.keys, 3)
    prefix = kv_cache.find_prefix(chain.keys, 13)
    assert len(prefix.blocks) == 3
    kv_cache.allocate(2, 13, prefix)
    kv_cache.forget(2)
    assert kv_cache.find_prefix(chain.keys, 13).blocks == []
    assert (kv_cache.num_cached_blocks, kv_cache.num_free_blocks) == (0, 4)
    kv_cache.free(2)
    assert kv_cache.block_ids(1) == [block.block_id for block in prefix.blocks]
    kv_cache.free(1)
    assert kv_cache.num_free_blocks == 8
    kv_cache.forget(1)  # who holds nothing has nothing to forget
