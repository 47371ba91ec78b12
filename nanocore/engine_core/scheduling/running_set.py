"""The running set: the requests that own rows, their tokens and blocks, and the steps in flight.

A running request owns a fixed row, the same here and on every worker, until it ends or is
preempted. Its state is in numpy columns: a Python loop over requests would cost microseconds per
request and step (8 µs in vLLM). Python runs only for rows that are admitted, computed in chunks,
cross a block, end or are preempted; all others cost a few vector operations together.

A row is in one of three states: *prefilling* while known tokens of it are left to plan, *decoding*
while each step takes one token, and *finishing* when its last step is planned and the result is not
in. A step goes through

    compute (running rows) → admit (new rows) → begin (in flight) → take_oldest, append

The scheduler decides who runs, `preemption` who stops when blocks run out; `step_result` reads the
results.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.config import SchedulerConfig
from nanocore.engine_core.drafting.proposer import RowFollower
from nanocore.engine_core.grammars.token_matcher import TokenMatcher
from nanocore.engine_core.policy.order import Precedence, PrecedenceKey
from nanocore.engine_core.requests.ends import RepetitionDetector, StopIds
from nanocore.engine_core.requests.request import TOKEN_DTYPE, Request
from nanocore.engine_core.scheduling.columns import (
    IntArray,
    TokenColumns,
    TokenTimes,
    attended_tokens,
    places,
)
from nanocore.engine_core.scheduling.step_plan import (
    Chunk,
    StepOutcome,
    StepPlan,
    chunk_limit,
    new_row,
)
from nanocore.kv_cache import KVCacheManager, Prefix
from nanocore.worker.plan import SchedulerOutput


class RunningSet:
    """The rows. Groups (row modulo num_groups) are served by steps of their own.

    Args:
        kv_cache: of the rows' blocks. precedence: sort key of requests, for the order of prompts.

    token_ids: int32 [max_num_seqs, max_model_len + 1]; memory pages are touched only as rows fill.
        The last column is for a token sampled after a prompt of max_model_len, never computed.
    num_tokens: tokens whose ids are known.
    num_computed: tokens whose KV is computed or planned; with steps in flight it may exceed
        num_tokens. max_computed: its limit, all tokens but the last.
    may_lag: rows draft, and layers keep states. lag: then, of the computed tokens, drafts at the
        end that were right: the state is before them until the row's next step.
    num_cached: tokens found in the prefix cache. held_tokens: tokens that fit the row's blocks.
    quiet_until: while num_computed is at most this, a decode needs no block and does not reach its
        length, so no Python runs for the row.
    requests: by row, or None. client, handle: of the row's request. clients: rows per client.
    decoding: rows, in the order in which they began to decode. The array is replaced, never
        changed: steps in flight refer to it, and equal arrays are told by identity.
    prefilling, finishing: rows, in admission order.
    matchers: by row with structured output. detectors: by row that ends when it repeats itself;
        they know its output tokens, as of num_tokens. pooled_rows: rows that end with an embedding.
    in_flight: steps, the oldest first. sampled: tokens since the last plan, for pipeline stages.
    """

    # Dictionaries of more than 30 attributes are slow.
    __slots__ = (
        "_config", "_free_rows", "_kv_cache", "_num_rows", "_precedence", "_removed_rows",
        "_stalled", "client", "clients", "decoding", "detectors", "finishing", "follower", "handle",
        "held_tokens", "in_flight", "lag", "logprob_rows", "matchers", "max_computed",
        "may_lag", "may_overlap", "num_cached", "num_computed", "num_groups", "num_tokens",
        "pooled_rows", "prefilling", "prompt_logprob_rows", "quiet_until", "requests", "sampled",
        "stop_ids", "times", "token_ids",
    )  # fmt: skip

    def __init__(
        self, config: SchedulerConfig, kv_cache: KVCacheManager, precedence: PrecedenceKey
    ) -> None:
        num_rows, num_groups = config.max_num_seqs, config.num_groups

        def column() -> IntArray:
            return np.zeros(num_rows, np.int64)

        # A row's next step needs its last one's result: with drafts for the number of tokens, with
        # groups because the first pipeline stage learns sampled tokens through the engine.
        self.may_overlap = num_groups == 1 and not config.num_speculative_tokens
        self.num_groups = num_groups
        self._config = config
        self._kv_cache = kv_cache
        self.may_lag = config.num_speculative_tokens > 0 and any(g.spacing for g in kv_cache.groups)
        self._precedence = precedence
        self.token_ids = np.zeros((num_rows, config.max_model_len + 1), TOKEN_DTYPE)
        self.num_tokens, self.num_computed, self.max_computed = column(), column(), column()
        self.num_cached, self.held_tokens, self.quiet_until = column(), column(), column()
        self.client, self.lag = column(), column()
        self.handle: NDArray[np.uint32] = np.zeros(num_rows, np.uint32)
        self.logprob_rows: set[int] = set()
        self.prompt_logprob_rows: set[int] = set()
        self.pooled_rows: set[int] = set()
        self.matchers: dict[int, TokenMatcher] = {}
        self.detectors: dict[int, RepetitionDetector] = {}
        self.follower: RowFollower | None = None
        self.requests: list[Request | None] = [None] * num_rows
        self.clients: dict[int, int] = {}
        self.stop_ids = StopIds()
        self.times = TokenTimes(num_rows)
        self.decoding: IntArray = np.zeros(0, np.int64)
        self.prefilling: list[int] = []
        self.finishing: list[int] = []
        self._num_rows = 0
        self._free_rows = [list(range(i, num_rows, num_groups)) for i in range(num_groups)]
        self.in_flight: deque[StepOutcome] = deque()
        # Rows that wait for blocks, over all groups. Nobody is admitted while there are any, so a
        # stale entry would stop admission for ever.
        self._stalled: set[int] = set()
        # Both since the last plan; workers learn of them with the next one.
        self._removed_rows: list[int] = []
        self.sampled: list[TokenColumns] = []

    def __len__(self) -> int:
        return self._num_rows

    def __iter__(self) -> Iterator[Request]:  # by row
        return (request for request in self.requests if request is not None)

    def request(self, row: int) -> Request:
        request = self.requests[row]
        assert request is not None, f"row {row} is free"
        return request

    def row_counts(self, group: int) -> tuple[int, int]:
        """Return (owned rows, free rows) of the group."""
        num_free = len(self._free_rows[group])
        return len(range(group, len(self.requests), self.num_groups)) - num_free, num_free

    def known_tokens(self, row: int) -> NDArray[np.int32]:
        """Return a view of the row's prompt and output tokens."""
        return self.token_ids[row, : self.num_tokens[row]]

    @property
    def is_short_of_blocks(self) -> bool:
        """Whether a row waits for blocks. Nobody is admitted then, who would take them from it."""
        return bool(self._stalled)

    @property
    def can_go_on(self) -> bool:
        """Whether a row has tokens to compute, and does not wait for blocks."""
        return len(self.decoding) + len(self.prefilling) > len(self._stalled)

    def has_work(self, group: int) -> bool:
        """Whether a step of this group, which has none in flight, would compute anything."""
        is_taken = self.row_counts(group)[0] > 0
        return is_taken or any(self._next_chunk(row, group) for row in self.prefilling)

    def decode_load(self, group: int) -> tuple[int, int]:
        """Return (tokens, tokens attended to) of the decodes in a step of the group."""
        ends = self.num_computed[self._decodes(group, set())] + 1
        return len(ends), int(attended_tokens(1, ends).sum())

    def compute(
        self,
        plan: StepPlan,
        reserved: tuple[Precedence, int] | None,
        make_room: Callable[[StepPlan, int, int], None],
    ) -> int:
        """Give every running row of the plan's group its tokens and blocks.

        Args:
            reserved: (precedence, tokens) of a waiting request for which others were preempted: its
                tokens are kept free before prompts of later precedence get theirs.
            make_room: called with a row and the number of tokens that its blocks are to hold, if
                too few are free: stalls the row, or preempts one.

        Returns the budget that is left.
        """
        group = plan.group
        assert self.may_overlap or all(group != one.plan.group for one in self.in_flight), (
            f"step {plan.number} of group {group} needs what its last one, in flight, samples"
        )
        if not self._num_rows:
            return plan.token_budget
        # One pass may fail for lack of blocks. Then a row was stalled or preempted, its tokens
        # return to the budget, and the next pass shares it out anew. Each failed pass takes one row
        # out, so this ends. Blocks that a pass has allocated stay with their rows: `provide` finds
        # them next time. Everything else that a pass computes is dropped: computed counts advance
        # only below, after the pass that succeeds.
        while True:
            decoding = self._decodes(group, plan.stalled)
            ends = self.num_computed[decoding] + 1
            # Only these decodes cross a block or reach their length; the others need no Python.
            notable = (ends > self.quiet_until[decoding]).nonzero()[0]
            decodes = list(zip(decoding[notable].tolist(), ends[notable].tolist(), strict=True))
            chunks, budget = self._share_budget(plan, plan.token_budget - len(ends), reserved)
            for row, end in decodes + chunks:
                if not self.provide(plan, row, int(self.num_computed[row]), end):
                    make_room(plan, row, end)
                    break
            else:
                break
        # Which rows of this group are stalled is decided anew in each of its plans; rows of other
        # groups stay stalled until their own group plans.
        self._stalled = {r for r in self._stalled if r % self.num_groups != group} | plan.stalled
        plan.decoding, plan.decode_ends = decoding, ends
        self.num_computed[decoding] = ends
        plan.last += [row for row, end in decodes if end == self.max_computed[row]]
        if plan.last:
            self.decoding = self.decoding[~np.isin(self.decoding, plan.last)]
            self.finishing += plan.last
        for row, end in chunks:
            self._plan_chunk(plan, row, int(self.num_computed[row]), end)
        return budget

    def _decodes(self, group: int, stalled: set[int]) -> IntArray:
        rows = self.decoding
        if self.num_groups > 1:
            rows = rows[rows % self.num_groups == group]
        return rows[~np.isin(rows, list(stalled))] if stalled else rows

    def _share_budget(
        self, plan: StepPlan, budget: int, reserved: tuple[Precedence, int] | None
    ) -> tuple[list[tuple[int, int]], int]:
        """Share the budget among running prompts.

        Returns (row, its computed tokens after the step) of each, and the budget that is left.
        """
        num_reserved = 0
        chunks: list[tuple[int, int]] = []
        requests = [self.request(row) for row in self.prefilling]
        if self._config.policy == "priority":
            requests.sort(key=self._precedence)
        for request in requests:
            row = request.row
            if reserved and not num_reserved and self._precedence(request) > reserved[0]:
                num_reserved = min(reserved[1], budget)
                budget -= num_reserved
            limit = chunk_limit(self._config, self.requests, request, chunks)
            count = min(self._next_chunk(row, plan.group), limit, budget)
            if count and row not in plan.stalled:
                chunks.append((row, count))
                budget -= count
        ends = [(row, int(self.num_computed[row]) + count) for row, count in chunks]
        return ends, budget + num_reserved  # the reserved tokens are for the waiting request

    def _next_chunk(self, row: int, group: int) -> int:
        """Return how many tokens of a prefilling row a step of the group may compute.

        A step of any group may compute a prompt's tokens except the last one. That one samples, and
        a row may sample only in steps of its own group: otherwise its token could still be unknown
        when the next step of its own group, which computes it, is planned.
        """
        num_left = int(self.num_tokens[row] - self.num_computed[row])
        return min(num_left - (row % self.num_groups != group), self._config.max_chunk)

    def provide(self, plan: StepPlan, row: int, num_computed: int, num_tokens: int) -> bool:
        """Let a row hold blocks for num_tokens, and no others; False if too few are free.

        num_computed: its computed tokens before the step.
        """
        request, held_tokens = self.request(row), int(self.held_tokens[row])
        num_settled = num_computed - int(self.lag[row])
        # Decodes register full blocks here and in `leave` only: once a block, not in every step.
        if num_tokens > held_tokens:
            self._register(request, num_settled)
        if self._kv_cache.has_windows:
            self._kv_cache.leave_window(request.handle, num_settled, self._last_step)
            self._hold(request, held_tokens)
        if num_tokens <= held_tokens:
            return True
        if (block_ids := self._kv_cache.allocate(request.handle, num_tokens)) is None:
            return False
        num_more = len(block_ids) * self._kv_cache.block_size // plan.num_cache_groups
        self._hold(request, held_tokens + num_more)
        # Once in a plan: in a later pass nobody gets more tokens but rows behind the failed one.
        assert row not in plan.blocks
        plan.blocks[row] = block_ids
        return True

    def _hold(self, request: Request, held_tokens: int) -> None:
        """Record how many tokens fit the request's blocks."""
        self.held_tokens[request.row] = held_tokens
        # Computing token number max_num_tokens - 2 (from 0) samples the last one.
        self.quiet_until[request.row] = min(held_tokens, request.max_num_tokens - 2)

    def _plan_chunk(self, plan: StepPlan, row: int, computed: int, end: int) -> None:
        """Plan tokens `computed` to `end` - 1 of a prefilling row."""
        plan.chunks.append(Chunk(row, end - computed, computed))
        self.num_computed[row] = end
        # Now, not when the result is in: a request admitted later in this very step can share the
        # blocks, because all KV writes of a layer precede its reads.
        request = self.request(row)
        plan.num_prompt_tokens += max(min(end, request.num_prompt_tokens) - computed, 0)
        self._register(request, end)
        if end < self.num_tokens[row]:
            return
        self.prefilling.remove(row)
        plan.completed.append(row)
        if end == request.num_submitted_tokens:
            plan.first.append(row)
        if end == request.max_num_tokens - 1:
            plan.last.append(row)
            self.finishing.append(row)
        else:
            plan.started.append(row)
            if self._kv_cache.has_windows:  # the next step lets go of what only prompts see
                self.quiet_until[row] = end

    def _register(self, request: Request, num_computed: int) -> None:
        """Make a running request's full blocks findable, as far as their tokens are known.

        With steps in flight more tokens may be computed than are known; a key needs known ones.
        """
        if not self._kv_cache.enable_prefix_caching:
            return
        block_size, keys = self._kv_cache.block_size, request.key_chain.keys
        num_full = num_computed // block_size
        if len(keys) < num_full:  # output tokens have filled a block: extend the chain of keys
            row = request.row
            end = min(num_computed, int(self.num_tokens[row]))
            request.key_chain.extend(self.token_ids[row, len(keys) * block_size : end].tobytes())
            num_full = min(num_full, len(keys))
        self._kv_cache.register(request.handle, keys, num_full)

    def admit(self, plan: StepPlan, request: Request, prefix: Prefix, count: int) -> None:
        """Give a request a row, its cached prefix, and `count` tokens after it, which fit."""
        block_size = self._kv_cache.block_size
        num_cached, num_prompt = len(prefix.blocks) * block_size, request.num_submitted_tokens
        end = num_cached + count
        block_ids = self._kv_cache.allocate(request.handle, end, prefix, num_prompt)
        assert block_ids is not None, "the whole prompt fits, so its first chunk does"
        if not (resumed := request.was_admitted):
            # What the step computes for others was not let go of.
            lost = (prefix.num_lost - prefix.num_soon) * block_size, prefix.lost_group
            self._kv_cache.stats.record(request.num_tokens, num_cached, *lost)
            if lost[0]:
                plan.lost[request.request_id] = lost
        token_ids = request.give_tokens()
        row = self._own_row(request, token_ids, plan.group)
        self.num_computed[row] = self.num_cached[row] = num_cached
        self.lag[row] = 0
        self._hold(request, len(block_ids) // plan.num_cache_groups * block_size)
        plan.added.append(new_row(request, token_ids, num_cached, block_ids))
        if resumed:
            plan.resumed.append(request)
        else:
            request.num_cached_tokens = min(num_cached, request.num_prompt_tokens)
            plan.new.append(request)
        if num_cached:
            plan.cached[request.request_id] = num_cached
        self._plan_chunk(plan, row, num_cached, end)

    def _own_row(self, request: Request, token_ids: NDArray[np.int32], group: int) -> int:
        """Give a request a free row of the group; returns the row. token_ids: its known tokens."""
        # The lowest row keeps the used part of the columns dense.
        row = heapq.heappop(self._free_rows[group])
        self._num_rows += 1
        self.requests[row] = request
        self.token_ids[row, : len(token_ids)] = token_ids
        self.num_tokens[row] = len(token_ids)
        # After the tokens: the live view reads `row` from another thread, then the row's tokens.
        request.row = row
        self.max_computed[row] = request.max_num_tokens - 1
        self.client[row] = request.client
        self.handle[row] = request.handle
        self.clients[request.client] = self.clients.get(request.client, 0) + 1
        self.times.set(row, request.last_token_s)
        self.stop_ids.add(request)
        if request.sampling.logprobs is not None:
            self.logprob_rows.add(row)
        if request.sampling.prompt_logprobs is not None:
            self.prompt_logprob_rows.add(row)
        if request.sampling.pooling is not None:
            self.pooled_rows.add(row)
        if request.matcher is not None:
            self.matchers[row] = request.matcher
        if (detection := request.sampling.repetition_detection) is not None:
            outputs = token_ids[request.num_prompt_tokens :]
            self.detectors[row] = RepetitionDetector(detection, outputs)
        if self.follower is not None:
            self.follower.begin(row, request.key_chain.extra)
        self.prefilling.append(row)
        return row

    def begin(self, plan: StepPlan) -> SchedulerOutput:
        """Put the complete plan in flight; returns the message to workers."""
        if plan.started:
            self.decoding = np.append(self.decoding, plan.started)
        if self.matchers:
            rows = plan.decoding[np.isin(plan.decoding, list(self.matchers))].tolist()
            rows += [row for row in plan.completed if row in self.matchers]
            plan.masked = [(row, self.request(row)) for row in rows]
        self.in_flight.append(StepOutcome(plan))
        message = plan.message(self._idle_rows(plan), self._removed_rows, self.sampled)
        self._removed_rows, self.sampled = [], []
        return message

    def _idle_rows(self, plan: StepPlan) -> list[int]:
        """Return the group's rows that compute nothing in this step, which workers must be told."""
        if len(plan.decoding) + len(plan.chunks) == self._num_rows:
            return []
        served = {chunk.row for chunk in plan.chunks}.union(plan.last)
        held = dict.fromkeys((*self.prefilling, *self.finishing, *plan.stalled))
        return [r for r in held if r not in served and r % self.num_groups == plan.group]

    def take_oldest(self) -> StepOutcome:
        """End the oldest step in flight: its result is in."""
        outcome = self.in_flight.popleft()
        self._kv_cache.complete(outcome.plan.number)  # what only this step could write is free now
        return outcome

    def append(self, sampled: TokenColumns, now_s: float) -> None:
        """Append sampled tokens to their rows, and let the matchers of these know them."""
        rows, counts = sampled.owners, sampled.counts
        self.times.stamp(rows, now_s)  # before the tokens: it compares with the last step's rows
        num_tokens = self.num_tokens[rows]
        if counts is None:
            self.token_ids[rows, num_tokens] = sampled.token_ids
            self.num_tokens[rows] = num_tokens + 1
        else:
            positions = np.repeat(num_tokens, counts) + places(counts)
            self.token_ids[np.repeat(rows, counts), positions] = sampled.token_ids
            self.num_tokens[rows] = num_tokens + counts
        if self.matchers:
            owners = sampled.owner_of_each()
            for i in np.isin(owners, list(self.matchers)).nonzero()[0].tolist():
                self.matchers[int(owners[i])].append((int(sampled.token_ids[i]),))

    def preempt(self, request: Request) -> None:
        """Take a request's row and blocks; its tokens go back to it, to be recomputed later.

        Tokens that steps in flight sample for it are lost. The same ones are sampled again, because
        noise depends on the request's seed and the position alone.
        """
        known = self.known_tokens(request.row).copy()
        self.leave(request, is_over=False)
        request.token_ids = known

    def leave(self, request: Request, keeps_blocks: bool = True, is_over: bool = True) -> None:
        """Take a request's row and blocks.

        Steps in flight may still write the blocks, so they are fenced until the last of these is
        over: nothing relies on workers running steps in order. Results of these steps for the row
        are void, whoever owns it by then.

        keeps_blocks: False if the blocks' content must not be found: it is damaged. is_over: False
            if the request comes back.
        """
        row, handle = request.row, request.handle
        if keeps_blocks:
            self._register(request, int(self.num_computed[row] - self.lag[row]))
        else:
            self._kv_cache.forget(handle)
        if self.follower is not None:
            num_prompt, num_tokens = request.num_prompt_tokens, int(self.num_tokens[row])
            self.follower.end(row, num_prompt, num_tokens, is_over and keeps_blocks)
        self._free_row(row)
        self._stalled.discard(row)
        self._removed_rows.append(row)
        for outcome in self.in_flight:
            outcome.dead_rows.add(row)
        self._kv_cache.free(handle, after_step=self._last_step)

    @property
    def _last_step(self) -> int:
        """Number of the last step in flight; 0: there is none."""
        return self.in_flight[-1].plan.number if self.in_flight else 0

    def _free_row(self, row: int) -> None:
        request = self.request(row)
        request.last_token_s = self.times.of(row)
        request.last_num_tokens = int(self.num_tokens[row])
        request.row = -1
        self.requests[row] = None
        if row in self.finishing:
            self.finishing.remove(row)
        elif row in self.prefilling:
            self.prefilling.remove(row)
        else:
            self.decoding = self.decoding[self.decoding != row]
        self.clients[request.client] -= 1
        if not self.clients[request.client]:
            del self.clients[request.client]
        self.stop_ids.remove(request)
        for rows in (self.logprob_rows, self.prompt_logprob_rows, self.pooled_rows):
            rows.discard(row)
        self.matchers.pop(row, None)
        self.detectors.pop(row, None)
        heapq.heappush(self._free_rows[row % self.num_groups], row)
        self._num_rows -= 1
