"""The KVCacheManager against a slow model of it: hits, free blocks and their order, exactly.

The model keeps plain lists and compares whole prefixes. It also replays the KV events, which must
give the findable blocks at any time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nanocore.kv_cache import Capacity, KeyChain, KVCacheManager
from nanocore.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from nanocore.kv_cache.manager import NO_PREFIX
from tests.campaign import examples
from tests.kv_cache.counts import free_ids

BLOCK_SIZE = 2
NUM_BLOCKS = 7
Prefix = tuple[str, tuple[int, ...]]  # salt, and all tokens up to the end of a block
Identity = tuple[int, int] | None  # request and block number of whoever registered it first


class Entry(NamedTuple):
    """A findable block; `parent` is what its prefix was known as when it was registered."""

    block_id: int
    identity: Identity
    parent: Identity


@dataclass
class ModelRequest:
    """A request that holds blocks."""

    tokens: list[int]
    salt: str
    block_ids: list[int]
    num_registered: int = 0
    last: Identity = None
    identities: list[Identity] = field(default_factory=list)

    def prefix(self, block: int) -> Prefix:
        return self.salt, tuple(self.tokens[: (block + 1) * BLOCK_SIZE])


class Model:
    """What the manager must do, one list operation at a time."""

    def __init__(self) -> None:
        self.free = list(range(NUM_BLOCKS))
        self.refs = [0] * NUM_BLOCKS
        self.entries: dict[Prefix, Entry] = {}
        self.requests: dict[int, ModelRequest] = {}
        self.fenced: list[tuple[int, list[int]]] = []

    def hits(self, tokens: list[int], salt: str) -> list[int]:
        found: list[int] = []
        parent: Identity = None
        for end in range(BLOCK_SIZE, len(tokens), BLOCK_SIZE):
            entry = self.entries.get((salt, tuple(tokens[:end])))
            if entry is None or entry.parent != parent:
                break
            found.append(entry.block_id)
            parent = entry.identity
        return found

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        for block_id in taken:
            self.refs[block_id] = 1
            self.entries = {p: e for p, e in self.entries.items() if e.block_id != block_id}
        return taken

    def hold(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            if self.refs[block_id] == 0:
                self.free.remove(block_id)
            self.refs[block_id] += 1

    def release(self, block_ids: list[int]) -> None:
        for block_id in reversed(block_ids):
            self.refs[block_id] -= 1
            if self.refs[block_id] == 0:
                cached = any(entry.block_id == block_id for entry in self.entries.values())
                self.free.insert(len(self.free) if cached else 0, block_id)

    def register(self, handle: int, num_full: int) -> None:
        request = self.requests[handle]
        for i in range(request.num_registered, num_full):
            prefix, identity = request.prefix(i), (handle, i)
            block_id = request.block_ids[i]
            old = self.entries.get(prefix)
            if old is not None:
                is_copy = old.parent == request.last
                if is_copy:
                    identity = old.identity
                if not (is_copy and self.refs[old.block_id]):
                    self.entries[prefix] = Entry(block_id, identity, request.last)
                    if self.refs[old.block_id] == 0:
                        self.free.remove(old.block_id)
                        self.free.insert(0, old.block_id)
            else:
                self.entries[prefix] = Entry(block_id, identity, request.last)
            request.last = identity
        request.num_registered = max(request.num_registered, num_full)


class ManagerMachine(RuleBasedStateMachine):
    """Admits, grows, fills, frees, fences and resets at random."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_cache = KVCacheManager(Capacity(NUM_BLOCKS, BLOCK_SIZE))
        self.model = Model()
        self.chains: dict[int, KeyChain] = {}
        self.num_handles = 0
        self.step = 1
        self.completed = 0
        self.mirror: set[bytes] = set()
        self.sequence = 0
        self.kv_cache.subscribe(self.replay)

    def replay(self, batch: KVEventBatch) -> None:
        assert batch.sequence == self.sequence
        self.sequence += 1
        for event in batch.events:
            match event:
                case BlockStored():
                    assert self.mirror.isdisjoint(event.block_hashes)
                    assert len(event.token_ids) == 4 * BLOCK_SIZE * len(event.block_hashes)
                    self.mirror.update(event.block_hashes)
                case BlockRemoved(block_hashes):
                    assert self.mirror.issuperset(block_hashes)
                    self.mirror.difference_update(block_hashes)
                case AllBlocksCleared():
                    self.mirror.clear()

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        salt=st.sampled_from(["", "s"]),
        read=st.integers(0, 3).map(bool),
    )
    def admit(self, tokens: list[int], salt: str, read: bool) -> None:
        self.num_handles += 1
        handle = self.num_handles
        chain = KeyChain(BLOCK_SIZE, {"cache_salt": salt or None})
        chain.extend(np.array(tokens, "<i4").tobytes())
        prefix = self.kv_cache.find_prefix(chain.keys, len(tokens)) if read else NO_PREFIX
        expected = self.model.hits(tokens, salt) if read else []
        assert [block.block_id for block in prefix.blocks] == expected
        fits = self.kv_cache.can_allocate(handle, len(tokens), prefix)
        before = self.kv_cache.num_free_blocks
        added = self.kv_cache.allocate(handle, len(tokens), prefix)
        assert (added is not None) == fits
        if added is None:
            assert before == self.kv_cache.num_free_blocks
            return
        self.model.hold(expected)
        taken = self.model.take(-(-len(tokens) // BLOCK_SIZE) - len(expected))
        assert added == expected + taken
        request = ModelRequest(tokens, salt, added, num_registered=len(expected))
        if expected:
            request.last = self.model.entries[request.prefix(len(expected) - 1)].identity
        self.model.requests[handle] = request
        self.chains[handle] = chain

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        """A step is planned that computes some more of a request's tokens."""
        handle = data.draw(st.sampled_from(sorted(self.model.requests)))
        request = self.model.requests[handle]
        num_full = data.draw(st.integers(0, len(request.tokens) // BLOCK_SIZE))
        self.kv_cache.register(handle, self.chains[handle].keys, num_full)
        self.model.register(handle, num_full)

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def grow(self, data: st.DataObject, more: list[int]) -> None:
        handle = data.draw(st.sampled_from(sorted(self.model.requests)))
        request = self.model.requests[handle]
        num_tokens = len(request.tokens) + len(more)
        num_new = -(-num_tokens // BLOCK_SIZE) - len(request.block_ids)
        fits = self.kv_cache.can_allocate(handle, num_tokens)
        assert fits == (num_new <= len(self.model.free))
        added = self.kv_cache.allocate(handle, num_tokens)
        assert (added is not None) == fits
        if added is None:
            return
        assert added == self.model.take(num_new)
        request.block_ids = request.block_ids + added
        request.tokens = request.tokens + more
        chain = self.chains[handle]
        chain.extend(np.array(request.tokens[len(chain.keys) * BLOCK_SIZE :], "<i4").tobytes())

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data(), in_flight=st.booleans())
    def free(self, data: st.DataObject, in_flight: bool) -> None:
        handle = data.draw(st.sampled_from(sorted(self.model.requests)))
        request = self.model.requests.pop(handle)
        self.kv_cache.free(handle, after_step=self.step if in_flight else self.completed)
        if in_flight and self.step > self.completed:
            self.model.fenced.append((self.step, request.block_ids))
        else:
            self.model.release(request.block_ids)

    @rule()
    def plan_a_step(self) -> None:
        self.step += 1

    @precondition(lambda self: self.completed < self.step)
    @rule()
    def complete_a_step(self) -> None:
        self.completed += 1
        self.kv_cache.complete(self.completed)
        while self.model.fenced and self.model.fenced[0][0] <= self.completed:
            self.model.release(self.model.fenced.pop(0)[1])

    @rule()
    def reset(self) -> None:
        in_use = any(self.model.refs)
        assert self.kv_cache.reset_prefix_cache() is not in_use
        if not in_use:
            self.model.entries = {}

    @invariant()
    def matches_the_model(self) -> None:
        model, kv_cache = self.model, self.kv_cache
        assert free_ids(kv_cache.pool) == model.free
        assert kv_cache.num_free_blocks == len(model.free)
        assert [block.ref_count for block in kv_cache.pool.blocks] == model.refs
        assert kv_cache.num_cached_blocks == len(model.entries)
        for handle, request in model.requests.items():
            assert kv_cache.block_ids(handle) == request.block_ids
        kv_cache.publish_events()
        findable = {block.key[0] for block in kv_cache.pool.blocks if block.key}
        assert findable == self.mirror


ManagerMachine.TestCase.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None
)
TestManagerAgainstItsModel = ManagerMachine.TestCase
