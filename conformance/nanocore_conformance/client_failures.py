"""Scenarios for clients that do not go well: each must end in exit code 1 and a line on stderr."""

from __future__ import annotations

import time

from nanocore.protocol.messages import Op
from nanocore_conformance.client_streams import FIRST, TOKENS
from nanocore_conformance.client_under_test import CLIENT_SCENARIOS, ClientUnderTest
from nanocore_conformance.played_engine import WELCOME, Body, PlayedEngine, end
from nanocore_conformance.report import BrokenError, require
from nanocore_conformance.vectors import Vector, load_vectors

SAMPLE_EVERY = 20
"""Share of the malformed vectors that are tried; each starts the client's process."""
EARLY = 0.5
"""Giving up within this share of the silence that means death is too early."""


@CLIENT_SCENARIOS.add("REFUSED")
def refusal_ends_the_client(tested: ClientUnderTest) -> None:
    """REFUSED instead of WELCOME, for its version or because the engine is full: its words."""
    full = {"message": "100 clients are served", "supported": [[1, 4]], "retry_after_s": 1}
    for refused in ({"message": "too old for me", "supported": [[2, 0]]}, full):
        with tested.client() as client:
            client.hello()
            client.send(Op.REFUSED, refused)
            client.gives_up(str(refused["message"]))


@CLIENT_SCENARIOS.add("16. Writing a client")
def another_major_in_welcome_ends_the_client(tested: ClientUnderTest) -> None:
    """A WELCOME that claims to speak another major version."""
    with tested.client() as client:
        client.hello()
        client.send(Op.WELCOME, WELCOME | {"protocol": [2, 0]})
        client.gives_up()


@CLIENT_SCENARIOS.add("ERROR")
def refused_request_ends_the_client(tested: ClientUnderTest) -> None:
    """ERROR for the SUBMIT: its code or its message is said, with each code that it may have."""
    errors: list[Body] = [
        {"code": "invalid_request", "message": "the engine says why"},
        {"code": "context_length_exceeded", "message": "the engine says why"},
        {"code": "overloaded", "message": "the engine says why", "retry_after_s": 2.5},
        {"code": "overloaded", "message": "the engine says why", "retry_after_s": 3},
        {"code": "out_of_tea", "message": "the engine says why", "new_in_9": 1},
    ]
    for error in errors:
        with tested.client() as client:
            client.hello()
            client.send(Op.WELCOME, WELCOME)
            request_id = client.submit(4).request_id
            client.send(Op.ERROR, error | {"request_id": request_id})
            client.gives_up(error["code"], error["message"])


@CLIENT_SCENARIOS.add("Structured outputs")
def place_in_a_schema_is_said(tested: ClientUnderTest) -> None:
    """The message of an ERROR that names a place is shown, whatever is shown of its code."""
    place = "structured_outputs.json: no type 'integr' at /properties/age/type"
    with tested.client() as client:
        client.hello()
        client.send(Op.WELCOME, WELCOME)
        request_id = client.submit(4).request_id
        error = {"code": "invalid_request", "message": place, "request_id": request_id}
        client.send(Op.ERROR, error)
        client.gives_up(place)


@CLIENT_SCENARIOS.add("12. Errors")
def dead_engine_ends_the_client(tested: ClientUnderTest) -> None:
    """ERROR engine_dead or no_session in mid-stream."""
    for code in ("engine_dead", "no_session"):
        with tested.client() as client:
            client.open(4)
            client.output(TOKENS[:1], FIRST)
            client.send(Op.ERROR, {"code": code, "message": "the engine says why"})
            client.gives_up(code, "the engine says why")


@CLIENT_SCENARIOS.add("BYE")
def engines_bye_ends_the_client(tested: ClientUnderTest) -> None:
    """BYE in mid-stream, and before ACCEPTED."""
    with tested.client() as client:
        client.open(4)
        client.output(TOKENS[:2], FIRST)
        client.send(Op.BYE, {"reason": "SIGTERM"})
        client.gives_up()
    with tested.client() as client:
        client.hello()
        client.send(Op.WELCOME, WELCOME)
        client.submit(4)
        client.send(Op.BYE, {})
        client.gives_up()


def _sample(tested: ClientUnderTest, vectors: list[Vector]) -> list[Vector]:
    if tested.thorough:
        return vectors
    return vectors[::SAMPLE_EVERY]


def _refuse(client: PlayedEngine, vector: Vector) -> None:
    client.send_frames(vector.data)
    try:
        client.gives_up()
    except BrokenError as error:
        raise BrokenError(f"{error.expected}, for vector {vector.name}", error.got) from None


@CLIENT_SCENARIOS.add("4. Framing")
def malformed_messages_end_the_session(tested: ClientUnderTest) -> None:
    """A malformed vector in mid-stream (all of them with --slow, otherwise a sample)."""
    malformed = [v for v in load_vectors("engine") if v.error and not v.strict]
    for vector in _sample(tested, malformed):
        with tested.client() as client:
            client.open(4)
            client.output(TOKENS[:1], FIRST)
            _refuse(client, vector)


@CLIENT_SCENARIOS.add("WELCOME")
def malformed_welcome_opens_no_session(tested: ClientUnderTest) -> None:
    """A malformed WELCOME in place of the right one."""
    names = (
        "engine-welcome-without-protocol",
        "engine-welcome-protocol-is-str",
        "engine-welcome-body-is-array",
        "engine-welcome-body-cut-in-the-middle",
    )
    for vector in load_vectors("engine"):
        if vector.name in names:
            with tested.client() as client:
                client.hello()
                _refuse(client, vector)


@CLIENT_SCENARIOS.add("5. Session", slow=True)
def silence_is_death(tested: ClientUnderTest) -> None:
    """An engine that says nothing at all for 10 s is taken for dead, and not much earlier."""
    with tested.client() as client:
        client.open(4)
        client.output(TOKENS[:1], FIRST)
        client.prints(str(TOKENS[0]))
        start_s = time.monotonic()
        client.gives_up(timeout_s=tested.silence_s)
        silence_s = time.monotonic() - start_s
        least_s = EARLY * tested.silence_s
        require(silence_s >= least_s, f"patience of {least_s:g} s", f"{silence_s:.1f} s")


@CLIENT_SCENARIOS.add("5. Session", slow=True)
def pings_are_signs_of_life(tested: ClientUnderTest) -> None:
    """A request without tokens for longer than that goes on while there are PINGs."""
    with tested.client() as client:
        client.open(4)
        client.output(TOKENS[:1], FIRST)
        end_s = time.monotonic() + 1.5 * tested.silence_s
        while time.monotonic() < end_s:
            client.ping_and_wait(tested.silence_s / 10)
        client.output(TOKENS[1:], end())
        client.leaves(TOKENS, "length")
