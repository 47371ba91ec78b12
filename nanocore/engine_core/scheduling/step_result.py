"""A step's result as it comes from a worker, checked and brought into columns.

Workers are ours, but a result that does not fit its plan would put tokens into the wrong places
and be seen only in what clients read: so it ends the engine instead.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from nanocore.engine_core.scheduling.logprob_columns import LogprobColumns
from nanocore.engine_core.scheduling.request import TOKEN_DTYPE
from nanocore.engine_core.scheduling.row_table import RowTable
from nanocore.engine_core.scheduling.spans import IntArray
from nanocore.engine_core.scheduling.step import StepOutcome, StepPlan
from nanocore.engine_core.scheduling.token_columns import TokenColumns
from nanocore.protocol.codec import pack_int32
from nanocore.worker.plan import NO_TOKEN, ModelRunnerOutput, RowLogprobs


class ResultReader:
    """Reads results for the running set, whose table this is."""

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self._decoding: IntArray = table.decoding
        self._ascending = b""
        self._rows_bytes = b""
        self._rows: IntArray = np.zeros(0, np.int64)

    def read(self, outcome: StepOutcome, result: ModelRunnerOutput) -> TokenColumns:
        """What the step sampled, by row: of rows that are alive and have any token.

        Raises:
            ValueError: the result's columns do not fit together, or not to what the step computed.
        """
        plan, sampled = outcome.plan, self._columns(result)
        counts = sampled.counts
        if result.rows != self._usual_rows(plan):
            _check_rows(plan, sampled.owners)
        if counts is not None and not counts.all():
            _check_rows(plan, sampled.owners[counts > 0])
            sampled = sampled.take(counts > 0)
        if outcome.dead_rows:
            sampled = sampled.take(~np.isin(sampled.owners, list(outcome.dead_rows)))
        if counts is not None or plan.decode_counts is not None:
            _check_counts(self._table, plan, sampled)
        if result.logprobs is not None or self._table.num_asking:
            sampled.logprobs = self._logprobs(outcome, sampled, result)
        return sampled

    def take_prompt_logprobs(self, outcome: StepOutcome, result: ModelRunnerOutput) -> None:
        """Note what the step says of prompts of rows that are alive: it is delivered from here on.

        Raises:
            ValueError: it is not what the step computed and nobody knew.
        """
        asking = self._table.prompt_logprob_rows
        if result.prompt_logprobs is None and not asking:
            return
        expected: Counter[int] = Counter()
        for row, num_tokens, start in outcome.plan.chunks:
            if row in asking and row not in outcome.dead_rows:
                # The logits of a token tell of the next one, and the first entry is the second's.
                request = self._table.request(row)
                end = min(start + num_tokens, request.num_asked_prompt_logprobs)
                expected[row] = max(end - max(start, request.num_prompt_logprobs), 0)
        said = _of_the_living(result.prompt_logprobs, outcome)
        counts = Counter([] if said is None else said.owners.tolist())
        if counts != +expected:
            raise ValueError(
                f"step {outcome.plan.number} has log probabilities of prompt tokens, by row, "
                f"{dict(counts)}: it must have {dict(+expected)}"
            )
        for row, count in counts.items():
            assert said is not None
            request, own = self._table.request(row), said.take(said.owners == row)
            request.num_prompt_logprobs += count
            outcome.prompt_logprobs.append((request.client, own.renamed(self._table.handle)))

    def read_pooled(self, outcome: StepOutcome, result: ModelRunnerOutput) -> dict[int, bytes]:
        """The embeddings of rows that are alive, each a float32 column.

        Raises:
            ValueError: they are not those of the prompts that the step has completed.
        """
        pooled_rows = self._table.pooled_rows
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
        """Of each of these tokens whose row asks for them; NO_TOKEN has none."""
        said = _of_the_living(result.logprobs, outcome)
        rows = sampled.owner_of_each()
        asked = self._table.asks_logprobs[rows] & (sampled.token_ids != NO_TOKEN)
        expected = np.sort(rows[asked])
        owners = np.zeros(0, np.int64) if said is None else np.sort(said.owners)
        if not np.array_equal(owners, expected):
            raise ValueError(
                f"step {outcome.plan.number} has log probabilities of tokens of rows "
                f"{owners.tolist()}: they must be of {expected.tolist()}"
            )
        return said

    def _columns(self, result: ModelRunnerOutput) -> TokenColumns:
        """The rows are the same array as before, if they are the same rows."""
        if result.rows != self._rows_bytes:
            self._rows_bytes = result.rows
            # As wide as an index, because they will be one several times.
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
        """The rows that sample, as workers tell them: decodes ascending, then prompts' ends.

        A result that has them so is as it should be without another look.
        """
        if plan.decoding is not self._decoding:
            self._decoding = plan.decoding
            self._ascending = np.sort(plan.decoding).astype(TOKEN_DTYPE).tobytes()
        if not plan.completed:
            return self._ascending
        return self._ascending + pack_int32(sorted(plan.completed))


def _of_the_living(said: RowLogprobs | None, outcome: StepOutcome) -> LogprobColumns | None:
    """What a worker says, without that of rows whose request has ended or was preempted."""
    if said is None:
        return None
    columns = LogprobColumns.of_rows(said)
    alive = ~np.isin(columns.owners, list(outcome.dead_rows))
    if alive.all():
        return columns if len(columns) else None
    return columns.take(alive) if alive.any() else None


def _check_rows(plan: StepPlan, rows: IntArray) -> None:
    """Each row that samples is there once, and no other; one that computed drafts may be missing.

    A step that completes a prompt has a token for it: nothing was guessed then.
    """
    said, completed = rows.tolist(), set(plan.completed)
    expected = completed.union(plan.decoding.tolist())
    missing = (expected if plan.decode_counts is None else completed).difference(said)
    for words, wrong in (
        ("has rows that do not sample", set(said) - expected),
        ("has no token for rows that sample", missing),
        ("has rows twice", {row for row, count in Counter(said).items() if count > 1}),
    ):
        if wrong:
            raise ValueError(f"step {plan.number} {words}: {sorted(wrong)}")


def _check_counts(table: RowTable, plan: StepPlan, sampled: TokenColumns) -> None:
    """A row has at most a token for each that was computed from its last known one on."""
    rows = sampled.owners
    counts = np.ones_like(rows) if sampled.counts is None else sampled.counts
    most = np.ones_like(rows)
    if plan.decode_counts is not None:  # no other step of the row is in flight
        most = table.num_computed[rows] + 1 - table.num_tokens[rows]
    for i in (counts > most).nonzero()[0].tolist():
        raise ValueError(
            f"step {plan.number} has {counts[i]} tokens for row {rows[i]}: at most {most[i]}"
        )
