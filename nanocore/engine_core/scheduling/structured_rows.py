"""Rows whose output is structured: which of them a step samples, and what their matchers learn.

Called by the running set, for its table. A matcher follows delivered tokens: those that count, of
rows that are alive when their step's result comes in. Costs nothing where no row has one.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from nanocore.engine_core.scheduling.request import Request
from nanocore.engine_core.scheduling.row_table import RowTable
from nanocore.engine_core.scheduling.step import StepPlan
from nanocore.engine_core.scheduling.token_columns import TokenColumns


def masked_rows(table: RowTable, plan: StepPlan) -> list[tuple[int, Request]]:
    """(row, request) of the structured rows that the step samples."""
    if not table.matchers:
        return []
    structured = list(table.matchers)
    rows = plan.decoding[np.isin(plan.decoding, structured)].tolist()
    rows += [row for row in plan.completed if row in table.matchers]
    return [(row, table.request(row)) for row in rows]


def tell_matchers(table: RowTable, sampled: TokenColumns) -> None:
    """Let matchers know the tokens that are delivered."""
    if not table.matchers:
        return
    rows = sampled.owner_of_each()
    for i in np.isin(rows, list(table.matchers)).nonzero()[0].tolist():
        table.matchers[int(rows[i])].append((int(sampled.token_ids[i]),))


def are_masks_known(plan: StepPlan, before: Iterable[StepPlan]) -> bool:
    """Whether the step's masks follow from tokens that are known.

    before: steps in flight that began before it; what they sample of the same requests is not.
    """
    sampling = {request for earlier in before for _, request in earlier.masked}
    return sampling.isdisjoint(request for _, request in plan.masked)
