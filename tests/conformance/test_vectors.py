"""The committed vectors: up to date, complete, and what our own decoders make of them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import msgspec
import pytest

from nanocore.protocol.codec import (
    InvalidSubmitError,
    MessageDecoder,
    abort_handles,
    client_decoder,
    encode,
    engine_decoder,
    unpack_logprobs,
    unpack_output,
)
from nanocore.protocol.errors import ErrorCode, ProtocolError
from nanocore.protocol.messages import (
    FROM_CLIENT,
    FROM_ENGINE,
    Abort,
    Message,
    Output,
    Submit,
    TokenLogprobs,
)
from nanocore_conformance.vectors import Vector, load_vectors
from tests.protocol_files.__main__ import SCHEMA
from tests.protocol_files.make_vectors import VECTORS, text

ENGINES, CLIENTS = load_vectors("client"), load_vectors("engine")
"""What engines receive, and what clients do."""
ENGINE_DECODER, CLIENT_DECODER = engine_decoder(), client_decoder()


def decoder_of(vector: Vector) -> MessageDecoder:
    return ENGINE_DECODER if vector.sender == "client" else CLIENT_DECODER


def unpack(output: Output) -> None:
    """Read all of its columns."""
    unpack_output(output)
    for columns in (output.logprobs, output.prompt_logprobs):
        unpack_logprobs(columns or TokenLogprobs())


def refusal(vector: Vector) -> tuple[str, str | None] | None:
    """(code, request_id) that our decoders answer, or None."""
    try:
        message = decoder_of(vector).decode(vector.data)
        if isinstance(message, Output):
            unpack(message)
        elif isinstance(message, Abort):
            abort_handles(message)
    except InvalidSubmitError as error:
        return "invalid_request", error.request_id
    except ProtocolError as error:
        return error.code, None
    return None


def with_hex(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {key: with_hex(inner) for key, inner in value.items()}
    return [with_hex(inner) for inner in value] if isinstance(value, list) else value


def contains(whole: Any, part: Any) -> bool:
    """Whether everything that is said in `part` is said in `whole`, too."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(
            contains(whole.get(key), inner) for key, inner in part.items()
        )
    if isinstance(part, list):
        return len(part) == len(whole) and all(map(contains, whole, part))
    return bool(whole == part)


def fields_of(value: Any) -> Any:
    """A message as plain values, those that have their default included."""
    if isinstance(value, msgspec.Struct):
        return {name: fields_of(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, (list, tuple)):
        return [fields_of(inner) for inner in value]
    return with_hex(value)


def test_the_file_is_what_the_script_writes() -> None:
    assert VECTORS.read_text() == text(), "run: python -m tests.protocol_files"


def test_every_vector_says_one_thing_that_its_receiver_must_do() -> None:
    for vector in (*ENGINES, *CLIENTS):
        kinds = [vector.message is not None, vector.error is not None, vector.ignored]
        assert kinds.count(True) == 1, vector.name


@pytest.mark.parametrize(
    ("vectors", "types"), [(ENGINES, FROM_CLIENT), (CLIENTS, FROM_ENGINE)], ids=["client", "engine"]
)
def test_every_message_has_valid_and_malformed_vectors(
    vectors: list[Vector], types: tuple[type[Message], ...]
) -> None:
    ops = {bytes([message.op]).hex() for message in types}
    assert {vector.frames[0] for vector in vectors if vector.message is not None} == ops
    assert {vector.frames[0] for vector in vectors if vector.error is not None} > ops


def test_every_field_is_tried_with_a_value_and_with_wrong_ones() -> None:
    for vectors, types in ((ENGINES, FROM_CLIENT), (CLIENTS, FROM_ENGINE)):
        for message in types:
            op, name = bytes([message.op]).hex(), message.op.name.lower()
            tried = {
                field for v in vectors if v.message and v.frames[0] == op for field in v.message
            }
            assert tried == set(message.__struct_fields__)
            for field in message.__struct_fields__:
                prefix = f"{vectors[0].sender}-{name}-{field.replace('_', '-')}-is-"
                assert [v for v in vectors if v.name.startswith(prefix)], prefix


def test_every_error_code_that_one_message_can_cause_is_there() -> None:
    codes = {vector.error for vector in ENGINES if vector.error}
    state = {"duplicate_request_id", "overloaded", "draining", "engine_dead"}
    assert codes == set(ErrorCode.__args__) - state
    sent = {
        vector.message["code"] for vector in CLIENTS if vector.message and "13" in vector.frames
    }
    assert sent > set(ErrorCode.__args__)


def test_valid_messages_are_decoded_to_what_they_say() -> None:
    for vector in (*ENGINES, *CLIENTS):
        if vector.message is not None:
            message = decoder_of(vector).decode(vector.data)
            if isinstance(message, Output):
                unpack(message)
            assert contains(fields_of(message), vector.message), vector.name


def test_canonical_frames_are_what_our_encoder_writes() -> None:
    """Except that ours leaves defaults out, or, in the model card and limits, writes them all."""
    canonical = [vector for vector in (*ENGINES, *CLIENTS) if vector.canonical]
    same = [v for v in canonical if encode(decoder_of(v).decode(v.data)) == v.data]
    others = {vector.name for vector in canonical if vector not in same}
    assert len(same) > 100
    for name in others:
        vector = next(v for v in canonical if v.name == name)
        again = decoder_of(vector).decode(encode(decoder_of(vector).decode(vector.data)))
        assert again == decoder_of(vector).decode(vector.data), name


def test_malformed_messages_of_engines_are_refused() -> None:
    for vector in CLIENTS:
        if vector.error is not None:
            assert vector.error == "protocol_error", vector.name
            assert refusal(vector) is not None, vector.name


def test_malformed_messages_of_clients_are_refused_with_their_code_or_left_to_admission() -> None:
    """What needs the model or the session is no matter of decoding; the engine's tests see it."""
    for vector in ENGINES:
        if vector.error is None:
            assert refusal(vector) is None, vector.name
            continue
        found = refusal(vector)
        if found is not None:
            assert found == (vector.error, vector.request_id), vector.name
        else:
            message = decoder_of(vector).decode(vector.data)
            stateful = vector.error == "no_session" or "open-session" in vector.name
            assert isinstance(message, Submit) or stateful, vector.name


def test_the_schema_describes_every_valid_message() -> None:
    schema = json.loads(SCHEMA.read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    bodies = {int(row["op"], 16): row["body"]["$ref"] for row in schema["operations"]}
    validators = {
        op: jsonschema.Draft202012Validator(schema | {"$ref": body}) for op, body in bodies.items()
    }
    unlike = {
        vector.name
        for vector in (*ENGINES, *CLIENTS)
        if vector.message is not None and not validators[vector.data[0][0]].is_valid(vector.message)
    }
    # What a later version may say: it is taken, or answered, and not in this version's schema.
    assert unlike == {
        "client-control-unknown-operation",
        "client-control-empty-operation",
        "engine-error-of-a-later-version",
        "engine-reply-steps-phase-of-a-later-version",
        "engine-welcome-file-of-a-later-version",
    }
