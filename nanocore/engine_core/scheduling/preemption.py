"""Whom a running set preempts when its blocks run out."""

from __future__ import annotations

from nanocore.engine_core.scheduling.precedence import PrecedenceKey
from nanocore.engine_core.scheduling.request import Request
from nanocore.engine_core.scheduling.row_table import RowTable


def next_preempted(table: RowTable, precedence: PrecedenceKey) -> Request:
    """The last by precedence, but for those that are about to end; of equals the cheapest one.

    It costs the tokens it computed itself: what it found in the prefix cache it is likely to find
    again. The one that would cost most stays, so there is always progress.
    """

    def order(request: Request) -> tuple[float, int, int, int]:
        first, arrival, handle = precedence(request)
        num_computed, num_cached = table.num_computed[request.row], table.num_cached[request.row]
        return first, arrival, int(num_cached - num_computed), handle

    return max((one for one in table.running() if one.row not in table.finishing), key=order)
