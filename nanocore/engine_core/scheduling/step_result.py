"""A step's result as it comes from a worker, checked and brought into columns.

Workers are ours, but a result that does not fit its plan would put tokens into the wrong places
and be seen only in what clients read: so it ends the engine instead.
"""

from __future__ import annotations

import numpy as np

from nanocore.engine_core.scheduling.request import TOKEN_DTYPE
from nanocore.engine_core.scheduling.row_table import RowTable
from nanocore.engine_core.scheduling.step import StepOutcome
from nanocore.engine_core.scheduling.token_columns import NumberColumns, TokenColumns
from nanocore.worker.plan import ModelRunnerOutput


def read_result(table: RowTable, outcome: StepOutcome, result: ModelRunnerOutput) -> TokenColumns:
    """What the step sampled, by row: of rows that are alive and have any token.

    Raises:
        ValueError: the result's columns do not fit together, or not to what the step computed.
    """
    sampled = _columns(result)
    counts = sampled.counts
    if counts is not None and not counts.all():
        sampled = sampled.take(counts > 0)
    if outcome.dead_rows:
        sampled = sampled.take(~np.isin(sampled.owners, list(outcome.dead_rows)))
    if counts is not None or outcome.plan.decode_counts is not None:
        _check(table, outcome, sampled)
    return sampled


def _columns(result: ModelRunnerOutput) -> TokenColumns:
    # As wide as an index, because they will be one several times.
    rows = np.frombuffer(result.rows, TOKEN_DTYPE).astype(np.int64)
    token_ids = np.frombuffer(result.token_ids, TOKEN_DTYPE)
    if not (result.counts or result.columns) and len(rows) == len(token_ids):
        return TokenColumns(rows, token_ids)
    counts = np.frombuffer(result.counts, TOKEN_DTYPE) if result.counts else None
    columns: NumberColumns = {}
    for name, data in result.columns.items():
        columns[name] = np.frombuffer(data, "<f4")
    num_tokens = len(rows) if counts is None else int(counts.sum())
    fits = counts is None or (len(counts) == len(rows) and not (counts < 0).any())
    lengths = {"token_ids": len(token_ids)} | {n: len(c) for n, c in columns.items()}
    if not fits or set(lengths.values()) != {num_tokens}:
        raise ValueError(
            f"a step's result does not fit together: {len(rows)} rows of {num_tokens} tokens, "
            f"{None if counts is None else len(counts)} counts, and columns of {lengths}"
        )
    return TokenColumns(rows, token_ids, counts, columns)


def _check(table: RowTable, outcome: StepOutcome, sampled: TokenColumns) -> None:
    """A row has at most a token for each that was computed from its last known one on.

    It has one at least if the step completes its prompt: nothing was guessed then.
    """
    plan, rows = outcome.plan, sampled.owners
    counts = np.ones_like(rows) if sampled.counts is None else sampled.counts
    most = np.ones_like(rows)
    if plan.decode_counts is not None:  # no other step of the row is in flight
        most = table.num_computed[rows] + 1 - table.num_tokens[rows]
    for i in (counts > most).nonzero()[0].tolist():
        raise ValueError(
            f"step {plan.number} has {counts[i]} tokens for row {rows[i]}: at most {most[i]}"
        )
    completed = {*plan.started, *plan.last}.difference(plan.decoding.tolist(), outcome.dead_rows)
    for row in sorted(completed.difference(rows.tolist())):
        raise ValueError(
            f"step {plan.number} has no token for row {row}, whose prompt it completes"
        )
