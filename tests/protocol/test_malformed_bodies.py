"""Bodies that are no message: whatever the bytes, the answer is a typed error with a code."""

from __future__ import annotations

import json
import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanocore.protocol.codec import (
    MAX_SUBMIT_BYTES,
    InvalidSubmitError,
    client_decoder,
    encode,
    engine_decoder,
)
from nanocore.protocol.errors import ProtocolError
from nanocore.protocol.fields import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS_TOKENS,
    MAX_CACHE_SALT_CHARS,
    MAX_CHOICES,
    MAX_INT32,
    MAX_LOGIT_BIASES,
    MAX_REQUEST_ID_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STRUCTURED_OUTPUTS_BYTES,
)
from nanocore.protocol.messages import Bye, Message, Op, Ping, Pong, Submit
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.protocol.structured_outputs import StructuredOutputs
from tests.campaign import examples
from tests.protocol.samples import (
    CLIENT_MESSAGES,
    ENGINE_MESSAGES,
    SUBMIT,
    body_of,
    directions,
    frames,
)

FUZZ = settings(max_examples=examples(100), deadline=None, derandomize=True)
ALL_OPS = st.sampled_from(sorted(Op))
SAMPLES = [*CLIENT_MESSAGES, *ENGINE_MESSAGES]


def _label(value: object) -> str:
    return type(value).__name__


def _refuse_everywhere(body: bytes) -> None:
    """Assert that every op of either direction refuses this body."""
    for decoder, accepted, _ in directions():
        for message_type in accepted:
            with pytest.raises(ProtocolError) as caught:
                decoder.decode([bytes([message_type.op]), body])
            assert message_type.op.name in str(caught.value)
            assert caught.value.code == "protocol_error"


def test_deep_nesting_inside_an_unknown_field_is_refused() -> None:
    body = b"\x82\xa5nonce\x01\xa3new" + b"\x91" * 100_000
    with pytest.raises(ProtocolError, match="PONG: the body is nested too deeply"):
        client_decoder().decode([b"\x21", body])


@pytest.mark.parametrize("head", [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\x81\xa5nonce\xdb"])
def test_a_length_bomb_is_refused_without_allocating_it(head: bytes) -> None:
    tracemalloc.start()
    try:
        _refuse_everywhere(head + b"\xff\xff\xff\xff")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2**20


EITHER_WAY = (Ping, Pong, Bye)
"""Sent by both sides, and so as tolerant as what an engine sends."""


@pytest.mark.parametrize("message", {type(m): m for m in CLIENT_MESSAGES}.values(), ids=_label)
def test_an_unknown_field_that_only_a_client_could_send_is_named(message: Message) -> None:
    bad = frames(message, temprature=0.5)
    if isinstance(message, EITHER_WAY):
        assert engine_decoder().decode(bad) == message
        return
    with pytest.raises((ProtocolError, InvalidSubmitError), match="`temprature`"):
        engine_decoder().decode(bad)


def test_unknown_fields_inside_an_engines_structs_are_ignored() -> None:
    decoder, _, samples = directions()[1]
    welcome = samples[0]
    body = body_of(welcome)
    recommended = {"default_sampling": {"new": 0.5}}
    model, limits = body["model"] | {"new": 1} | recommended, body["limits"] | {"new": "x"}
    assert decoder.decode(frames(welcome, model=model, limits=limits)) == welcome


def test_of_duplicate_fields_the_last_wins() -> None:
    for decoder, _, _ in directions():
        body = b"\x82\xa5nonce\x01\xa5nonce\x02"
        assert decoder.decode([b"\x20", body]) == Ping(nonce=2)


@pytest.mark.parametrize("op", [Op.HELLO, Op.SUBMIT, Op.CONTROL])
def test_a_body_of_json_is_called_that(op: Op) -> None:
    body = json.dumps(body_of(next(m for m in CLIENT_MESSAGES if m.op == op)), default=str)
    with pytest.raises(
        ProtocolError, match=r"begins with '\{': JSON\? bodies are msgpack"
    ) as caught:
        engine_decoder().decode([bytes([op]), body.encode()])
    assert caught.value.code == "protocol_error"


def test_the_empty_frame_of_a_req_socket_is_explained() -> None:
    with pytest.raises(ProtocolError, match="use DEALER"):
        engine_decoder().decode([b"", *encode(Ping())])


WRONG_VALUES = {"map": {}, "array": [1], "bin": b"x", "str": "x", "float": 1.5, "bool": True,
                "nil": None, "int": 1, "ext": msgspec.msgpack.Ext(5, b"x")}  # fmt: skip
FOREIGN_WORDS = ("object", "bytes", "null", "None", "True", "dict", "list", "Error", "datetime")


@pytest.mark.parametrize("kind", WRONG_VALUES)
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("prompt_token_ids", "bin"),
        ("sampling", "map"),
        ("sampling.top_p", "float"),
        ("sampling.ignore_eos", "bool"),
        ("sampling.stop_token_ids", "array"),
        ("sampling.max_tokens", "int"),
        ("cache_salt", "str"),
    ],
)
def test_a_wrong_type_is_told_in_the_words_of_msgpack(path: str, expected: str, kind: str) -> None:
    value, outer = WRONG_VALUES[kind], path.split(".")[0]
    changes = {outer: {path.split(".")[1]: value} if "." in path else value}
    try:
        engine_decoder().decode(frames(SUBMIT, **changes))
    except InvalidSubmitError as error:
        text = str(error)
    else:
        assert kind in (expected, "nil", "int" if expected == "float" else "")
        return
    if kind != expected:  # else it is what is inside that is wrong
        assert f"`{expected}" in text
        assert f"got `{kind}` - at `$.{path}`" in text
    assert not [word for word in FOREIGN_WORDS if word in text]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"protocol": [1, 0], "object": 1}, "the map has the unknown field `object`"),
        ({"client": "null"}, "the map lacks the required field `protocol`"),
        ({"protocol": [1]}, "Expected `array` of length 2, got 1"),
        ({"protocol": None}, "Expected `array`, got `nil`"),
    ],
)
def test_fields_keep_their_names_whatever_they_are_called(
    body: dict[str, object], words: str
) -> None:
    with pytest.raises(ProtocolError) as caught:
        engine_decoder().decode([b"\x01", msgspec.msgpack.encode(body)])
    assert words in str(caught.value)


def _decode_or_refuse(frames: list[bytes]) -> None:
    """Both sides must make a message of it or refuse it; any other exception fails the test."""
    for decoder, accepted, _ in directions():
        try:
            message = decoder.decode(frames)
        except (ProtocolError, InvalidSubmitError):
            continue
        assert isinstance(message, accepted)


@FUZZ
@given(ALL_OPS, st.binary(max_size=64))
def test_random_bodies_are_messages_or_refused(op: Op, body: bytes) -> None:
    _decode_or_refuse([bytes([op]), body])


@FUZZ
@given(st.sampled_from(SAMPLES), st.data())
def test_mutated_messages_are_messages_or_refused(message: Message, data: st.DataObject) -> None:
    op, body = encode(message)
    mutated = bytearray(body)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mutated)))
        mutated[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    _decode_or_refuse([op, bytes(mutated)])


def _submit_with(name: bytes, value: bytes, num_times: int, prompt: bytes = b"") -> bytes:
    """A SUBMIT whose field `name` occurs again and again."""
    head = b"\xdf" + (num_times + 2).to_bytes(4, "big") + b"\xaarequest_id\xa1r"
    column = b"\xb0prompt_token_ids\xc6" + len(prompt).to_bytes(4, "big") + prompt
    return head + column + (bytes([0xA0 | len(name)]) + name + value) * num_times


def test_a_submit_that_repeats_a_field_endlessly_is_refused_before_it_is_decoded() -> None:
    body = _submit_with(b"sampling", b"\x80", 2000)
    with pytest.raises(InvalidSubmitError, match="2002 fields: the known ones are ") as caught:
        engine_decoder().decode([b"\x10", body])
    assert caught.value.request_id == "r"


def test_a_submit_that_repeats_parameters_endlessly_is_refused_before_it_is_decoded() -> None:
    sampling = b"\xde\xc3\x50" + b"\xa5top_k\x00" * 50_000
    body = _submit_with(b"sampling", sampling, 1)
    with pytest.raises(InvalidSubmitError, match=r"3500.. bytes beside its tokens") as caught:
        engine_decoder().decode([b"\x10", body])
    assert caught.value.request_id == "r"


CHOICES = ["x" * (MAX_STRUCTURED_OUTPUTS_BYTES // MAX_CHOICES)] * MAX_CHOICES
"""What takes the most bytes on the wire: every text has a head."""


def test_the_largest_request_needs_half_of_what_a_submit_may_have_beside_its_prompt() -> None:
    ids = list(range(MAX_INT32 - 1024, MAX_INT32))
    values: dict[type, object] = {bool: True, int: 2**40, float: 1.1}
    sampling = {
        field.name: values.get(type(field.default), 2**40)
        for field in msgspec.structs.fields(EngineSamplingParams)
    } | {
        "stop_token_ids": ids[:MAX_STOP_TOKEN_IDS],
        "allowed_token_ids": ids[:MAX_ALLOWED_TOKEN_IDS],
        "logit_bias": [[token_id, 1.1] for token_id in ids[:MAX_LOGIT_BIASES]],
        "bad_words_token_ids": [ids[i : i + 4] for i in range(0, MAX_BAD_WORDS_TOKENS, 4)],
        "structured_outputs": {"choice": CHOICES},
    }
    body = msgspec.msgpack.encode(
        {
            "request_id": "\U0001f4a9" * MAX_REQUEST_ID_CHARS,
            "prompt_token_ids": b"",
            "sampling": sampling,
            "priority": -(2**31),
            "cache_salt": "\U0001f4a9" * MAX_CACHE_SALT_CHARS,
        }
    )
    assert 0.95 * MAX_SUBMIT_BYTES < 2 * len(body) <= 1.1 * MAX_SUBMIT_BYTES


@pytest.mark.parametrize(
    ("op", "body", "message"),
    [
        (
            Op.SUBMIT,
            {"sampling": {"top_n": 1}},
            "`top_n` - at `$.sampling` - did you mean `top_p` or `top_k`?",
        ),
        (Op.SUBMIT, {"sampling": {"max_token": 1}}, "did you mean `max_tokens`?"),
        (Op.SUBMIT, {"sampling": {"logprob": 1}}, "did you mean `logprobs`?"),
        (Op.SUBMIT, {"sampling": {"bad_words": []}}, "did you mean `bad_words_token_ids`?"),
        (Op.SUBMIT, {"n": 2}, "the unknown field `n` - it belongs into `sampling`"),
        (Op.SUBMIT, {"prompt_tokens_ids": b""}, "did you mean `prompt_token_ids`?"),
        (Op.SUBMIT, {"Sampling": {}}, "`Sampling` - did you mean `sampling`?"),
        (Op.SUBMIT, {"sampling": {"stop": []}}, "did you mean `stop_token_ids`?"),
        (Op.SUBMIT, {"sampling": {"max_token" * 9: 1}}, "` - at `$.sampling`"),
        (Op.SUBMIT, {"sampling": {"n\n`": 1}}, "` - at `$.sampling`"),
        (Op.CONTROL, {"caller": 1}, "CONTROL: the map has the unknown field `caller`"),
        (Op.CONTROL, {"operations": 1}, "`operations` - did you mean `operation`?"),
        (Op.ABORT, {"request_id": []}, "`request_id` - did you mean `request_ids`?"),
        (Op.ABORT, {"handle": b""}, "`handle` - did you mean `handles`?"),
        (Op.HELLO, {"protocoll": [1, 5]}, "`protocoll` - did you mean `protocol`?"),
    ],
)
def test_an_unknown_fields_error_names_the_one_that_may_have_been_meant(
    op: Op, body: dict[str, object], message: str
) -> None:
    required: dict[Op, dict[str, object]] = {
        Op.SUBMIT: {"request_id": "r", "prompt_token_ids": b"\1\0\0\0"},
        Op.CONTROL: {"call_id": 1, "operation": "stats"},
        Op.ABORT: {"request_ids": []},
        Op.HELLO: {"protocol": [1, 5]},
    }
    with pytest.raises((InvalidSubmitError, ProtocolError)) as caught:
        engine_decoder().decode([bytes([op]), msgspec.msgpack.encode(required[op] | body)])
    assert str(caught.value).endswith(message)
    assert ("did you mean" in str(caught.value)) == ("did you mean" in message)


def test_a_submit_may_be_as_long_as_its_prompt() -> None:
    message = engine_decoder().decode([b"\x10", _submit_with(b"priority", b"\0", 2, b"\1" * 2**22)])
    assert isinstance(message, Submit)
    assert len(message.prompt_token_ids) == 2**22


def test_a_submit_may_have_all_its_fields_at_their_longest_in_the_longest_forms() -> None:
    """Integers of 64 bits and arrays of 32, as simple encoders write them."""

    def ids(count: int) -> bytes:
        return b"\xdd" + count.to_bytes(4, "big") + b"\xd3\0\0\0\0\0\0\xff\xff" * count

    bias = b"\xdd\0\0\4\0" + b"".join(
        b"\xdd\0\0\0\2\xd3" + i.to_bytes(8, "big") + b"\xcb" + bytes(8) for i in range(1024)
    )
    choices = b"\xdd" + len(CHOICES).to_bytes(4, "big")
    choices += b"".join(b"\xdb" + len(c).to_bytes(4, "big") + c.encode() for c in CHOICES)
    fields = {
        b"stop_token_ids": ids(128), b"allowed_token_ids": ids(1024), b"logit_bias": bias,
        b"bad_words_token_ids": b"\xdd\0\0\1\0" + ids(4) * 256,
        b"structured_outputs": b"\xdf\0\0\0\1\xdb\0\0\0\6choice" + choices,
    }  # fmt: skip
    sampling = b"\xdf\0\0\0\5" + b"".join(
        b"\xdb" + len(name).to_bytes(4, "big") + name + value for name, value in fields.items()
    )
    body = msgspec.msgpack.encode({"request_id": "😀" * 256, "cache_salt": "😀" * 1024})
    body = b"\x84" + body[1:] + b"\xb0prompt_token_ids\xc4\4\1\0\0\0\xa8sampling" + sampling
    message = engine_decoder().decode([b"\x10", body])
    assert isinstance(message, Submit)
    assert message.sampling is not None
    assert len(message.sampling.logit_bias) == 1024
    assert message.sampling.structured_outputs == StructuredOutputs(choice=CHOICES)
    assert len(body) <= 0.75 * MAX_SUBMIT_BYTES


def test_a_long_body_that_is_no_prompt_is_refused() -> None:
    body = msgspec.msgpack.encode({"request_ids": ["x" * 30] * 40_000})
    with pytest.raises(ProtocolError, match=r"ABORT: the body has 12400.. bytes: at most 1048576"):
        engine_decoder().decode([b"\x14", body])


def test_an_error_quotes_little_of_a_long_field_name() -> None:
    body = msgspec.msgpack.encode({"x" * 10_000: 1})
    with pytest.raises(ProtocolError, match=r"CONTROL: .*xxx\.\.\. \(\d+ characters\)") as caught:
        engine_decoder().decode([b"\x30", body])
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("body", [b"[1, 2]", b'\n {"protocol": [1, 0]}'])
def test_json_is_recognised_by_its_first_sign(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="JSON"):
        engine_decoder().decode([b"\x01", body])


@pytest.mark.parametrize("version", [(1, -1), (-1, 0), (1, 2**53), (2**63, 0)])
def test_a_version_is_made_of_integers_that_every_language_has(version: tuple[int, int]) -> None:
    with pytest.raises(ProtocolError, match="HELLO"):
        engine_decoder().decode([b"\x01", msgspec.msgpack.encode({"protocol": version})])
