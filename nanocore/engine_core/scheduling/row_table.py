"""The running requests as numpy columns, one row each, so that a step costs vector operations.

A running request owns a fixed row, the same here and on every worker, until it ends or is
preempted. A Python loop over requests would cost microseconds per request and step (8 µs in vLLM);
here only rows to which something happens are looked at one by one. Only the running set writes it.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.grammars.matcher import Matcher
from nanocore.engine_core.requests.request import TOKEN_DTYPE, Request
from nanocore.engine_core.requests.step_log import StepLog, TokenTimes
from nanocore.engine_core.scheduling.columns import IntArray, TokenColumns, places


class RowTable:
    """Columns indexed by row, and which state each row is in.

    Rows belong to num_groups groups (row modulo num_groups), of which a step serves one.

    token_ids: int32 [max_num_seqs, max_model_len + 1]; memory pages are touched only as rows fill.
        The last column is for a token sampled after a prompt of max_model_len, never computed.
    num_tokens: known tokens.
    num_computed: tokens whose KV is computed or planned; with steps in flight it may exceed
        num_tokens. max_computed: its limit, all tokens but the last.
    num_cached: tokens found in the prefix cache.
    held_tokens: tokens that fit the row's blocks.
    quiet_until: while num_computed is at most this, a decode needs no block and does not reach its
        length, so no Python runs for the row.
    num_drafts: draft tokens that a row may compute beyond its known ones; 0 for structured output,
        because a mask is for one token.
    client, handle: of the row's request.

    decoding: rows that compute their newest token in every step, in the order in which they began
        to. The array is replaced, never changed: steps in flight refer to it.
    prefilling: rows with more than that to compute, in admission order.
    finishing: rows that only wait for the result with their last token.
    clients: number of rows per client.
    stop_counts: number of rows that stop at a token id, by id; the last element stands for all
        larger ids.
    pooled_rows: rows that end with an embedding. matchers: by row with structured output.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        num_groups: int = 1,
        num_drafts: int = 0,
        step_log: StepLog | None = None,
    ) -> None:
        def column(dtype: type) -> IntArray:
            return np.zeros(max_num_seqs, dtype)

        self.token_ids: NDArray[np.int32] = np.zeros((max_num_seqs, max_model_len + 1), TOKEN_DTYPE)
        self.num_tokens = column(np.int64)
        self.num_computed = column(np.int64)
        self.max_computed = column(np.int64)
        self.num_cached = column(np.int64)
        self.held_tokens = column(np.int64)
        self.quiet_until = column(np.int64)
        self.num_drafts = column(np.int64)
        self.client = column(np.int32)
        self.handle: NDArray[np.uint32] = np.zeros(max_num_seqs, np.uint32)
        self.asks_logprobs = np.zeros(max_num_seqs, np.bool_)
        self.num_asking = 0
        self.prompt_logprob_rows: set[int] = set()
        self.pooled_rows: set[int] = set()
        self.matchers: dict[int, Matcher] = {}
        self.requests: list[Request | None] = [None] * max_num_seqs
        self.decoding: IntArray = np.zeros(0, np.int64)
        self.prefilling: list[int] = []
        self.finishing: list[int] = []
        self.clients: dict[int, int] = {}
        self.num_groups = num_groups
        self._max_num_drafts = num_drafts
        self._free_rows = [list(range(i, max_num_seqs, num_groups)) for i in range(num_groups)]
        self._group_sizes = [len(rows) for rows in self._free_rows]
        self._num_rows = 0
        self.stop_counts = np.zeros(1, np.int32)
        self.times = TokenTimes(max_num_seqs, step_log or StepLog())

    def __len__(self) -> int:
        return self._num_rows

    def row_counts(self, group: int) -> tuple[int, int]:
        """Return (owned rows, free rows) of the group."""
        num_free = len(self._free_rows[group])
        return self._group_sizes[group] - num_free, num_free

    def running(self) -> list[Request]:
        """Return the requests that own rows, by row."""
        return [request for request in self.requests if request is not None]

    def structured(self, decoding: IntArray, completed: list[int]) -> list[tuple[int, Request]]:
        """Return (row, request) of those of these rows that have structured output."""
        if not self.matchers:
            return []
        rows = decoding[np.isin(decoding, list(self.matchers))].tolist()
        rows += [row for row in completed if row in self.matchers]
        return [(row, self.request(row)) for row in rows]

    def advance_matchers(self, sampled: TokenColumns) -> None:
        """Tell the matchers of structured rows which tokens are delivered."""
        if not self.matchers:
            return
        rows = sampled.owner_of_each()
        for i in np.isin(rows, list(self.matchers)).nonzero()[0].tolist():
            self.matchers[int(rows[i])].append((int(sampled.token_ids[i]),))

    def request(self, row: int) -> Request:
        request = self.requests[row]
        assert request is not None, f"row {row} is free"
        return request

    def add(
        self,
        request: Request,
        token_ids: NDArray[np.int32],
        num_computed: int,
        held_tokens: int,
        group: int = 0,
    ) -> int:
        """Give a request the lowest free row of the group; returns the row.

        token_ids: its known tokens. held_tokens: tokens that fit its blocks.
        """
        # The lowest row keeps the used part of the columns dense.
        row = heapq.heappop(self._free_rows[group])
        self._num_rows += 1
        self.requests[row] = request
        self.token_ids[row, : len(token_ids)] = token_ids
        self.num_tokens[row] = len(token_ids)
        # After the tokens: the live view reads `row` from another thread, then the row's tokens.
        request.row = row
        self.num_computed[row] = self.num_cached[row] = num_computed
        self.max_computed[row] = request.max_num_tokens - 1
        self.hold(request, held_tokens)
        self.client[row] = request.client
        self.handle[row] = request.handle
        self.clients[request.client] = self.clients.get(request.client, 0) + 1
        self.times.set(row, request.times.last_token_s)
        self._count_stop_ids(request, 1)
        if request.sampling.logprobs is not None:
            self.asks_logprobs[row] = True
            self.num_asking += 1
        if request.sampling.prompt_logprobs is not None:
            self.prompt_logprob_rows.add(row)
        if request.sampling.pooling is not None:
            self.pooled_rows.add(row)
        self.num_drafts[row] = self._max_num_drafts if request.matcher is None else 0
        if request.matcher is not None:
            self.matchers[row] = request.matcher
        self.prefilling.append(row)
        return row

    def remove(self, row: int) -> Request:
        """Free a row; returns its request."""
        request = self.request(row)
        request.times.last_token_s = self.times.of(row)
        request.times.num_tokens = int(self.num_tokens[row])
        request.row = -1
        self.requests[row] = None
        # A row is in exactly one of the three lists.
        if row in self.finishing:
            self.finishing.remove(row)
        elif row in self.prefilling:
            self.prefilling.remove(row)
        else:
            self.decoding = self.decoding[self.decoding != row]
        self.clients[request.client] -= 1
        if not self.clients[request.client]:
            del self.clients[request.client]
        self._count_stop_ids(request, -1)
        if request.sampling.logprobs is not None:
            self.asks_logprobs[row] = False
            self.num_asking -= 1
        self.prompt_logprob_rows.discard(row)
        self.pooled_rows.discard(row)
        self.matchers.pop(row, None)
        heapq.heappush(self._free_rows[row % self.num_groups], row)
        self._num_rows -= 1
        return request

    def hold(self, request: Request, held_tokens: int) -> None:
        """Record how many tokens fit the request's blocks."""
        row = request.row
        self.held_tokens[row] = held_tokens
        # Computing token number max_num_tokens - 2 (from 0) samples the last one.
        self.quiet_until[row] = min(held_tokens, request.max_num_tokens - 2)

    def start_decoding(self, rows: list[int]) -> None:
        started = np.array(rows, np.int64)
        decoding = self.decoding  # a new array each time: steps in flight keep the old one
        self.decoding = np.concatenate((decoding, started)) if len(decoding) else started

    def finish_decoding(self, rows: list[int]) -> None:
        """Move decoding rows to those that only wait for their last token."""
        self.decoding = self.decoding[~np.isin(self.decoding, rows)]
        self.finishing += rows

    def known_tokens(self, row: int) -> NDArray[np.int32]:
        """Return a view of the row's prompt and output tokens."""
        return self.token_ids[row, : self.num_tokens[row]]

    def append(self, sampled: TokenColumns, now_s: float) -> None:
        """Append sampled tokens to their rows."""
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

    def rewind(self, rows: IntArray) -> None:
        """Take back draft tokens: the last known token of each row is computed next.

        Blocks stay held. What was computed into them is overwritten, and no prefix hit finds it,
        because only blocks of known tokens are registered.
        """
        self.num_computed[rows] = self.num_tokens[rows] - 1

    def may_stop(self, token_ids: NDArray[np.int32]) -> list[int]:
        """Return indices of tokens that are EOS or a stop id of some row, not always their own."""
        counts = self.stop_counts
        if len(counts) == 1:
            return []
        # Ids beyond the table are clipped to its last element, which is 0 or counts larger ids.
        hits: list[int] = counts.take(token_ids, mode="clip").nonzero()[0].tolist()
        return hits

    def _count_stop_ids(self, request: Request, change: int) -> None:
        for token_id in request.stop_token_ids:
            if token_id + 2 > len(self.stop_counts):
                self.stop_counts = np.append(
                    self.stop_counts[:-1], np.zeros(token_id + 3 - len(self.stop_counts), np.int32)
                )
            self.stop_counts[token_id] += change
