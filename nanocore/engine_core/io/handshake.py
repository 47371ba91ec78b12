"""The answer to HELLO: WELCOME with what a client must know, or REFUSED with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.io.limits import UNKNOWN_RETRY_S
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


def welcome(
    model: ModelCard,
    config: EngineConfig,
    capabilities: Sequence[Capability],
    max_num_clients: int,
    instance: str,
) -> Welcome:
    """Return what every client is told; its session, version and role are filled in at HELLO.

    instance: identifies the engine.
    """
    limits = Limits(
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
    return Welcome(
        protocol=PROTOCOL_VERSION,
        session="",
        engine_instance=instance,
        model=model,
        limits=limits,
        capabilities=[*capabilities],
    )


def refusal(hello: Hello, max_num_clients: int | None, num_sessions: int) -> Refused | None:
    """Return why a client gets no session now, or None. num_sessions: open sessions."""
    major, _minor = hello.protocol
    if major != PROTOCOL_VERSION[0]:
        text = (
            f"this engine speaks protocol {PROTOCOL_VERSION[0]}.x, the client asked for "
            f"{major}.x: use a client of the same major version"
        )
        return Refused(message=text, supported=[PROTOCOL_VERSION])
    if max_num_clients is None or num_sessions < max_num_clients:
        return None
    text = (
        f"this engine serves {max_num_clients} clients at once and has as many: try again later, "
        "or start it with a higher --max-num-clients"
    )
    return Refused(message=text, supported=[PROTOCOL_VERSION], retry_after_s=UNKNOWN_RETRY_S)
