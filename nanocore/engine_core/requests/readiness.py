"""Readiness: what a request waits for before it can be in line.

The scheduler knows a request from its SUBMIT on, so abort, deadline, stats and shutdown find it in
one place. It may wait for several things at once; it joins the waiting queue, at the place of its
arrival, when nothing is left. A new thing to wait for takes a declaration and two calls:

    ADAPTER = Prerequisite("adapter")
    request.wait_for(ADAPTER)                  # before `Scheduler.add`
    scheduler.ready(request.handle, ADAPTER)   # when it is there

A request that is not ready holds up nobody behind it. What the head of the queue lacks (a row,
budget, blocks) is no wait of the request: it is decided anew in every step.
"""

from __future__ import annotations

from typing import Final

import msgspec


class Prerequisite(msgspec.Struct, frozen=True, eq=False):
    """Something that a request waits for. Compared by identity.

    name: for reports.
    is_outside: it comes from outside of the step loop. Until then the loop has nothing to do for
        the request, and logs, traces and the live view do not show it.
    """

    name: str
    is_outside: bool = True


GRAMMAR: Final = Prerequisite("grammar")
"""Its structured output is being compiled."""
SIBLING: Final = Prerequisite("sibling", is_outside=False)
"""Another sample of its prompt (n > 1) is to compute the prompt first: see `Request.siblings`."""

NOTHING: Final[frozenset[Prerequisite]] = frozenset()
