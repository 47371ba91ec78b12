"""The EngineCore: the step loop, synchronous and single-threaded.

    drain the inbox → schedule → submit → (masks → sample) → collect → drain again → update → outbox

It touches no socket. The second drain lets an abort that arrived while the model ran win over the
same step's result. As many steps are in flight as the executor takes: several with async scheduling
and with pipeline stages. A step with structured outputs runs in two phases: its forward pass is
submitted at once, and it samples when its token masks are filled, which happens meanwhile. The loop
sleeps on the inbox when there is nothing to run.
"""

from __future__ import annotations

from contextlib import suppress
from queue import Empty

from nanocore.engine_core.grammars.mask_filler import MaskFiller, StepMasks
from nanocore.engine_core.log.event_log import StepDone
from nanocore.engine_core.log.metrics import stats_of
from nanocore.engine_core.log.trace import StepTrace
from nanocore.engine_core.mailbox import (
    SIGNAL_POLL_S,
    AbortRequests,
    AddRequest,
    ControlCall,
    ControlReply,
    GrammarDone,
    Inbox,
    InboxEvent,
    Outbox,
    Shutdown,
)
from nanocore.engine_core.requests.ends import end_by_outputs, end_outside_a_step
from nanocore.engine_core.requests.readiness import GRAMMAR
from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.scheduling.outputs import split_events
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.engine_core.step_clock import StepClock
from nanocore.protocol.messages import FinishReason, Reply
from nanocore.worker.executors.executor import StepExecutor


class EngineCore:
    """Runs requests from the inbox to outputs in the outbox.

    Args:
        scheduler, executor: owned by the core.
        inbox, outbox: shared with the io thread.
        trace: if given, every step is written to it.
        clock: lets the watchdog see how long a step takes.
        masks: fills the token masks of structured outputs; None if there cannot be any.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: StepExecutor,
        inbox: Inbox,
        outbox: Outbox,
        trace: StepTrace | None = None,
        clock: StepClock | None = None,
        masks: MaskFiller | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.clock = clock or StepClock()
        self._executor = executor
        self._inbox = inbox
        self._outbox = outbox
        self._trace = trace
        if trace is not None:
            trace.attach(scheduler)
        self._masks = StepMasks(scheduler, executor, masks)
        # Submitted and not collected. The scheduler counts a collected step until `update`, so an
        # abort in between still voids its result.
        self._num_in_flight = 0
        self._deferred: list[ControlCall] = []
        self._pausing: set[int] = set()  # clients that hold a pause; then no step begins
        self._shutdown: Shutdown | None = None

    def run(self) -> Shutdown:
        """Step until a Shutdown arrives; then end every request. Returns the Shutdown."""
        while self._shutdown is None:
            self.drain_inbox(wait=self.is_idle)
            if self._shutdown is None and not self.is_idle:
                self.step()
        if not self._shutdown.failure:  # else the io thread tells clients that the engine is dead
            self._send_ends(self.scheduler.abort_all(), "abort", self._shutdown.reason)
        return self._shutdown

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do before another event arrives."""
        nothing_to_begin = bool(self._pausing) or self.scheduler.num_requests == 0
        return not self._num_in_flight and nothing_to_begin

    def step(self) -> None:
        """Submit as many steps as the executor takes, then complete the oldest one."""
        scheduler, executor = self.scheduler, self._executor
        self.clock.begin()
        while (
            self._num_in_flight < executor.max_concurrent_steps
            and not self._pausing
            # A worker begins no other step before the awaiting one has sampled, and its masks may
            # need a result that has to be collected first.
            and not self._masks.is_awaited
            and (group := scheduler.next_group()) is not None
        ):
            self._submit(group)
        if not self._num_in_flight:  # `collect` would wait for ever
            self._fail_stuck_request()
            return
        result = executor.collect()
        self._num_in_flight -= 1
        # Before `update`: an abort that has arrived by now wins over the step's own result.
        self.drain_inbox(wait=False, in_step=True)
        for output in scheduler.update(result):
            self._outbox.put(output)
        self._sample()  # masks that waited for this result can be filled now
        deferred, self._deferred = self._deferred, []
        for call in deferred:
            self._handle(call)
        scheduler.kv_cache.publish_events()
        # Before the clock ends, so that the watchdog sees a trace whose disk hangs.
        scheduler.log.append(StepDone(self.clock.age_s))
        self.clock.end()

    def _submit(self, group: int) -> None:
        """Plan a step of this group and begin it."""
        plan = self.scheduler.schedule(group)
        if self._trace:
            self._trace.begin()
        if self.scheduler.is_stuck:
            self._fail_stuck_request()  # the plan is empty, and submitted like any other
        self._masks.begin(plan)
        self._executor.submit(plan)
        self._num_in_flight += 1
        self._sample()

    def _sample(self) -> None:
        """Second phase of a step with structured outputs: let it sample once its masks are filled.

        A request whose grammar cannot go on fails alone.
        """
        for request, message in self._masks.sample():
            self._fail(request, message)

    def blame(self) -> str:
        """Say what a hanging step waits for, as a clause. Any thread may call this."""
        return self._masks.blame() or self._executor.blame()

    def drain_inbox(self, wait: bool, in_step: bool = False) -> None:
        """Handle the events that have arrived. Control operations wait until the step is over."""
        if wait:
            self.clock.rest()
        with suppress(Empty):
            event = self._inbox.get(wait, SIGNAL_POLL_S if wait else None)
            while True:
                if in_step and isinstance(event, ControlCall):
                    self._deferred.append(event)
                else:
                    self._handle(event)
                event = self._inbox.get_nowait()
        if not in_step:  # the next step may be far away
            self.scheduler.kv_cache.publish_events()

    def _handle(self, event: InboxEvent) -> None:
        match event:
            case AddRequest(request):
                if not request.waits_for and self._is_complete(request):
                    self.scheduler.counters.count_dequeued(request, self.scheduler.clock())
                else:
                    self.scheduler.add(request)
            case GrammarDone():
                self._go_on(event)
            case AbortRequests(handles, reason, message):
                aborted = [self.scheduler.abort(handle) for handle in handles]
                self._send_ends([request for request in aborted if request], reason, message)
            case ControlCall(client):
                self._outbox.put(ControlReply(client, self._control(event)))
            case Shutdown():
                self._shutdown = event

    def _go_on(self, event: GrammarDone) -> None:
        """Go on with a request whose grammar is compiled or refused; have its SUBMIT answered."""
        request, compiled = self.scheduler.find(event.handle), event.compiled
        if request is None:
            return  # it has ended meanwhile
        if not isinstance(compiled, Exception):
            request.follow(compiled, event.at_s)  # before its ACCEPTED, which tells `not_held`
        self._outbox.put(event)  # before its outputs
        is_over = isinstance(compiled, Exception) or self._is_complete(request)
        for sample in request.samples:
            if is_over:
                self.scheduler.end(sample.handle)
            else:
                self.scheduler.ready(sample.handle, GRAMMAR)

    def _is_complete(self, request: Request) -> bool:
        """Whether resumed outputs have completed the request; then its client is told so."""
        ended = end_by_outputs(request)
        for output in split_events([(request.client, ended)] if ended else []):
            self._outbox.put(output)
        return ended is not None

    def _control(self, call: ControlCall) -> Reply:
        call_id, message = call.call_id, None
        match call.operation:
            case "stats":
                return Reply(call_id=call_id, stats=stats_of(self.scheduler, bool(self._pausing)))
            case "reset_prefix_cache":
                if not self.scheduler.kv_cache.reset_prefix_cache():
                    message = "the prefix cache is in use: reset it when no request is running"
                    return Reply(call_id=call_id, ok=False, message=message)
            case "pause":
                self._pausing.add(call.client)
            case "resume":
                self._pausing.discard(call.client)
                if self._pausing:
                    message = f"still paused by other sessions ({len(self._pausing)})"
        self.scheduler.counters.is_paused = bool(self._pausing)
        return Reply(call_id=call_id, message=message)

    def _send_ends(
        self, requests: list[Request], reason: FinishReason, message: str | None
    ) -> None:
        """Send the final events of requests that ended outside a step's result.

        message: None if the client asked for the end. A client takes an abort with a message as the
        engine's stopping, and may resubmit the request elsewhere.
        """
        events, now_s = [], self.scheduler.clock()
        for request in requests:
            event = end_outside_a_step(request, reason, message)
            events.append((request.client, event))
            if request.was_queued:
                self.scheduler.log.end(request, event, now_s)
        for output in split_events(events):
            self._outbox.put(output)

    def _fail_stuck_request(self) -> None:
        """Fail a request that can never run: a bug, which is reported and survived."""
        scheduler = self.scheduler
        kv_cache = scheduler.kv_cache
        request = scheduler.waiting.head()
        assert request is not None
        message = (
            f"internal error: request {request.request_id!r} of {request.num_tokens} tokens cannot "
            f"be scheduled although {scheduler.num_running} requests run and "
            f"{kv_cache.num_free_blocks} of {kv_cache.num_blocks} KV blocks are free "
            f"({scheduler.num_waiting} requests wait, step {scheduler.counters.num_steps})"
        )
        self._fail(request, message)

    def _fail(self, request: Request, message: str) -> None:
        self.scheduler.end(request.handle)
        self._send_ends([request], "error", message)
