"""Rules for engines: how sessions begin, how many there are, what ends them silently."""

from __future__ import annotations

import time

from nanocore.protocol.messages import Error, Op, Refused, Welcome
from nanocore_conformance.engine_sessions import longest, runs_on
from nanocore_conformance.engine_under_test import ENGINE_RULES, EngineUnderTest
from nanocore_conformance.peer import Peer, submit_body
from nanocore_conformance.report import BrokenError, SkippedError, require

NUM_FRAMES = (3, 7, 1000)
MAX_CLIENTS = 64
"""A larger limit of sessions is not tried: each is a connection with threads of its own."""
PROBE_S = 0.2


@ENGINE_RULES.add("5. Session")
def what_follows_hello_at_once_is_served(engine: EngineUnderTest) -> None:
    """A client need not wait for WELCOME; behind a HELLO that is refused all is no_session."""
    peer = engine.peer()
    peer.send(Op.HELLO, {"protocol": [1, 0]})
    for request_id in ("a", "b"):
        peer.send(Op.SUBMIT, submit_body(request_id))
    peer.expect(Welcome)
    peer.finish(peer.accepted("a"), peer.accepted("b"))
    peer = engine.peer()
    peer.send(Op.HELLO, {"protocol": [2, 0]})
    peer.send(Op.SUBMIT, submit_body("a"))
    peer.send(Op.PING, {})
    peer.expect(Refused)
    peer.refused("no_session")
    peer.refused("no_session")
    peer.hello()
    peer.quiet()


@ENGINE_RULES.add("6. Versions and capabilities")
def newer_fields_are_taken_or_refused(engine: EngineUnderTest) -> None:
    """A field newer than the version spoken is heeded or refused, but the SUBMIT is answered."""
    peer = engine.peer()
    peer.hello(1, 0)
    peer.send(Op.SUBMIT, submit_body("newer", skip_reading_prefix_cache=True))
    answer = peer.receive("ACCEPTED or ERROR invalid_request")
    if isinstance(answer, Error):
        got = (answer.code, answer.request_id)
        require(got == ("invalid_request", "newer"), "ACCEPTED or ERROR invalid_request", answer)
    else:
        require(answer.op is Op.ACCEPTED, "ACCEPTED or ERROR invalid_request", answer)
    peer.still_streams()


@ENGINE_RULES.add("REFUSED")
def sessions_above_the_limit_are_refused_for_a_while(engine: EngineUnderTest) -> None:
    """With max_num_clients sessions HELLO gets REFUSED with retry_after_s, until one has ended."""
    first = engine.session()
    limit = first.welcome.limits.max_num_clients
    if limit is None or limit > MAX_CLIENTS:
        raise SkippedError(f"the engine's max_num_clients is {limit}")
    engine.until(first, "the sessions of other rules to end", lambda stats: stats.num_clients == 1)
    last = first
    for _ in range(limit - 1):
        last = engine.session()
    one_more = engine.peer()
    one_more.send(Op.HELLO, {"protocol": [1, 4]})
    refused = one_more.expect(Refused, f"for session {limit + 1}, with max_num_clients={limit}")
    welcome = any(version[0] == 1 for version in refused.supported)
    require(welcome, "a supported version of the client's own major", refused)
    require(refused.retry_after_s is not None, "REFUSED with retry_after_s", refused)
    first.still_streams()
    if last is not first:
        last.bye()
        engine.until(first, "a session to end", lambda stats: stats.num_clients < limit)
        one_more.hello()
        one_more.still_streams()


@ENGINE_RULES.add("13. Shutdown and failure")
def too_large_frame_ends_the_connection(engine: EngineUnderTest) -> None:
    """A frame above max_frame_bytes disconnects its sender, whose session is no more."""
    peer, other = engine.session(), engine.session()
    stream = other.submit("other", max_tokens=longest(other))
    peer.send_frames([bytes([Op.PING]), bytes(peer.welcome.limits.max_frame_bytes + 1)])
    _require_lost(engine, peer)
    runs_on(other, stream)
    peer.hello()
    peer.still_streams()


@ENGINE_RULES.add("4. Framing")
def many_frames_harm_nobody_else(engine: EngineUnderTest) -> None:
    """More than two frames are a protocol_error; far more may end the connection, but no other."""
    other = engine.session()
    stream = other.submit("other", max_tokens=longest(other))
    for num_frames in NUM_FRAMES:
        peer = engine.session()
        peer.send_frames([bytes([Op.PING]), *[b"\x80"] * (num_frames - 1)])
        if num_frames <= 8:
            peer.refused("protocol_error")
            peer.quiet()
        else:
            error = _probe(engine, peer)
            known = error.code in ("protocol_error", "no_session")
            require(known, "ERROR protocol_error, or the end of the connection", error)
    runs_on(other, stream)


@ENGINE_RULES.add("13. Shutdown and failure", slow=True)
def silent_session_ends_without_a_word(engine: EngineUnderTest) -> None:
    """After session_timeout_ms of silence the PINGs cease without BYE, and all is no_session."""
    peer, other = engine.session(), engine.session()
    limits = peer.welcome.limits
    started_s = time.monotonic()
    num_pings = 0
    most_s = 2e-3 * limits.session_timeout_ms + engine.patience_s
    while (frames := peer.receive_frames(3e-3 * limits.ping_interval_ms + PROBE_S)) is not None:
        require(frames[0] == bytes([Op.PING]), "nothing but PING to a silent session", frames)
        num_pings += 1
        other.quiet()
        age_s = time.monotonic() - started_s
        require(age_s < most_s, f"the end of a session silent for {most_s:g} s", "PING")
    least_s = 0.5e-3 * limits.session_timeout_ms
    silent_s = time.monotonic() - started_s
    require(silent_s > least_s, f"a session that lasts {least_s:g} s", f"its end at {silent_s:g} s")
    peer.send(Op.SUBMIT, submit_body("late"))
    peer.refused("no_session")
    other.still_streams()


def _probe(engine: EngineUnderTest, peer: Peer) -> Error:
    """PING, again and again, until an ERROR comes: what is sent into a dying connection is lost."""
    deadline_s = time.monotonic() + engine.patience_s
    while time.monotonic() < deadline_s:
        peer.send(Op.PING, {})
        while (message := peer.receive_within(PROBE_S)) is not None:
            if isinstance(message, Error):
                return message
    raise BrokenError("ERROR", f"none within {engine.patience_s:g} s")


def _require_lost(engine: EngineUnderTest, peer: Peer) -> None:
    """Require that the peer's session is over, and wait until it has heard of it."""
    error = _probe(engine, peer)
    require(error.code == "no_session", "ERROR no_session on the next connection", error)
    peer.drain(PROBE_S)
