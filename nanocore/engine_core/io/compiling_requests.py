"""Requests that wait at the front desk until their grammars are compiled.

They are validated, have their handles, and are counted into the queue, in which each takes the
place that its SUBMIT's arrival gave it; the step loop does not know them yet. Belongs to the io
thread. What is compiled comes back by an event, which may find that its request is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nanocore.engine_core.io.queue_limit import QueueLimit
from nanocore.engine_core.mailbox import GrammarDone
from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.structured.matcher import GrammarSource


class CompilingRequests:
    """One engine's.

    Args:
        grammars: compile. queue_limit: into which the requests were counted.
        done: takes the events, from any thread.

    num_aborts: samples that were aborted here.
    """

    def __init__(
        self,
        grammars: GrammarSource,
        queue_limit: QueueLimit,
        done: Callable[[GrammarDone], None],
    ) -> None:
        self.num_aborts = 0
        self._grammars = grammars
        self._queue_limit = queue_limit
        self._done = done
        self._requests: dict[int, tuple[Request, int]] = {}  # by the first sample's handle
        self._withdrawals: dict[int, Callable[[], None]] = {}  # likewise
        self._leaders: dict[int, int] = {}  # that handle, by each sample's

    def __len__(self) -> int:
        """Samples that wait."""
        return len(self._leaders)

    def __contains__(self, handle: int) -> bool:
        return handle in self._leaders

    def add(self, request: Request, arrival: int) -> None:
        """Let a request wait, and compile what it wants. arrival: steps before it came."""
        handle, wanted = request.handle, request.sampling.structured_outputs
        assert wanted is not None
        assert request.token_ids is not None
        output = request.token_ids[request.num_prompt_tokens :].tolist()
        self._requests[handle] = request, arrival
        self._leaders.update((sample.handle, handle) for sample in request.samples)
        self._withdrawals[handle] = self._grammars.compile(
            wanted,
            lambda compiled: self._done(GrammarDone(handle, compiled)),
            request.client,
            output,
        )

    def take(self, handle: int) -> tuple[Request, int] | None:
        """(request, arrival) of its first handle: it waits no more; None if it is gone."""
        taken = self._requests.pop(handle, None)
        if taken is not None:
            self._withdrawals.pop(handle)()  # nothing is left of it, if it is done
            for sample in taken[0].samples:
                del self._leaders[sample.handle]
        return taken

    def leave_queue(self, request: Request) -> None:
        """A request that was counted ends here: its place in the queue is free."""
        num_samples = len(request.samples)
        self._queue_limit.leave(request.num_submitted_tokens, num_samples, request.num_bytes)

    def abort(self, handles: Iterable[int]) -> list[Request]:
        """End those that wait of the requests of these samples, all of each."""
        aborted = [taken[0] for handle in handles if (taken := self.take(handle)) is not None]
        for request in aborted:
            self.leave_queue(request)
            self.num_aborts += len(request.samples)
        return aborted
