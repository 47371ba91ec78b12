"""The step loop with a fake worker, which is always right, and what the loop has sent."""

from __future__ import annotations

from collections import deque
from queue import SimpleQueue
from typing import Any

from nanocore.engine_core.core import EngineCore
from nanocore.engine_core.log.trace import StepTrace
from nanocore.engine_core.mailbox import ControlReply, Inbox, Outbox, Shutdown
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.protocol.messages import Event, Reply
from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput, TokenMasks
from tests.fakes import make_scheduler, tokens_by_handle


class ScriptedInbox(SimpleQueue):  # type: ignore[type-arg]
    """An inbox that has the next event of a script whenever the core sleeps on it."""

    def __init__(self, script: list) -> None:
        self.script = script

    def get(self, block: bool = True, timeout: float | None = None) -> object:
        if self.empty() and block:
            return self.script.pop(0)
        return super().get(block, timeout)


class CoreUnderTest:
    """A core, and what it has sent."""

    def __init__(
        self, trace: StepTrace | None = None, inbox: Inbox | None = None, **limits: Any
    ) -> None:
        self.scheduler, self.executor = make_scheduler(**limits)
        self.inbox: Inbox = inbox or SimpleQueue()
        self.outbox = Outbox()
        self.core = EngineCore(self.scheduler, self, self.inbox, self.outbox, trace)
        self.during_step: list = []
        self.max_concurrent_steps = limits.get("num_groups", 1)
        self.results: deque[ModelRunnerOutput] = deque()
        self.most_in_flight = 0

    def submit(self, plan: SchedulerOutput) -> None:
        """The fake worker; what is in during_step arrives while it runs."""
        while self.during_step:
            self.inbox.put(self.during_step.pop(0))
        self.results.append(self.executor.execute(plan))
        self.most_in_flight = max(self.most_in_flight, len(self.results))

    def sample(self, masks: TokenMasks) -> None:
        raise AssertionError("no step awaits masks")

    def collect(self) -> ModelRunnerOutput:
        return self.results.popleft()

    def run(self, *events: object) -> list:
        """Put events and, without a script, a Shutdown, run to the end, and return the outbox."""
        for event in events:
            self.inbox.put(event)  # type: ignore[arg-type]
        if not isinstance(self.inbox, ScriptedInbox):
            self.inbox.put(Shutdown("test"))
        self.core.run()
        return self.outbox.drain()

    def finish(self, *events: object) -> list:
        """Put events and step until nothing is left."""
        for event in events:
            self.inbox.put(event)  # type: ignore[arg-type]
        self.core.drain_inbox(wait=False)
        while self.scheduler.num_requests:
            self.core.step()
        return self.outbox.drain()


def tokens(outputs: list) -> list[int]:
    return [t for o in outputs if isinstance(o, ClientOutput) for t in o.tokens.token_ids.tolist()]


def ends(outputs: list) -> list[Event]:
    return [
        event
        for output in outputs
        if isinstance(output, ClientOutput)
        for event in output.events
        if event.finish_reason
    ]


def replies(outputs: list) -> list[Reply]:
    return [output.reply for output in outputs if isinstance(output, ControlReply)]


def tokens_of(outputs: list, handle: int) -> list[int]:
    return [
        token
        for output in outputs
        if isinstance(output, ClientOutput)
        for token in tokens_by_handle(output.tokens).get(handle, [])
    ]
