"""The running requests as numpy columns, one row each, so that a step costs vector operations.

A running request owns a fixed row, the same here and on every worker, until it finishes or is
preempted. Walking requests in Python would cost microseconds per request per step; here only rows
to which something happens are ever looked at one by one.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.request import TOKEN_DTYPE, Request

IntArray = NDArray[np.integer]
NO_TOKEN = -1


class RowTable:
    """Columns indexed by row.

    token_ids: int32 [max_num_seqs, max_model_len]; pages are touched only as rows fill.
    num_tokens, num_computed: known tokens, and those whose KV is computed or planned.
    max_num_tokens: the row finishes with reason "length" when num_tokens reaches it.
    held_tokens: tokens that fit the blocks the row holds.
    eos: the one EOS id, or -1. has_stop_ids: more ids to compare than that one.
    client, handle: where its output goes, and under which name.
    is_fresh: no token was delivered yet.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        def column(dtype: type) -> IntArray:
            return np.zeros(max_num_seqs, dtype)

        self.token_ids: NDArray[np.int32] = np.zeros((max_num_seqs, max_model_len), TOKEN_DTYPE)
        self.num_tokens = column(np.int64)
        self.num_computed = column(np.int64)
        self.max_num_tokens = column(np.int64)
        self.held_tokens = column(np.int64)
        self.eos = column(np.int32)
        self.client = column(np.int32)
        self.handle: NDArray[np.uint32] = np.zeros(max_num_seqs, np.uint32)
        self.has_stop_ids = np.zeros(max_num_seqs, bool)
        self.is_fresh = np.zeros(max_num_seqs, bool)
        self.is_active = np.zeros(max_num_seqs, bool)
        self.requests: list[Request | None] = [None] * max_num_seqs
        self.order: IntArray = np.zeros(0, np.int64)
        """The active rows in the order of their admission."""
        self._free_rows = list(range(max_num_seqs))

    def __len__(self) -> int:
        return len(self.order)

    @property
    def num_free(self) -> int:
        """Rows that no request owns."""
        return len(self._free_rows)

    def request(self, row: int) -> Request:
        """The request that owns this row."""
        request = self.requests[row]
        assert request is not None, f"row {row} is free"
        return request

    def add(self, request: Request, num_computed: int, held_tokens: int) -> int:
        """Give a request the lowest free row; it becomes the last in order."""
        row = heapq.heappop(self._free_rows)
        request.row = row
        stop_ids = {*request.eos_token_ids, *request.sampling.stop_token_ids}
        self.requests[row] = request
        self.token_ids[row, : request.num_tokens] = request.token_ids
        self.num_tokens[row] = request.num_tokens
        self.num_computed[row] = num_computed
        self.max_num_tokens[row] = request.max_num_tokens
        self.held_tokens[row] = held_tokens
        self.eos[row] = request.eos_token_ids[0] if request.eos_token_ids else NO_TOKEN
        self.has_stop_ids[row] = len(stop_ids) > len(request.eos_token_ids[:1])
        self.client[row] = request.client
        self.handle[row] = request.handle
        self.is_fresh[row] = request.num_tokens == request.num_prompt_tokens
        self.is_active[row] = True
        self.order = np.append(self.order, row)
        return row

    def remove(self, row: int) -> Request:
        """Take a row back from its request."""
        request = self.request(row)
        request.row = -1
        self.requests[row] = None
        self.is_active[row] = False
        self.order = self.order[self.order != row]
        heapq.heappush(self._free_rows, row)
        return request

    def known_tokens(self, row: int) -> NDArray[np.int32]:
        """A view of the row's prompt and output tokens so far."""
        return self.token_ids[row, : self.num_tokens[row]]

    def append(self, rows: IntArray, token_ids: NDArray[np.int32]) -> None:
        """Append one sampled token to each of these rows."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1
