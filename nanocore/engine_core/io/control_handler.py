"""Handles CONTROL: passes it to the step loop, replies at once, or refuses it.

Runs on the io thread. Operations are an allow-list. The step loop replies between two steps, so
each session's pending calls are limited: a flood of them would delay the step. A pause belongs to
its session, and ends with it at the latest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, get_args

from nanocore.engine_core.io.served_files import ServedFiles
from nanocore.engine_core.io.session import Session
from nanocore.engine_core.log.metrics import EngineMetrics, IoCounts
from nanocore.engine_core.mailbox import ControlCall, Inbox
from nanocore.protocol.errors import shorten
from nanocore.protocol.messages import ADMIN_OPERATIONS, Control, ControlOperation, Reply

MAX_CALLS: Final = 64  # of one session, that wait for the step loop


def not_permitted(session: Session, control: Control) -> Reply | None:
    """Return the reply to an operation that the session's role does not allow, or None."""
    if session.is_admin or control.operation not in ADMIN_OPERATIONS:
        return None
    return _refusal(
        control,
        f"{control.operation} concerns all clients, and this session's key has the role user: "
        "ask an administrator, or have the key put into the engine's folder admins",
    )


def _refusal(control: Control, message: str) -> Reply:
    return Reply(call_id=control.call_id, ok=False, message=message)


class ControlHandler:
    """Serves one engine's CONTROLs.

    inbox: the step loop's. files: those that read_file reads. metrics: those of the engine.
    """

    def __init__(self, inbox: Inbox, files: ServedFiles, metrics: EngineMetrics) -> None:
        self.metrics = metrics
        self._inbox = inbox
        self._files = files

    def handle(
        self, session: Session, control: Control, counts: Callable[[], IoCounts]
    ) -> Reply | None:
        """Return the reply, or None if the step loop will. counts: reads the io thread's."""
        match control.operation:
            case "stats" | "reset_prefix_cache" | "pause" | "resume" as operation:
                if session.num_calls == MAX_CALLS:
                    text = f"{MAX_CALLS} calls of this session are under way: wait for a REPLY"
                    return _refusal(control, text)
                session.num_calls += 1
                if operation in ("pause", "resume"):
                    session.has_paused = operation == "pause"
                self._inbox.put(ControlCall(session.client, control.call_id, operation))
                return None
            case "read_file":
                return self._read_file(control)
            case "metrics":
                return Reply(call_id=control.call_id, metrics=self.metrics.collect(counts()))
            case "steps":
                steps = self.metrics.recent_steps(control.after, session.client, counts())
                return Reply(call_id=control.call_id, steps=steps)
            case _:
                names = ", ".join(get_args(ControlOperation))
                text = f"operation {shorten(control.operation)!r} is not one of {names}"
                return _refusal(control, text)

    def leave(self, session: Session) -> None:
        """Withdraw the pause of a session that has ended. Nobody awaits the reply."""
        if session.has_paused:
            self._inbox.put(ControlCall(session.client, 0, "resume"))

    def _read_file(self, control: Control) -> Reply:
        data = self._files.chunk(control.file, control.offset)
        if data is not None:
            return Reply(call_id=control.call_id, data=data)
        names = ", ".join(file.name for file in self._files.entries) or "none"
        if control.file is None:
            text = f"read_file needs the name of a file; this model has {names}"
        else:
            text = f"file {shorten(control.file)!r} is not served; this model has {names}"
        return _refusal(control, text)
