"""Rules for engines: the handshake, versions, and what keeps sessions apart."""

from __future__ import annotations

import re

from nanocore.protocol.messages import (
    MAX_FILE_BYTES,
    PROTOCOL_VERSION,
    Accepted,
    Op,
    Output,
    Refused,
    Welcome,
)
from nanocore_conformance.checked_streams import Stream
from nanocore_conformance.engine_under_test import ENGINE_RULES, EngineUnderTest
from nanocore_conformance.peer import Peer, submit_body
from nanocore_conformance.report import require
from nanocore_conformance.vectors import load_vectors

LATEST_MINOR = PROTOCOL_VERSION[1]
MORE_TOKENS = 32
"""Steps within which whatever would end a request has ended it."""
LONG = 100_000
"""max_tokens are at most what fits; see `longest`."""


def longest(peer: Peer, num_prompt: int = 3) -> int:
    """max_tokens of the longest request with such a prompt, by model and KV cache."""
    model = peer.welcome.model
    room = min(model.max_model_len, model.num_blocks * model.block_size)
    return min(LONG, room - num_prompt)


def runs_on(peer: Peer, stream: Stream) -> None:
    """Prove that a long request was not ended by what happened, and end it."""
    peer.quiet()
    goal = len(stream.token_ids) + MORE_TOKENS
    while len(stream.token_ids) < goal and stream.finish_reason is None:
        peer.expect(Output, f"with more tokens of {stream.request_id!r}")
    reason = stream.finish_reason
    require(reason in (None, "length"), f"{stream.request_id!r} to run on", f"its end, {reason!r}")
    peer.send(Op.ABORT, {"request_ids": [stream.request_id]})
    peer.finish(stream)


@ENGINE_RULES.add("WELCOME")
def welcome_is_complete(engine: EngineUnderTest) -> None:
    """WELCOME has every required field, and values that can be."""
    welcome = engine.session().welcome
    model, limits = welcome.model, welcome.limits
    protocol = welcome.protocol
    require(
        protocol[0] == 1 and 0 <= protocol[1] <= LATEST_MINOR,
        f"protocol [1, at most {LATEST_MINOR}]",
        protocol,
    )
    require(bool(welcome.session), "a session id", repr(welcome.session))
    instance = welcome.engine_instance
    ok = re.fullmatch("[0-9a-f]{32}", instance) is not None
    require(ok, "engine_instance of 32 hex digits", instance)
    least = {"vocab_size": 1, "max_model_len": 2, "block_size": 1, "num_blocks": 1}
    for name, low in least.items():
        value = getattr(model, name)
        require(value >= low, f"model.{name} of at least {low}", value)
    valid = all(0 <= token < model.vocab_size for token in model.eos_token_ids)
    require(valid, f"eos_token_ids below vocab_size={model.vocab_size}", model.eos_token_ids)
    for name in limits.__struct_fields__:
        value = getattr(limits, name)
        require(value is None or value >= 1, f"limits.{name} of at least 1, or nil", value)
    size = model.hidden_size
    told = protocol < (1, 7) if size is None else size >= 1
    require(told, "model.hidden_size of at least 1, since 1.7", size)
    numerics = model.numerics_fingerprint
    ok = numerics is None or re.fullmatch("[0-9a-f]{32}", numerics) is not None
    require(ok, "model.numerics_fingerprint of 32 hex digits, or nil", numerics)
    names = [file.name for file in model.files]
    require(len(set(names)) == len(names), "each file once", names)
    for file in model.files:
        require(0 <= file.num_bytes <= MAX_FILE_BYTES, "num_bytes of 0 to 2^26", file)
        require(re.fullmatch("[0-9a-f]{64}", file.sha256) is not None, "a sha256 in hex", file)


@ENGINE_RULES.add("6. Versions and capabilities")
def lower_minor_is_spoken(engine: EngineUnderTest) -> None:
    """A client of an older minor version is answered in that version."""
    for minor in range(engine.session().welcome.protocol[1]):
        welcome = engine.peer().hello(1, minor)
        require(welcome.protocol == (1, minor), f"protocol (1, {minor})", welcome.protocol)


@ENGINE_RULES.add("6. Versions and capabilities")
def higher_minor_is_answered_in_the_engines_own(engine: EngineUnderTest) -> None:
    """A client of a newer minor version is answered in the engine's, and served."""
    own = engine.peer().hello(1, 1_000_000).protocol
    for minor in (own[1] + 1, 255, 2**31):
        peer = engine.peer()
        welcome = peer.hello(1, minor)
        require(welcome.protocol == own, f"protocol {own} for a client of 1.{minor}", welcome)
        peer.still_streams()
    require(own[1] < 1_000_000, "the engine's own version", own)


@ENGINE_RULES.add("REFUSED")
def other_major_is_refused(engine: EngineUnderTest) -> None:
    """Another major version gets REFUSED with those that are welcome; then HELLO can be said."""
    for major in (0, 2, 255):
        peer = engine.peer()
        peer.send(Op.HELLO, {"protocol": [major, 0]})
        refused = peer.expect(Refused, f"for a client of {major}.0")
        welcome_ones = [version for version in refused.supported if version[0] != major]
        require(bool(welcome_ones), "supported versions of another major", refused.supported)
        peer.send(Op.PING, {})
        peer.refused("no_session")
        peer.hello()
        peer.still_streams()


@ENGINE_RULES.add("5. Session")
def second_hello_leaves_the_session_intact(engine: EngineUnderTest) -> None:
    """HELLO in an open session is a protocol_error, and its requests run on."""
    peer = engine.session()
    stream = peer.submit("a", max_tokens=longest(peer))
    peer.send(Op.HELLO, {"protocol": [1, 0]})
    peer.refused("protocol_error")
    runs_on(peer, stream)
    peer.still_streams()


@ENGINE_RULES.add("5. Session")
def nothing_counts_before_hello(engine: EngineUnderTest) -> None:
    """Before HELLO everything but BYE is answered with no_session, or as what is no message."""
    peer = engine.peer()
    for vector in load_vectors("client"):
        if vector.before_hello and vector.error:
            peer.send_frames(vector.data)
            peer.refused(vector.error, vector.request_id)
    for vector in load_vectors("client"):
        if vector.before_hello and vector.ignored:
            peer.send_frames(vector.data)
    peer.hello()
    peer.still_streams()


@ENGINE_RULES.add("5. Session")
def nothing_counts_after_bye(engine: EngineUnderTest) -> None:
    """After BYE it is as before HELLO, and a new HELLO opens a new session."""
    peer = engine.session()
    first = peer.welcome.session
    peer.bye()
    for op, body in (
        (Op.SUBMIT, submit_body("a")),
        (Op.PING, {"nonce": 1}),
        (Op.CONTROL, {"call_id": 1, "operation": "stats"}),
    ):
        peer.send(op, body)
        peer.refused("no_session")
    again = peer.hello()
    require(again.session != first, "another session id", again.session)
    peer.still_streams()


@ENGINE_RULES.add("5. Session")
def instance_names_the_engines_run(engine: EngineUnderTest) -> None:
    """All sessions see one engine_instance, and each its own session id."""
    one, two = engine.session().welcome, engine.session().welcome
    same = one.engine_instance == two.engine_instance
    require(same, f"engine_instance {one.engine_instance!r}", two.engine_instance)
    require(one.session != two.session, "another session id", two.session)


@ENGINE_RULES.add("5. Session")
def engine_asks_for_signs_of_life(engine: EngineUnderTest) -> None:
    """The engine sends PING to a session that is silent."""
    peer = engine.session()
    peer.wait_for_ping()
    peer.wait_for_ping()


@ENGINE_RULES.add("5. Session")
def sessions_do_not_see_each_other(engine: EngineUnderTest) -> None:
    """Two sessions may use one request_id; outputs and ABORT stay within a session."""
    one, two = engine.session(), engine.session()
    mine = one.submit("a", max_tokens=64)
    theirs = two.submit("a", [3, 2, 1], max_tokens=longest(two))
    two.send(Op.ABORT, {"request_ids": ["a"]})
    two.finish(theirs)
    require(theirs.finish_reason == "abort", "the session's own request aborted", theirs)
    one.finish(mine)
    got = (mine.finish_reason, len(mine.token_ids))
    require(got == ("length", 64), "the other session's request to end with 64 tokens", mine)
    two.quiet()  # what was sent to it by mistake is here by now
    one.quiet()


@ENGINE_RULES.add("ABORT")
def foreign_requests_cannot_be_aborted(engine: EngineUnderTest) -> None:
    """An ABORT that names another session's request does nothing."""
    owner, stranger = engine.session(), engine.session()
    stream = owner.submit("mine", max_tokens=longest(owner))
    stranger.send(Op.ABORT, {"request_ids": ["mine"]})
    stranger.quiet()
    runs_on(owner, stream)


@ENGINE_RULES.add("BYE")
def bye_aborts_the_sessions_requests(engine: EngineUnderTest) -> None:
    """BYE ends the session's requests; nothing of them reaches its successor."""
    peer, watcher = engine.session(), engine.session()
    before = engine.until_idle(watcher).num_aborts
    for i in range(3):
        peer.submit(f"long-{i}", max_tokens=longest(peer))
    peer.bye()
    # What was on its way before BYE may still come; what comes after WELCOME is judged.
    peer.send(Op.HELLO, {"protocol": [1, 0]})
    while not isinstance(message := peer.receive("WELCOME"), Welcome):
        require(not isinstance(message, Accepted), "WELCOME", message)
    after = engine.until_idle(watcher).num_aborts
    peer.quiet()
    require(after >= before + 3, f"num_aborts of at least {before + 3}", after)
