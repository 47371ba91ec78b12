"""Cache groups at random: full attention, windows, windows alone, or states, in one memory.

The machine knows what every block holds: who wrote it last, and for which prefix. So it sees a hit
on something else, a block that two own, and a window that lacks a block. It is told nothing of
slabs, but counts them: whatever the manager says can be allocated, it must allocate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanocore.kv_cache import CacheGroup, Capacity, KeyChain, KVCacheManager
from nanocore.kv_cache.state_group import NO_STATE
from tests.campaign import examples

BLOCK_SIZE = 2
MAX_STEP_TOKENS = 6
Content = tuple[int, ...]  # all tokens up to the end of a block
GROUPS = (
    (CacheGroup("full", 0, 3), CacheGroup("window(4)", 4, 1)),
    (CacheGroup("full", 0, 1), CacheGroup("window(3)", 3, 2)),
    (CacheGroup("full", 0, 2), CacheGroup("window(2)", 2, 1), CacheGroup("window(7)", 7, 3)),
    (CacheGroup("window(5)", 5, 1),),
    (CacheGroup("window(1)", 1, 2), CacheGroup("window(4)", 4, 1)),
    (CacheGroup("full", 0, 3), CacheGroup("state", 0, 1, spacing=1)),
    (CacheGroup("latent"), CacheGroup("state", 0, 2, spacing=3), CacheGroup("window(4)", 4)),
)


@dataclass
class Row:
    """A request: blocks of each group by block number; computed: its tokens with KV."""

    tokens: list[int]
    chain: KeyChain
    tables: list[dict[int, int]]
    computed: int
    last_step: int = 0


class GroupsMachine(RuleBasedStateMachine):
    """Admits, computes, frees, fences and resets at random."""

    @initialize(groups=st.sampled_from(GROUPS), num_slabs=st.integers(3, 9))
    def start(self, groups: tuple[CacheGroup, ...], num_slabs: int) -> None:
        self.groups = groups
        self.kv_cache = KVCacheManager(Capacity(num_slabs, BLOCK_SIZE, groups, MAX_STEP_TOKENS))
        self.num_slabs = num_slabs
        self.rows: dict[int, Row] = {}
        self.num_handles = 0
        self.step, self.completed = 1, 0
        # By group: what each block holds, and which steps in flight use it.
        self.contents: list[dict[int, Content]] = [{} for _ in groups]
        self.in_use: dict[int, list[set[int]]] = {}
        self.written: set[int] = set()  # states, in the step that is planned

    def needed(self, group: CacheGroup, computed: int) -> int:
        """The first block that the next token needs."""
        if group.spacing:
            return max(-(-computed // BLOCK_SIZE) - 1, 0)
        return max(computed - group.window + 1, 0) // BLOCK_SIZE if group.window else 0

    def held(self, group: int) -> list[int]:
        return [one for row in self.rows.values() for one in row.tables[group].values()]

    def use(self, row: Row) -> None:
        """The step that is planned reads and writes the row's blocks."""
        row.last_step = self.step
        used = self.in_use.setdefault(self.step, [set() for _ in self.groups])
        for own, table in zip(used, row.tables, strict=True):
            own.update(table.values())

    def write(self, row: Row, end: int) -> None:
        """Compute tokens up to `end`, which a step plans; their blocks are registered."""
        for group, table in enumerate(row.tables):
            for number in range(row.computed // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
                stop = min((number + 1) * BLOCK_SIZE, end)
                if number not in table and self.groups[group].spacing and stop < end:
                    continue
                block = table[number]
                shared = [
                    other for other in self.rows.values()
                    if other is not row and other.tables[group].get(number) == block
                ]  # fmt: skip
                assert not shared, "a block that is written to has one owner"
                self.contents[group][block] = tuple(row.tokens[:stop])
                if self.groups[group].spacing:
                    self.written.add(block)
        row.computed = end

    def extend(self, row: Row, added: list[list[int]], num_before: int) -> None:
        """Append the blocks; of those before the first that is seen there is none."""
        assert len({len(ids) for ids in added}) == 1
        for group, table, ids in zip(self.groups, row.tables, added, strict=True):
            first, end = self.needed(group, row.computed), num_before + len(ids)
            held = range(first, end)
            new = enumerate(ids, num_before)
            table.update((n, one) for n, one in new if n in held and one != NO_STATE)

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        again=st.integers(0, 3),
        data=st.data(),
    )
    def admit(self, tokens: list[int], again: int, data: st.DataObject) -> None:
        if self.rows and again:  # as another's, up to some token
            other = data.draw(st.sampled_from(sorted(self.rows)))
            cut = data.draw(st.integers(0, len(self.rows[other].tokens)))
            tokens = self.rows[other].tokens[:cut] + tokens
        self.num_handles += 1
        handle = self.num_handles
        chain = KeyChain(BLOCK_SIZE)
        chain.extend(np.array(tokens, "<i4").tobytes())
        prefix = self.kv_cache.find_prefix(chain.keys, len(tokens))
        cached = len(prefix.blocks) * BLOCK_SIZE
        assert cached < len(tokens)
        count = data.draw(st.integers(1, min(MAX_STEP_TOKENS, len(tokens) - cached)))
        fits = self.kv_cache.can_allocate(handle, cached + count, prefix)
        added = self.kv_cache.allocate(handle, cached + count, prefix, len(tokens))
        assert (added is not None) == fits
        if added is None:
            return
        added = self.by_group(added)
        row = Row(tokens, chain, [{} for _ in self.groups], cached)
        self.extend(row, added, 0)
        for group, table in enumerate(row.tables):
            for number in range(self.needed(self.groups[group], cached), cached // BLOCK_SIZE):
                if self.groups[group].spacing:
                    assert table[number] not in self.written, "known only when its step is over"
                expected = tuple(tokens[: (number + 1) * BLOCK_SIZE])
                assert self.contents[group][table[number]] == expected, (
                    "a hit has what it stands for"
                )
        self.rows[handle] = row
        self.write(row, cached + count)
        self.kv_cache.register(handle, chain.keys, row.computed // BLOCK_SIZE)
        self.use(row)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=2))
    def compute(self, data: st.DataObject, more: list[int]) -> None:
        """A step computes more of a request's tokens, perhaps ones that are new."""
        handle = data.draw(st.sampled_from(sorted(self.rows)))
        row = self.rows[handle]
        if row.last_step == self.step:
            self.plan_a_step()
        if row.computed == len(row.tokens):
            row.tokens = row.tokens + more
            row.chain.extend(
                np.array(row.tokens[len(row.chain.keys) * BLOCK_SIZE :], "<i4").tobytes()
            )
        left = len(row.tokens) - row.computed
        end = row.computed + data.draw(st.integers(1, min(MAX_STEP_TOKENS, left)))
        if data.draw(st.booleans()) or end - row.computed > 1:
            self.leave_window(handle, row)
        fits = self.kv_cache.can_allocate(handle, end)
        added = self.kv_cache.allocate(handle, end)
        assert (added is not None) == fits
        if added is None:
            return
        added = self.by_group(added)
        self.extend(row, added, -(-row.computed // BLOCK_SIZE))
        self.write(row, end)
        self.kv_cache.register(handle, row.chain.keys, end // BLOCK_SIZE)
        self.use(row)

    def by_group(self, block_ids: list[int]) -> list[list[int]]:
        num_blocks = len(block_ids) // len(self.groups)
        assert len(block_ids) == num_blocks * len(self.groups)
        starts = [num_blocks * group for group in range(len(self.groups))]
        return [block_ids[start : start + num_blocks] for start in starts]

    def leave_window(self, handle: int, row: Row) -> None:
        self.kv_cache.leave_window(handle, row.computed, after_step=self.step - 1)
        for group, table in zip(self.groups, row.tables, strict=True):
            for number in [one for one in table if one < self.needed(group, row.computed)]:
                del table[number]

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), is_damaged=st.integers(0, 5))
    def free(self, data: st.DataObject, is_damaged: int) -> None:
        handle = data.draw(st.sampled_from(sorted(self.rows)))
        if not is_damaged:
            self.kv_cache.forget(handle)
        self.kv_cache.free(handle, after_step=self.step)
        del self.rows[handle]

    @rule()
    def plan_a_step(self) -> None:
        self.step += 1
        self.kv_cache.begin_step()
        self.written.clear()

    @precondition(lambda self: self.completed + 1 < self.step)
    @rule()
    def complete_a_step(self) -> None:
        self.completed += 1
        self.in_use.pop(self.completed, None)
        self.kv_cache.complete(self.completed)

    @rule()
    def reset(self) -> None:
        self.kv_cache.reset_prefix_cache()

    @precondition(lambda self: self.rows)
    @rule()
    def end_all(self) -> None:
        for handle in list(self.rows):
            self.kv_cache.free(handle)
        self.rows.clear()
        self.kv_cache.complete(self.step)
        self.completed, self.in_use = self.step, {}
        self.plan_a_step()
        assert self.kv_cache.num_free_blocks == self.kv_cache.num_blocks
        assert self.kv_cache.usage == 0

    @invariant()
    def every_row_has_the_blocks_that_it_sees(self) -> None:
        if not hasattr(self, "rows"):
            return
        for handle, row in self.rows.items():
            for i, (group, table) in enumerate(zip(self.groups, row.tables, strict=True)):
                assert self.kv_cache.block_ids(handle, i) == [
                    table[number] for number in sorted(table)
                ]
                seen = range(self.needed(group, row.computed), -(-row.computed // BLOCK_SIZE))
                assert set(seen) <= set(table)

    @invariant()
    def nobody_gets_what_others_use(self) -> None:
        """Slabs of held blocks, and of blocks that steps in flight use, belong to one group."""
        if not hasattr(self, "rows"):
            return
        owners: dict[int, int] = {}
        for group, spec in enumerate(self.groups):
            used = self.held(group)
            used += [one for step in self.in_use.values() for one in step[group]]
            for block in used:
                assert owners.setdefault(block // spec.per_slab, group) == group
        assert len(owners) <= self.num_slabs


GroupsMachine.TestCase.settings = settings(
    max_examples=examples(150), stateful_step_count=50, deadline=None
)
TestGroups = GroupsMachine.TestCase
