"""The block pool against a slow model of itself, and its order of eviction."""

from __future__ import annotations

import tracemalloc

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nanocore.kv_cache import Block, BlockPool, PrefixIndex
from tests.campaign import examples
from tests.kv_cache.counts import free_ids

NUM_BLOCKS = 6


def make_pool(num_blocks: int = NUM_BLOCKS) -> tuple[BlockPool, PrefixIndex]:
    index = PrefixIndex()
    return BlockPool(num_blocks, on_evict=index.remove), index


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def test_fresh_blocks_are_taken_in_order() -> None:
    pool, _ = make_pool()
    assert ids(pool.take(2)) == [0, 1]
    assert pool.num_free == NUM_BLOCKS - 2


def test_blocks_without_content_are_taken_before_cached_ones() -> None:
    pool, index = make_pool(3)
    cached, plain = pool.take(2)
    index.put([cached], None, [(b"k", b"c")])
    pool.release([cached])
    pool.release([plain])
    assert free_ids(pool) == [plain.block_id, 2, cached.block_id]


def test_a_requests_tail_is_evicted_before_its_prefix() -> None:
    pool, index = make_pool(2)
    blocks = pool.take(2)
    assert index.put(blocks, None, [(b"0", b""), (b"1", b"")]) == 2
    pool.release(reversed(blocks))
    assert ids(pool.take(1)) == [1]


def test_a_found_free_block_is_held_again_with_its_content() -> None:
    pool, index = make_pool(2)
    (block,) = pool.take(1)
    key = (b"k", b"c")
    index.put([block], None, [key])
    pool.release([block])
    assert index.find_prefix([key]) == [block]
    pool.hold([block])
    assert (block.ref_count, free_ids(pool)) == (1, [1])


def test_taking_a_cached_block_forgets_its_content() -> None:
    pool, index = make_pool(1)
    (block,) = pool.take(1)
    key = (b"k", b"c")
    index.put([block], None, [key])
    pool.release([block])
    pool.take(1)
    assert index.find_prefix([key]) == []
    assert not index._blocks


def test_an_idle_block_costs_less_than_200_bytes() -> None:
    num_blocks = 20_000
    tracemalloc.start()
    pool, _ = make_pool(num_blocks)
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert pool.num_free == num_blocks
    assert num_bytes / num_blocks < 200


class BlockPoolMachine(RuleBasedStateMachine):
    """Takes, shares, caches and releases at random; the model is a list of free ids."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.index = make_pool()
        self.free = list(range(NUM_BLOCKS))
        self.refs = [0] * NUM_BLOCKS
        self.num_keys = 0

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.free)))
        expected, self.free = self.free[:count], self.free[count:]
        assert ids(self.pool.take(count)) == expected
        for block_id in expected:
            self.refs[block_id] = 1
            assert self.pool.blocks[block_id].key is None

    @rule(block_id=st.integers(0, NUM_BLOCKS - 1))
    def share(self, block_id: int) -> None:
        if block_id in self.free:
            self.free.remove(block_id)
        self.pool.hold([self.pool.blocks[block_id]])
        self.refs[block_id] += 1

    @rule(block_id=st.integers(0, NUM_BLOCKS - 1))
    def cache(self, block_id: int) -> None:
        block = self.pool.blocks[block_id]
        if self.refs[block_id] and block.key is None:
            self.num_keys += 1
            self.index.put([block], None, [(str(self.num_keys).encode(), b"")])

    @precondition(lambda self: any(self.refs))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = [i for i, count in enumerate(self.refs) if count]
        block = self.pool.blocks[data.draw(st.sampled_from(held))]
        self.pool.release([block])
        self.refs[block.block_id] -= 1
        if self.refs[block.block_id] == 0:
            self.free.insert(len(self.free) if block.key else 0, block.block_id)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def reuse_first(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.free))
        self.pool.reuse_first(self.pool.blocks[block_id])
        self.free.remove(block_id)
        self.free.insert(0, block_id)

    @invariant()
    def matches_the_model(self) -> None:
        assert free_ids(self.pool) == self.free
        assert self.pool.num_free == len(self.free)
        assert [block.ref_count for block in self.pool.blocks] == self.refs


BlockPoolMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None
)
TestBlockPoolAgainstItsModel = BlockPoolMachine.TestCase
