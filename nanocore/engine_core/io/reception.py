"""The io thread's answer to HELLO: WELCOME with what a client must know, or REFUSED and why."""

from __future__ import annotations

from typing import Final

from nanocore.engine_core.io.client_limit import ClientLimit
from nanocore.engine_core.io.queue_limit import QueueLimit
from nanocore.engine_core.io.session_turnover import SessionTurnover
from nanocore.protocol.messages import (
    PROTOCOL_VERSION,
    Capability,
    Hello,
    Limits,
    ModelCard,
    Refused,
    Welcome,
)
from nanocore.protocol.sockets import MAX_FRAME_BYTES

PING_INTERVAL_S: Final = 1.0
SESSION_TIMEOUT_S: Final = 30.0
MIN_PATIENCE: Final = 2
"""Checks in a row: at each, the answer to the PING of the one before has had a whole interval."""


def patience(session_timeout_ms: int) -> int:
    """How many checks in a row may hear nothing of a client that wants to be waited for so long.

    The first of them comes up to an interval after its last word, and the last one closes.
    """
    timeout_ms = min(session_timeout_ms, int(SESSION_TIMEOUT_S * 1e3))
    return max(MIN_PATIENCE, timeout_ms // int(PING_INTERVAL_S * 1e3))


class Reception:
    """Belongs to the io thread. The arguments are what WELCOME says; instance names the engine."""

    def __init__(
        self,
        model: ModelCard,
        capabilities: list[Capability],
        max_num_seqs: int,
        client_limit: ClientLimit,
        queue_limit: QueueLimit,
        instance: str,
        max_logprobs: int,
    ) -> None:
        self._model = model
        self._limits = Limits(
            max_frame_bytes=MAX_FRAME_BYTES,
            max_num_seqs=max_num_seqs,
            max_num_queued_reqs=queue_limit.max_num_queued_reqs,
            max_num_queued_tokens=queue_limit.max_num_queued_tokens,
            max_num_queued_bytes=queue_limit.max_num_queued_bytes,
            ping_interval_ms=int(PING_INTERVAL_S * 1e3),
            session_timeout_ms=int(SESSION_TIMEOUT_S * 1e3),
            max_num_clients=client_limit.max_num_clients,
            max_logprobs=max_logprobs,
        )
        self._capabilities: list[str] = [*capabilities]
        self._instance = instance
        self._turnover = SessionTurnover()

    def refusal(self, hello: Hello, num_sessions: int) -> Refused | None:
        """Why this client gets no session now. num_sessions: that are open."""
        major, _minor = hello.protocol
        if major != PROTOCOL_VERSION[0]:
            text = (
                f"this engine speaks protocol {PROTOCOL_VERSION[0]}.x, the client asked for "
                f"{major}.x: use a client of the same major version"
            )
            return Refused(message=text, supported=[PROTOCOL_VERSION])
        most = self._limits.max_num_clients
        if most is None or num_sessions < most:
            return None
        text = (
            f"this engine serves {most} clients at once and has as many: try again later, or start "
            "it with a higher --max-num-clients"
        )
        retry_s = self._turnover.retry_after_s(num_sessions)
        return Refused(message=text, supported=[PROTOCOL_VERSION], retry_after_s=retry_s)

    def welcome(self, hello: Hello, session_id: str, is_admin: bool) -> Welcome:
        """What the client of a new session is told."""
        self._turnover.opened()
        return Welcome(
            protocol=min(PROTOCOL_VERSION, hello.protocol),
            session=session_id,
            engine_instance=self._instance,
            model=self._model,
            limits=self._limits,
            capabilities=self._capabilities,
            role="admin" if is_admin else "user",
        )
