"""Which requests a step's result ends, and the last thing that is said of each.

A request ends at an EOS token or a stop id, at its length, or because a row of its logits is not
finite: then there is no token, and what was computed of it is not to be found by others. Called by
the scheduler, before rows are freed. Python runs only for rows that may end.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.scheduling.request import Request
from nanocore.engine_core.scheduling.row_table import IntArray, RowTable
from nanocore.engine_core.scheduling.step import Step
from nanocore.protocol.messages import Event
from nanocore.worker.plan import NO_TOKEN

End = tuple[Request, Event]

_NO_TOKEN_BYTES: Final = np.array(NO_TOKEN, "<i4").tobytes()


def ends_without_token(table: RowTable, rows: IntArray, token_ids: NDArray[np.int32]) -> list[End]:
    """Those of rows that sampled and have no token."""
    # Costs next to nothing where there is none. (It may be found across two other ids.)
    if _NO_TOKEN_BYTES not in token_ids.tobytes():
        return []
    ends = []
    for row in rows[token_ids == NO_TOKEN].tolist():
        request = table.request(row)
        number = int(table.num_tokens[row]) - request.num_prompt_tokens + 1
        message = (
            f"the logits of output token {number} are not finite (NaN or infinity): the model's "
            "weights or the KV cache are damaged, or its dtype overflows; try --dtype float32"
        )
        ends.append((request, Event(handle=request.handle, finish_reason="error", message=message)))
    return ends


def ends_with_token(
    table: RowTable, step: Step, rows: IntArray, token_ids: NDArray[np.int32]
) -> list[End]:
    """Those of rows whose token, just appended, is their last: EOS, then stop ids, then length."""
    ends: dict[int, End] = {}
    for i in table.may_stop(token_ids):
        row, token_id = int(rows[i]), int(token_ids[i])
        request = table.request(row)
        is_eos = token_id in request.eos_token_ids
        if is_eos or token_id in request.sampling.stop_token_ids:
            stop_reason = None if is_eos else token_id
            event = Event(handle=request.handle, finish_reason="stop", stop_reason=stop_reason)
            ends[row] = request, event
    for row in step.last:
        if row not in step.dead_rows and row not in ends:
            request = table.request(row)
            ends[row] = request, Event(handle=request.handle, finish_reason="length")
    return list(ends.values())
