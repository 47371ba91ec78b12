"""Rules for engines: messages of every kind, and bytes that are none, by the committed vectors."""

from __future__ import annotations

from nanocore.protocol.messages import FROM_CLIENT, Op, Pong, Refused, Reply, Welcome
from nanocore_conformance.engine_sessions import longest, runs_on
from nanocore_conformance.engine_under_test import ENGINE_RULES, EngineUnderTest
from nanocore_conformance.peer import Peer
from nanocore_conformance.report import BrokenError, require
from nanocore_conformance.vectors import Vector, load_vectors

PROBE_EVERY = 20
"""A whole request after so many messages: each would cost a slow model minutes."""


def vectors(peer: Peer, *, before_hello: bool = False) -> list[Vector]:
    """Clients' vectors that presume nothing which this engine does not have."""
    policy = "priority" if "priority" in peer.welcome.capabilities else "fcfs"
    has = {None, f"{policy} scheduling"}
    has |= {
        f"protocol 1.{minor}"
        for minor in (5, 6, 7, 8, 9, 11, 14)
        if peer.welcome.protocol >= (1, minor)
    }
    if "structured_outputs" in peer.welcome.capabilities:
        has |= {"structured outputs"} | ({"reasoning"} if "protocol 1.7" in has else set())
        has |= {"free prefixes"} if "protocol 1.8" in has else set()
        has |= {"lenient parts"} if peer.welcome.protocol >= (1, 12) else set()
    has |= {"embeddings"} if "embeddings" in peer.welcome.capabilities else set()
    return [
        vector
        for vector in load_vectors("client")
        if vector.before_hello is before_hello
        and vector.presumes in has
        and (peer.welcome.role == "admin" or not _is_before_others(vector))
    ]


def _is_before_others(vector: Vector) -> bool:
    priority = (vector.message or {}).get("priority")
    return isinstance(priority, int) and priority < 0


def answered(peer: Peer, vector: Vector) -> None:
    """Send a vector and take its ERROR, or the PONG that proves that there is none."""
    try:
        peer.send_frames(vector.data)
        if vector.error:
            peer.refused(vector.error, vector.request_id)
        else:
            peer.quiet()
    except BrokenError as error:
        raise BrokenError(f"{error.expected}, for vector {vector.name}", error.got) from None


@ENGINE_RULES.add("4. Framing")
def malformed_messages_are_refused(engine: EngineUnderTest) -> None:
    """Every malformed vector gets its ERROR, and the session goes on streaming."""
    peer = engine.session()
    for i, vector in enumerate(v for v in vectors(peer) if v.error):
        answered(peer, vector)
        if i % PROBE_EVERY == 0:
            peer.still_streams()
    peer.quiet()
    peer.still_streams()


@ENGINE_RULES.add("4. Framing")
def malformed_messages_leave_running_requests_alone(engine: EngineUnderTest) -> None:
    """A request that runs while its session sends bytes that are no message loses nothing."""
    peer = engine.session()
    stream = peer.submit("running", max_tokens=longest(peer))
    for vector in [v for v in vectors(peer) if v.error == "protocol_error"][:PROBE_EVERY]:
        answered(peer, vector)
    runs_on(peer, stream)


@ENGINE_RULES.add("8. The operations, one by one")
def valid_messages_are_taken(engine: EngineUnderTest) -> None:
    """Every valid vector is taken for what it says, whatever its msgpack looks like."""
    peer = engine.session()
    for vector in vectors(peer):
        if vector.message is None:
            continue
        try:
            _take(engine, peer, vector, vector.message)
        except BrokenError as error:
            raise BrokenError(f"{error.expected}, for vector {vector.name}", error.got) from None
    peer.still_streams()


def _take(engine: EngineUnderTest, peer: Peer, vector: Vector, message: dict[str, object]) -> None:
    if vector.frames[0] == f"{Op.BYE:02x}":
        leaving = engine.session()
        leaving.send_frames(vector.data)
        leaving.send(Op.PING, {})
        leaving.refused("no_session")
        return
    peer.send_frames(vector.data)
    match int(vector.frames[0], 16):
        case Op.SUBMIT:
            request_id = str(message["request_id"])
            stream = peer.accepted(request_id)
            peer.send(Op.ABORT, {"request_ids": [request_id]})
            peer.finish(*stream.samples)
        case Op.PING:
            nonce = message.get("nonce", 0)
            pong = peer.expect(Pong)
            require(pong.nonce == nonce, f"PONG with nonce {nonce}", pong)
        case Op.CONTROL:
            reply = peer.expect(Reply)
            require(reply.call_id == message["call_id"], f"call_id {message['call_id']}", reply)
            if message["operation"] == "pause":
                peer.call("resume")
        case _:
            peer.quiet()


@ENGINE_RULES.add("HELLO")
def every_hello_is_answered(engine: EngineUnderTest) -> None:
    """Every valid HELLO of the vectors gets WELCOME, or REFUSED if its major is another."""
    probe = engine.session()
    for vector in vectors(probe, before_hello=True):
        if vector.message is not None:
            peer = engine.peer()
            peer.send_frames(vector.data)
            peer.expect(Welcome if vector.message["protocol"][0] == 1 else Refused)


@ENGINE_RULES.add("PONG")
def what_asks_nothing_is_answered_by_nothing(engine: EngineUnderTest) -> None:
    """PONG, and ABORT of what does not run, get no answer."""
    peer = engine.session()
    for vector in vectors(peer):
        if vector.ignored:
            answered(peer, vector)
    peer.still_streams()


@ENGINE_RULES.add("7. Operations")
def every_op_byte_has_its_answer(engine: EngineUnderTest) -> None:
    """Op bytes that clients do not send are answered with unknown_op."""
    peer = engine.session()
    known = {int(message.op) for message in FROM_CLIENT}
    for op in range(256):
        if op not in known:
            peer.send_frames([bytes([op]), b"\x80"])
            try:
                peer.refused("unknown_op")
            except BrokenError as error:
                raise BrokenError(f"{error.expected}, for op 0x{op:02x}", error.got) from None
    peer.still_streams()
