"""Answers HELLO: WELCOME with what a client must know, or REFUSED with the reason."""

from __future__ import annotations

import time
from typing import Final

from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.io.limits import DrainRate
from nanocore.protocol.messages import (
    PROTOCOL_VERSION,
    Capability,
    Hello,
    Limits,
    ModelCard,
    Refused,
    Welcome,
)
from nanocore.protocol.sockets.options import MAX_FRAME_BYTES

PING_INTERVAL_S: Final = 1.0
SESSION_TIMEOUT_S: Final = 30.0
MIN_SILENT_CHECKS: Final = 2
"""At each check, the PONG to the previous check's PING has had a whole interval."""


def max_silent_checks(session_timeout_ms: int) -> int:
    """Return how many consecutive silent checks a client with this timeout gets.

    The first check comes up to an interval after its last message; the last one closes the session.
    """
    timeout_ms = min(session_timeout_ms, int(SESSION_TIMEOUT_S * 1e3))
    return max(MIN_SILENT_CHECKS, timeout_ms // int(PING_INTERVAL_S * 1e3))


class HandshakeHandler:
    """Answers HELLO with WELCOME or REFUSED, in the io thread. instance: identifies the engine."""

    def __init__(
        self,
        model: ModelCard,
        config: EngineConfig,
        capabilities: list[Capability],
        max_num_clients: int,
        instance: str,
    ) -> None:
        self._model = model
        self._limits = Limits(
            max_frame_bytes=MAX_FRAME_BYTES,
            max_num_seqs=config.sizes.max_num_seqs,
            max_num_queued_reqs=config.max_num_queued_reqs,
            max_num_queued_tokens=config.max_num_queued_tokens,
            max_num_queued_bytes=config.max_num_queued_bytes,
            ping_interval_ms=int(PING_INTERVAL_S * 1e3),
            session_timeout_ms=int(SESSION_TIMEOUT_S * 1e3),
            max_num_clients=max_num_clients,
            max_logprobs=config.max_logprobs,
        )
        self._capabilities: list[str] = [*capabilities]
        self._instance = instance
        self._num_opened = 0
        self._closed_sessions = DrainRate()

    def refusal(self, hello: Hello, num_sessions: int) -> Refused | None:
        """Return why this client gets no session now, or None. num_sessions: open sessions."""
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
        num_closed = self._num_opened - num_sessions
        self._closed_sessions.observe(time.monotonic(), num_closed, is_empty=not num_sessions)
        retry_s = self._closed_sessions.retry_after_s(1)
        return Refused(message=text, supported=[PROTOCOL_VERSION], retry_after_s=retry_s)

    def welcome(self, hello: Hello, session_id: str, is_admin: bool) -> Welcome:
        self._num_opened += 1
        return Welcome(
            protocol=min(PROTOCOL_VERSION, hello.protocol),
            session=session_id,
            engine_instance=self._instance,
            model=self._model,
            limits=self._limits,
            capabilities=self._capabilities,
            role="admin" if is_admin else "user",
        )
