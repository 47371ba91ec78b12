"""A worker's result: checked against the plan, and taken into the rows; and who ends with it.

Workers are our own code. Still, a result that does not fit its plan would put tokens into the wrong
rows, and only clients would notice; so it ends the engine instead.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np

from nanocore.engine_core.requests.ends import End, end_by_result
from nanocore.engine_core.requests.request import TOKEN_DTYPE
from nanocore.engine_core.scheduling.columns import IntArray, LogprobColumns, TokenColumns
from nanocore.engine_core.scheduling.running_set import RunningSet
from nanocore.engine_core.scheduling.step_plan import StepOutcome, StepPlan
from nanocore.protocol.codec import pack_int32
from nanocore.protocol.messages import Event
from nanocore.worker.plan import NO_TOKEN, ModelRunnerOutput, RowLogprobs

_NO_TOKEN_BYTES: Final = np.array(NO_TOKEN, "<i4").tobytes()


class StepResults:
    """Takes results into the running set."""

    def __init__(self, running: RunningSet) -> None:
        self._running = running
        self._decoding: IntArray = running.decoding
        self._ascending = b""
        self._rows_bytes = b""
        self._rows: IntArray = np.zeros(0, np.int64)

    def accept(self, result: ModelRunnerOutput, now_s: float) -> StepOutcome:
        """Take in the result of the oldest step in flight.

        A row may get no token, or several. Requests that end keep their rows until they leave.

        Raises:
            ValueError: the result does not fit the step.
        """
        running = self._running
        outcome = running.take_oldest()
        plan, dead_rows = outcome.plan, outcome.dead_rows
        sampled = self._read(outcome, result)  # without dead rows
        self._take_prompt_logprobs(outcome, result)
        pooled = self._read_pooled(outcome, result)
        if plan.decode_counts is not None:
            of_rows = np.zeros(len(running.requests), np.int64)
            of_rows[sampled.owners] = 1 if sampled.counts is None else sampled.counts
            outcome.num_sampled = of_rows[plan.decoding]
        sampled, ends = self._ends_by_token(sampled, pooled)
        running.append(sampled, now_s)
        self._rewind(plan)
        if running.num_groups > 1:
            running.sampled.append(sampled)
        clients = running.clients
        outcome.clients = (
            next(iter(clients)) if len(clients) == 1 else running.client[sampled.owners]
        )
        outcome.tokens = sampled.renamed(running.handle)
        for row in plan.first:
            if row not in dead_rows and not (row in ends and ends[row][1].message):
                outcome.started.append(running.request(row))
        for row in plan.last:
            if row not in dead_rows and row not in ends:
                request = running.request(row)
                if running.num_tokens[row] == request.max_num_tokens:
                    ends[row] = request, Event(handle=request.handle, finish_reason="length")
        outcome.ends = list(ends.values())
        return outcome

    def _ends_by_token(
        self, sampled: TokenColumns, pooled: dict[int, bytes]
    ) -> tuple[TokenColumns, dict[int, End]]:
        """Return the tokens that count, cut after a row's end, and the ends by row.

        With several tokens a row they are checked in order, so an end may come in their middle.

        Args:
            sampled: tokens that the rows do not have yet.
            pooled: embeddings by row; the tokens of these rows do not count.
        """
        running = self._running
        notable = running.stop_ids.find(sampled.token_ids)
        repeating = self._find_repeating(sampled) if running.detectors else ()
        if repeating:
            notable = sorted({*notable, *repeating})
        if pooled:
            places = np.isin(sampled.owner_of_each(), list(pooled)).nonzero()[0]
            notable = sorted({*notable, *places.tolist()})
        # A search of bytes is the cheapest test. It may match across two ids, hence the second
        # look.
        if _NO_TOKEN_BYTES in sampled.token_ids.tobytes():
            notable = sorted({*notable, *(sampled.token_ids == NO_TOKEN).nonzero()[0].tolist()})
        if not notable:
            return sampled, {}
        ends: dict[int, End] = {}
        num_kept: dict[int, int] = {}
        for i, (index, place) in zip(notable, sampled.locate(notable), strict=True):
            row, token_id = int(sampled.owners[index]), int(sampled.token_ids[i])
            if row in ends:  # an earlier token of this step has ended it
                continue
            request = running.request(row)
            number = int(running.num_tokens[row]) + place - request.num_prompt_tokens + 1
            event = end_by_result(request, number, token_id, pooled.get(row), i in repeating)
            if event is None:
                continue
            ends[row] = request, event
            # A stop token is delivered; NO_TOKEN and what was sampled beside an embedding are not.
            has_token = token_id != NO_TOKEN and row not in pooled
            if sampled.counts is not None or not has_token:
                num_kept[index] = place + has_token
        return sampled.shortened(num_kept) if num_kept else sampled, ends

    def _find_repeating(self, sampled: TokenColumns) -> set[int]:
        """Return indices of tokens with which the output of their row repeats itself."""
        detectors, owners = self._running.detectors, sampled.owner_of_each()
        return {
            i
            for i in np.isin(owners, list(detectors)).nonzero()[0].tolist()
            if detectors[int(owners[i])].append(int(sampled.token_ids[i]))
        }

    def _rewind(self, plan: StepPlan) -> None:
        """Take back a step's wrong drafts: the last known token of each row is computed next.

        Blocks stay held. What they got is overwritten, and only known tokens can be found.
        """
        running, rows = self._running, plan.decoding
        lag: IntArray | int = 0
        if plan.decode_counts is not None:
            # Dead rows, too: with drafts a group has one step in flight, so no other request can
            # have got them before this result.
            running.num_computed[rows] = running.num_tokens[rows] - 1
            certain = plan.decode_ends - plan.decode_counts + 1
            lag = (running.num_computed[rows] - certain).clip(min=0)
        if running.may_lag:
            running.lag[rows] = lag

    def _read(self, outcome: StepOutcome, result: ModelRunnerOutput) -> TokenColumns:
        """Return the sampled tokens by row, without dead rows and rows that got none.

        Raises:
            ValueError: the result's columns do not fit together, or not to what the step computed.
        """
        plan, sampled = outcome.plan, self._columns(result)
        counts = sampled.counts
        # The common case costs one comparison of bytes.
        if result.rows != self._usual_rows(plan):
            _check_rows(plan, sampled.owners)
        if counts is not None and not counts.all():  # with drafts a row may get no token
            _check_rows(plan, sampled.owners[counts > 0])
            sampled = sampled.take(counts > 0)
        # After the checks: a dead row must have sampled like any other.
        if outcome.dead_rows:
            sampled = sampled.take(~np.isin(sampled.owners, list(outcome.dead_rows)))
        if counts is not None or plan.decode_counts is not None:
            _check_counts(self._running, plan, sampled)
        if result.logprobs is not None or self._running.logprob_rows:
            sampled.logprobs = self._logprobs(outcome, sampled, result)
        return sampled

    def _take_prompt_logprobs(self, outcome: StepOutcome, result: ModelRunnerOutput) -> None:
        """Move the step's prompt logprobs, without those of dead rows, to the outcome.

        Raises:
            ValueError: they are not those of the tokens that the step computed first.
        """
        asking = self._running.prompt_logprob_rows
        if result.prompt_logprobs is None and not asking:
            return
        expected: Counter[int] = Counter()
        for row, num_tokens, start in outcome.plan.chunks:
            if row in asking and row not in outcome.dead_rows:
                # Logits of a token give the logprob of the next one: entry 0 is of token 1.
                request = self._running.request(row)
                end = min(start + num_tokens, request.num_requested_prompt_logprobs)
                expected[row] = max(end - max(start, request.num_prompt_logprobs), 0)
        logprobs = _living(result.prompt_logprobs, outcome)
        counts = Counter([] if logprobs is None else logprobs.owners.tolist())
        if counts != +expected:
            raise ValueError(
                f"step {outcome.plan.number} has log probabilities of prompt tokens, by row, "
                f"{dict(counts)}: it must have {dict(+expected)}"
            )
        for row, count in counts.items():
            assert logprobs is not None
            request, own = self._running.request(row), logprobs.take(logprobs.owners == row)
            # Counted as delivered from here on: a preempted request does not report them again.
            request.num_prompt_logprobs += count
            outcome.prompt_logprobs.append((request.client, own.renamed(self._running.handle)))

    def _read_pooled(self, outcome: StepOutcome, result: ModelRunnerOutput) -> dict[int, bytes]:
        """Return the embeddings, float32 bytes, by row; without dead rows.

        Raises:
            ValueError: they are not those of the prompts that the step has completed.
        """
        pooled_rows = self._running.pooled_rows
        if not (pooled_rows or result.pooled_rows):
            return {}
        rows = np.frombuffer(result.pooled_rows, TOKEN_DTYPE).tolist()
        num_bytes = len(result.pooled) // max(len(rows), 1)
        pooled = {
            row: result.pooled[i * num_bytes : (i + 1) * num_bytes]
            for i, row in enumerate(rows)
            if row not in outcome.dead_rows
        }
        expected = pooled_rows.intersection(outcome.plan.completed) - outcome.dead_rows
        is_whole = len(set(rows)) == len(rows) and len(result.pooled) == num_bytes * len(rows)
        if pooled.keys() != expected or not is_whole or num_bytes % 4 or not all(pooled.values()):
            raise ValueError(
                f"step {outcome.plan.number} has embeddings, {len(result.pooled)} bytes, of rows "
                f"{rows}: they must be of {sorted(expected)}, all equally long"
            )
        return pooled

    def _logprobs(
        self, outcome: StepOutcome, sampled: TokenColumns, result: ModelRunnerOutput
    ) -> LogprobColumns | None:
        """Return logprobs for the tokens whose row requested them; NO_TOKEN gets none."""
        logprobs = _living(result.logprobs, outcome)
        rows = sampled.owner_of_each()
        asked = np.isin(rows, list(self._running.logprob_rows)) & (sampled.token_ids != NO_TOKEN)
        expected = np.sort(rows[asked])
        owners = np.zeros(0, np.int64) if logprobs is None else np.sort(logprobs.owners)
        if not np.array_equal(owners, expected):
            raise ValueError(
                f"step {outcome.plan.number} has log probabilities of tokens of rows "
                f"{owners.tolist()}: they must be of {expected.tolist()}"
            )
        return logprobs

    def _columns(self, result: ModelRunnerOutput) -> TokenColumns:
        """Read the columns. Equal rows give the same array object, which later steps compare by."""
        if result.rows != self._rows_bytes:
            self._rows_bytes = result.rows
            # int64, because they are used as an index several times.
            self._rows = np.frombuffer(result.rows, TOKEN_DTYPE).astype(np.int64)
        rows, token_ids = self._rows, np.frombuffer(result.token_ids, TOKEN_DTYPE)
        if not result.counts and len(rows) == len(token_ids):
            return TokenColumns(rows, token_ids)
        counts = np.frombuffer(result.counts, TOKEN_DTYPE) if result.counts else None
        num_tokens = len(rows) if counts is None else int(counts.sum())
        fits = counts is None or (len(counts) == len(rows) and not (counts < 0).any())
        if not fits or len(token_ids) != num_tokens:
            raise ValueError(
                f"a step's result does not fit together: {len(rows)} rows of {num_tokens} tokens, "
                f"{None if counts is None else len(counts)} counts, and {len(token_ids)} token ids"
            )
        return TokenColumns(rows, token_ids, counts)

    def _usual_rows(self, plan: StepPlan) -> bytes:
        """Return the expected column of rows: decodes ascending, then completed prompts.

        A result with exactly this column needs no further check of its rows.
        """
        # `RunningSet.decoding` is replaced when it changes, so identity tells that it is the same.
        if plan.decoding is not self._decoding:
            self._decoding = plan.decoding
            self._ascending = np.sort(plan.decoding).astype(TOKEN_DTYPE).tobytes()
        if not plan.completed:
            return self._ascending
        return self._ascending + pack_int32(sorted(plan.completed))


def _living(logprobs: RowLogprobs | None, outcome: StepOutcome) -> LogprobColumns | None:
    """Read logprobs without those of dead rows; None if none are left."""
    if logprobs is None:
        return None
    columns = LogprobColumns.of_rows(logprobs)
    alive = ~np.isin(columns.owners, list(outcome.dead_rows))
    if alive.all():
        return columns if len(columns) else None
    return columns.take(alive) if alive.any() else None


def _check_rows(plan: StepPlan, rows: IntArray) -> None:
    """Check that each row that samples is there once, and no other.

    A row that computed drafts may be missing.
    """
    present, completed = rows.tolist(), set(plan.completed)
    expected = completed.union(plan.decoding.tolist())
    drafted = [] if plan.decode_counts is None else plan.decoding[plan.decode_counts > 1].tolist()
    missing = expected.difference(present, drafted)
    for words, wrong in (
        ("has rows that do not sample", set(present) - expected),
        ("has no token for rows that sample", missing),
        ("has rows twice", {row for row, count in Counter(present).items() if count > 1}),
    ):
        if wrong:
            raise ValueError(f"step {plan.number} {words}: {sorted(wrong)}")


def _check_counts(running: RunningSet, plan: StepPlan, sampled: TokenColumns) -> None:
    """Check that no row has more tokens than it computed from its last known one on."""
    rows = sampled.owners
    counts = np.ones_like(rows) if sampled.counts is None else sampled.counts
    most = np.ones_like(rows)
    if plan.decode_counts is not None:  # with drafts no other step of the row is in flight
        most = running.num_computed[rows] + 1 - running.num_tokens[rows]
    for i in (counts > most).nonzero()[0].tolist():
        raise ValueError(
            f"step {plan.number} has {counts[i]} tokens for row {rows[i]}: at most {most[i]}"
        )
