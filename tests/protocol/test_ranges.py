"""The ranges that the schema and PROTOCOL.md state are those that the engine obeys.

Each bound of each field that a client sends is tried on both sides: what the schema allows is
accepted, and what lies just beyond it is refused by the decoder or by admission.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.io.admission import Admission
from nanocore.engine_core.io.queue_limit import QueueLimit
from nanocore.engine_core.scheduling.scheduler import SchedulerCounters
from nanocore.protocol.codec import abort_handles, engine_decoder, pack_int32
from nanocore.protocol.errors import ContextLengthError, InvalidRequestError, ProtocolError
from nanocore.protocol.messages import (
    FROM_CLIENT,
    Abort,
    Control,
    Hello,
    Message,
    Ping,
    Pong,
    Submit,
)
from nanocore.protocol.sampling import EngineSamplingParams
from tests.protocol.samples import MODEL_CARD, frames
from tests.protocol_files.tables import keywords, schema_of

VALID: dict[type[Message], Message] = {
    Submit: Submit(request_id="r", prompt_token_ids=pack_int32([1])),
    Abort: Abort(request_ids=[]),
    Control: Control(call_id=1, operation="stats"),
    Hello: Hello(protocol=(1, 0)),
    Ping: Ping(),
    Pong: Pong(),
}
BEYOND_THE_MODEL = {"max_tokens": 2**31 - 1}
"""Right by its range, and refused for another reason: it exceeds the model's length."""
LIMITED_BY_THE_ENGINE = {"logprobs", "prompt_logprobs"}
"""The ends of these ranges are right for engines without max_logprobs; this one may refuse them."""
CARD = msgspec.structs.replace(MODEL_CARD, vocab_size=2**16)


def bounds(schema: dict[str, Any]) -> Iterator[tuple[object, bool]]:
    """(value, whether it is allowed) on both sides of each bound of a field."""
    limits = keywords(schema)
    step = 1 if limits.get("type") == "integer" else 1e-9
    for key, sign in (("minimum", -1), ("maximum", 1)):
        if key in limits:
            yield limits[key], True
            yield limits[key] + sign * step, False
    if "exclusiveMinimum" in limits:
        yield limits["exclusiveMinimum"], False
        yield limits["exclusiveMinimum"] + step, True
    if "minLength" in limits:
        yield "x" * limits["minLength"], True
        yield "x" * limits["maxLength"], True
        yield "x" * (limits["minLength"] - 1), False
        yield "x" * (limits["maxLength"] + 1), False
    if "maxItems" in limits and "prefixItems" not in limits:
        most = [_item(limits["items"], i) for i in range(limits["maxItems"] + 1)]
        least = limits.get("minItems", 0)
        yield most[:-1], True
        yield most, False
        yield most[:least], True
        if least:
            yield most[: least - 1], False
    if limits.get("column"):
        yield pack_int32([1]), True
        yield b"", not limits.get("minItems")
        yield b"\1\0\0", False


def _item(schema: dict[str, Any], i: int) -> object:
    """The i-th of a list, unlike the others if it has an id."""
    if "prefixItems" in schema:
        return [i, 0.5]
    return [0] if schema["type"] == "array" else 0


def cases() -> Iterator[Any]:
    for message, part in [(m, None) for m in FROM_CLIENT] + [(Submit, "sampling")]:
        struct = EngineSamplingParams if part else message
        for name, schema in schema_of(struct)["properties"].items():
            for value, allowed in bounds(schema):
                shown = repr(value)[:24]
                mark = f"{message.__name__}-{name}-{shown}-{'right' if allowed else 'wrong'}"
                yield pytest.param(message, part, name, value, allowed, id=mark)


def take(message: list[bytes]) -> None:
    """What an engine does with a message: decode it, and admit it if it is a request."""
    decoded = engine_decoder().decode(message)
    if isinstance(decoded, Abort):
        abort_handles(decoded)
    if isinstance(decoded, Submit):
        config = EngineConfig(scheduling_policy="priority")
        Admission(CARD, config, QueueLimit(1000, 10_000, SchedulerCounters())).build(
            decoded, handle=1, client=1
        )


@pytest.mark.parametrize(("message", "part", "name", "value", "allowed"), list(cases()))
def test_a_bound_is_where_the_schema_says(
    message: type[Message], part: str | None, name: str, value: object, allowed: bool
) -> None:
    valid = VALID[message]
    sent = frames(valid, **({part: {name: value}} if part else {name: value}))
    if BEYOND_THE_MODEL.get(name) == value:
        with pytest.raises(ContextLengthError):
            take(sent)
    elif allowed and name in LIMITED_BY_THE_ENGINE:
        engine_decoder().decode(sent)
    elif allowed:
        take(sent)
    else:
        with pytest.raises((InvalidRequestError, ProtocolError), match=name):
            take(sent)


def test_bounds_are_found_for_every_message_that_has_some() -> None:
    """Guards against a schema keyword that `bounds` does not know."""
    tried = {(case.values[0], case.values[2]) for case in cases()}
    assert {(Submit, "top_p"), (Submit, "request_id"), (Submit, "allowed_token_ids")} <= tried
    assert {(Control, "call_id"), (Control, "offset"), (Ping, "nonce")} <= tried
    assert len(tried) >= 22


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_float_of_a_request_may_be_infinite_or_nan(name: str, value: float) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        take(frames(VALID[Submit], sampling={name: value}))


def test_an_int_is_taken_where_a_float_is_expected() -> None:
    submit = engine_decoder().decode(frames(VALID[Submit], sampling={"temperature": 0}))
    assert isinstance(submit, Submit)
    assert submit.sampling == msgspec.structs.replace(EngineSamplingParams(), temperature=0.0)
