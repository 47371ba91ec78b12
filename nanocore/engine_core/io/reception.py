"""The io thread's answer to HELLO: WELCOME with what a client must know, or REFUSED and why."""

from __future__ import annotations

from typing import Final

from nanocore.protocol.messages import (
    PROTOCOL_VERSION,
    Capability,
    Hello,
    Limits,
    ModelCard,
    Refused,
    Welcome,
)

RETRY_AFTER_S: Final = 1.0


class Reception:
    """Belongs to the io thread. The arguments are what WELCOME says; instance names the engine."""

    def __init__(
        self, model: ModelCard, limits: Limits, capabilities: list[Capability], instance: str
    ) -> None:
        self._model = model
        self._limits = limits
        self._capabilities: list[str] = [*capabilities]
        self._instance = instance

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
        return Refused(message=text, supported=[PROTOCOL_VERSION], retry_after_s=RETRY_AFTER_S)

    def welcome(self, hello: Hello, session_id: str) -> Welcome:
        """What the client of a new session is told."""
        return Welcome(
            protocol=min(PROTOCOL_VERSION, hello.protocol),
            session=session_id,
            engine_instance=self._instance,
            model=self._model,
            limits=self._limits,
            capabilities=self._capabilities,
        )
