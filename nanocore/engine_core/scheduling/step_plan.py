"""A step inside the scheduler: its plan (`StepPlan`), and what came of it (`StepOutcome`).

Several steps may be in flight: a step is planned from counts alone, before the tokens of the
previous one are known. The running set fills a plan (`RunningSet.compute`, `admit`), which is fixed
when the step begins (`begin`); what happens from then on is recorded in the outcome.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.config import SchedulerConfig
from nanocore.engine_core.requests.ends import End
from nanocore.engine_core.requests.request import TOKEN_DTYPE, Request
from nanocore.engine_core.scheduling.columns import (
    IntArray,
    LogprobColumns,
    TokenColumns,
    attended_tokens,
)
from nanocore.protocol.codec import pack_int32
from nanocore.worker.plan import NewRow, SchedulerOutput

_NO_ROWS: IntArray = np.zeros(0, np.int64)
_NO_EVIDENCE: NDArray[np.uint8] = np.zeros((0, 0), np.uint8)


class Chunk(NamedTuple):
    """Tokens that a step computes of one row. num_computed: its computed tokens before them."""

    row: int
    num_tokens: int
    num_computed: int


class StepPlan(msgspec.Struct, eq=False):
    """What one step computes.

    Args:
        group: the group of rows it serves, see `RunningSet`: only these decode or finish a prompt.

    decoding: rows that compute from their last token on. decode_ends: their computed tokens after
        the step. decode_counts: how many each computes; None if one each. Beyond the first, these
        are draft tokens. draft_token_ids: their ids, row after row; empty if workers propose them.
        draft_evidence: of all that were proposed, by decode; see `Proposals`.
    chunks: the other rows that take part. num_prompt_tokens: their tokens without recomputed
        outputs.
    completed: rows whose known tokens the step completes, so that they sample. started: those of
        them that decode from the next step on. first: rows that sample their first token.
    last: rows that may reach their length with it; without drafts they will, unless EOS or a stop
        id comes first.
    stalled: running rows that get nothing until an earlier step releases blocks.
    blocks: ids of the blocks given to running rows, by row; group after group.
    added: rows given to requests. new, resumed, preempted: requests.
    cached: tokens found in the prefix cache, by request id. lost: tokens that a group of layers had
        let go of, and its name, by request id.
    preempters: for each preempted request's id, the id of the request it was preempted for.
    masked: (row, request) of rows with structured output that sample: the step needs their masks.
        masked_drafts: drafts of some of them, by row.
    """

    number: int
    token_budget: int
    group: int = 0
    num_groups: int = 1
    num_cache_groups: int = 1
    decoding: IntArray = _NO_ROWS
    decode_ends: IntArray = _NO_ROWS
    decode_counts: IntArray | None = None
    draft_token_ids: IntArray = _NO_ROWS
    draft_evidence: NDArray[np.uint8] = _NO_EVIDENCE
    chunks: list[Chunk] = []
    num_prompt_tokens: int = 0
    completed: list[int] = []
    first: list[int] = []
    last: list[int] = []
    started: list[int] = []
    stalled: set[int] = set()
    blocks: dict[int, list[int]] = {}
    added: list[NewRow] = []
    new: list[Request] = []
    resumed: list[Request] = []
    preempted: list[Request] = []
    cached: dict[str, int] = {}
    lost: dict[str, tuple[int, str]] = {}
    preempters: dict[str, str] = {}
    masked: list[tuple[int, Request]] = []
    masked_drafts: dict[int, list[int]] = {}

    @property
    def num_decode_tokens(self) -> int:
        counts = self.decode_counts
        return len(self.decoding) if counts is None else int(counts.sum())

    @property
    def num_prefill_tokens(self) -> int:
        return sum([chunk.num_tokens for chunk in self.chunks]) if self.chunks else 0

    @property
    def num_tokens(self) -> int:
        return self.num_decode_tokens + self.num_prefill_tokens

    @property
    def context(self) -> int:
        """Tokens attended to, summed over all tokens of the step."""
        counts = 1 if self.decode_counts is None else self.decode_counts
        decoded = int(attended_tokens(counts, self.decode_ends).sum())
        return decoded + sum([int(attended_tokens(n, n + start)) for _, n, start in self.chunks])

    def preempt(self, request: Request, preempter: Request) -> None:
        self.preempted.append(request)
        self.preempters[request.request_id] = preempter.request_id

    def _block_ids(self) -> list[int]:
        """Return the blocks of all rows, group after group."""
        num_groups, of_rows = self.num_cache_groups, self.blocks.values()
        if num_groups == 1:
            return [one for ids in of_rows for one in ids]
        counts = [len(ids) // num_groups for ids in of_rows]
        return [
            one
            for group in range(num_groups)
            for ids, n in zip(of_rows, counts, strict=True)
            for one in ids[group * n : (group + 1) * n]
        ]

    def scheduled(self) -> Iterator[Chunk]:
        """Iterate over all rows that take part, decoding ones first."""
        counts = np.ones_like(self.decoding) if self.decode_counts is None else self.decode_counts
        # tolist(): Python ints are several times faster to read than numpy scalars.
        starts = self.decode_ends - counts
        yield from map(Chunk, self.decoding.tolist(), counts.tolist(), starts.tolist())
        yield from self.chunks

    def message(
        self, idle_rows: list[int], removed_rows: list[int], sampled: list[TokenColumns]
    ) -> SchedulerOutput:
        """Make the message to workers: the differences from "every row takes one token".

        Args:
            idle_rows: the group's rows that compute nothing in this step.
            removed_rows: rows freed since the last plan.
            sampled: tokens that became known since the last plan.
        """
        rows: list[int] = []
        counts: list[int] = []
        # Only differences are sent: a decode, or the last token of a prompt, of the own group
        # counts one token, which is what workers assume.
        draft_token_ids = b""
        if self.decode_counts is not None:
            several = self.decode_counts != 1
            rows += self.decoding[several].tolist()
            counts += self.decode_counts[several].tolist()
            if len(self.draft_token_ids):  # workers have rows in ascending order
                of_rows = np.repeat(self.decoding, self.decode_counts - 1)
                ordered = self.draft_token_ids[of_rows.argsort(kind="stable")]
                draft_token_ids = ordered.astype(TOKEN_DTYPE).tobytes()
        for row, num_tokens, _ in self.chunks:
            if num_tokens != 1 or row % self.num_groups != self.group:
                rows.append(row)
                counts.append(num_tokens)
        return SchedulerOutput(
            step=self.number,
            group=self.group,
            sampled_rows=b"".join(
                [one.owner_of_each().astype(TOKEN_DTYPE).tobytes() for one in sampled]
            ),
            sampled_token_ids=b"".join([one.token_ids.tobytes() for one in sampled]),
            removed_rows=pack_int32(removed_rows),
            added=self.added,
            block_rows=pack_int32(
                [row for row, ids in self.blocks.items() for _ in ids[:: self.num_cache_groups]]
            ),
            block_ids=pack_int32(self._block_ids()),
            chunk_rows=pack_int32(rows + idle_rows),
            chunk_counts=pack_int32(counts + [0] * len(idle_rows)),
            draft_token_ids=draft_token_ids,
            num_tokens=self.num_tokens,
            awaits_masks=bool(self.masked),
        )


class StepOutcome:
    """What becomes of a step from its begin until its result is in.

    dead_rows: rows whose request ended or was preempted while the step was in flight; its result
        for them is void, and the row may belong to another request by then.
    tokens: the tokens that count, by handle. clients: the client of each owner of tokens, or the
        one client of all.
    prompt_logprobs: by client and handle.
    num_sampled: tokens that each of the plan's decodes sampled, if the step has drafts; 0: it is
        dead, or cannot go on.
    started: requests that got their first token. ends: requests that end with this step's tokens.
    finished: all requests that ended since the previous step's result.
    """

    __slots__ = (
        "clients", "dead_rows", "ends", "finished", "num_sampled", "plan", "prompt_logprobs",
        "started", "tokens",
    )  # fmt: skip

    clients: IntArray | int
    tokens: TokenColumns
    ends: list[End]

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.dead_rows: set[int] = set()
        self.num_sampled: IntArray | None = None
        self.started: list[Request] = []
        self.finished: list[Request] = []
        self.prompt_logprobs: list[tuple[int, LogprobColumns]] = []


def chunk_limit(
    config: SchedulerConfig,
    requests: Sequence[Request | None],
    request: Request,
    chunks: Sequence[tuple[int, ...]],
) -> int:
    """Tokens of a prompt that a step may compute, beside these chunks of (row, tokens, ...).

    A step reports so many log probabilities of prompt tokens, or one token's. Each may have as many
    as the vocabulary has tokens, and they take memory here and on their way to the client.

    requests: by row.
    """
    if not (of_token := request.num_logprobs_per_prompt_token):
        return config.max_chunk
    told = 0
    for row, num_tokens, *_ in chunks:
        other = requests[row]
        told += num_tokens * (other.num_logprobs_per_prompt_token if other else 0)
    most = (config.max_prompt_logprobs - told) // of_token
    return min(config.max_chunk, max(most, int(not told)))


def new_row(
    request: Request, token_ids: NDArray[np.int32], num_computed: int, block_ids: list[int]
) -> NewRow:
    sampling = request.sampling
    if sampling.structured_outputs is not None:  # workers get masks, never the grammar
        sampling = msgspec.structs.replace(sampling, structured_outputs=None)
    return NewRow(
        row=request.row,
        token_ids=token_ids.tobytes(),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=num_computed,
        block_ids=pack_int32(block_ids),
        sampling=sampling,
        seed=request.seed,
        stop_token_ids=request.stop_token_ids if sampling.min_tokens else [],
        num_prompt_logprobs=request.num_prompt_logprobs,
    )
