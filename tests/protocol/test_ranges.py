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
from nanocore.engine_core.grammars.grammar_compiler import NoGrammars
from nanocore.engine_core.io.admission import Admission
from nanocore.engine_core.io.limits import QueueLimit
from nanocore.engine_core.log.event_log import SchedulerCounters
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
MAX_INT32 = 2**31 - 1
BEYOND_THE_MODEL: dict[str, tuple[int, type[InvalidRequestError]]] = {
    "max_tokens": (MAX_INT32, ContextLengthError),
    "min_tokens": (MAX_INT32, ContextLengthError),
    "logprobs": (MAX_INT32, InvalidRequestError),
    "prompt_logprobs": (MAX_INT32, InvalidRequestError),
}
"""Right by its range, and refused for another reason: the model's length or vocabulary."""


def items(limits: dict[str, Any], num: int) -> list[object]:
    """So many, of what the list is to hold: token ids, pairs of one and a number, or lists."""
    item = limits["items"]
    if "prefixItems" in item:
        return [[i, 0.5] for i in range(num)]
    return [[1, 2] if item["type"] == "array" else 0 for _ in range(num)]


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
        yield items(limits, limits["maxItems"]), True
        yield items(limits, limits["maxItems"] + 1), False
        if "minItems" in limits:
            yield items(limits, limits["minItems"]), True
            yield items(limits, limits["minItems"] - 1), False
    if limits.get("column"):
        yield pack_int32([1]), True
        yield b"", not limits.get("minItems")
        yield b"\1\0\0", False


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
        config = EngineConfig(scheduling_policy="priority", max_logprobs=-1)
        card = msgspec.structs.replace(MODEL_CARD, vocab_size=2000)
        Admission(
            card, config, QueueLimit(8, 10_000, SchedulerCounters()), NoGrammars("none")
        ).build(decoded, handle=1, client=1)


@pytest.mark.parametrize(("message", "part", "name", "value", "allowed"), list(cases()))
def test_a_bound_is_where_the_schema_says(
    message: type[Message], part: str | None, name: str, value: object, allowed: bool
) -> None:
    valid = VALID[message]
    sent = frames(valid, **({part: {name: value}} if part else {name: value}))
    beyond, error = BEYOND_THE_MODEL.get(name, (None, None))
    if error is not None and value == beyond:
        with pytest.raises(error, match=name):
            take(sent)
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
