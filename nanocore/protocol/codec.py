"""Messages to frames and back, and token ids to `bin` columns and back.

Decoding is always typed and catches every exception: msgspec reports most bad input itself, but
deep nesting surfaces as RecursionError and, before 0.23, bad UTF-8 as UnicodeDecodeError.
A peer's bytes are data; whatever they are, the answer is a ProtocolError with a code.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import Any, Final, NamedTuple, TypeVar, get_args, get_type_hints

import msgspec

from nanocore.protocol.errors import InvalidRequestError, ProtocolError, shorten
from nanocore.protocol.messages import (
    FROM_CLIENT,
    FROM_ENGINE,
    Abort,
    Message,
    Op,
    Output,
    Submit,
    TokenLogprobs,
)

_WORDS: Final = {"object": "map", "bytes": "bin", "null": "nil", "None": "nil", "datetime": "ext"}
_TYPES: Final = re.compile(r"(?:Expected|got) `[A-Za-z| ]+`")
_FIELDS: Final = {
    "Object missing required field": "the map lacks the required field",
    "Object contains unknown field": "the map has the unknown field",
}
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*?)`(?: - at `(.*)`)?", re.DOTALL)
_MIN_NEARNESS: Final = 0.7
_MAX_NAME_CHARS: Final = 64
_MAP_HEADS: Final = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))


def explain(error: Exception, expected: Any = None) -> str:
    """Explain a decoder's exception in PROTOCOL.md's words.

    expected: the struct that the body was to be; an unknown field's nearest one is then named.
    """
    match error:
        case msgspec.ValidationError():
            text = str(error)
            for theirs, ours in _FIELDS.items():
                if text.startswith(theirs):
                    return ours + text.removeprefix(theirs) + _nearest_field(text, expected)
            return _TYPES.sub(_in_our_words, text)
        case msgspec.DecodeError() if "UTF-8" not in str(error):
            return f"the body is not one whole msgpack value: {error}"
        case UnicodeDecodeError() | msgspec.DecodeError():
            return "a str in the body is not UTF-8"
        case RecursionError():
            return "the body is nested too deeply"
    return f"{type(error).__name__}: {error}"


def why_no_map(body: bytes) -> str | None:
    """Return why a body's first byte cannot begin a message, or None."""
    if not body:
        return "the body is empty: it must be a msgpack map"
    if body[0] in _MAP_HEADS:
        return None
    if (start := body[:64].lstrip()[:1]) in (b"{", b"["):
        return f"the body begins with {start.decode()!r}: JSON? bodies are msgpack maps"
    return f"the body is no msgpack map: it begins with 0x{body[0]:02x}"


def _nearest_field(text: str, expected: Any) -> str:
    """Return a question that names the field that was meant, if one or several are near."""
    unknown = _UNKNOWN.fullmatch(text)
    if unknown is None:
        return ""
    name, path = unknown.groups()
    struct = expected
    for part in (path or "").split(".")[1:]:
        hints = get_type_hints(struct) if _is_struct(struct) else {}
        struct = _struct_in(hints.get(part.partition("[")[0]))
    if not _is_struct(struct) or len(name) > _MAX_NAME_CHARS:
        return ""
    fields: tuple[str, ...] = struct.__struct_encode_fields__
    for field, hint in get_type_hints(struct).items():
        inner = _struct_in(hint)
        if inner is not None and name in inner.__struct_encode_fields__:
            return f" - it belongs into `{field}`"
    nearness = {
        field: field.startswith(f"{name}_") or SequenceMatcher(None, field, name).ratio()
        for field in fields
    }
    most = max(nearness.values())
    nearest = [f"`{field}`" for field in fields if nearness[field] == most >= _MIN_NEARNESS]
    return f" - did you mean {' or '.join(nearest)}?" if nearest else ""


def _struct_in(hint: Any) -> Any:
    """Return the struct in a field's type, or None."""
    return next(filter(_is_struct, (hint, *get_args(hint))), None)


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _in_our_words(types: re.Match[str]) -> str:
    return re.sub("[A-Za-z]+", lambda word: _WORDS.get(word[0], word[0]), types[0])


MAX_BODY_BYTES: Final = 2**20
"""Limit of a client's body, without a SUBMIT's tokens."""
MAX_SUBMIT_BYTES: Final = 336 * 2**10
"""Limit of a SUBMIT without its tokens: about twice what its fields can need. See `_check_size`."""
MAX_RETURNED_ID_CHARS: Final = 1024
"""Limit of a bad request id in an ERROR, which names it so that the sender knows the request."""

MAX_UNKNOWN_FIELDS: Final = 64
"""Limit of unknown fields in a SUBMIT; the decoder names the first. With more it is not decoded."""

_SUBMIT_FIELDS = Submit.__struct_encode_fields__
_SIZE_BYTES = {0xDE: 2, 0xDF: 4}  # of a map's size, by its first byte
Column = TypeVar("Column", "array[int]", "array[float]")
_ENCODER = msgspec.msgpack.Encoder()
_OP_FRAMES = {op: bytes([op]) for op in Op}


class _SubmitId(msgspec.Struct):
    """The field that says which SUBMIT was bad."""

    request_id: str


class _SubmitTokens(msgspec.Struct):
    """The fields of a SUBMIT that may be long; they are measured, not copied."""

    prompt_token_ids: memoryview = memoryview(b"")
    output_token_ids: memoryview = memoryview(b"")


_SUBMIT_ID_DECODER = msgspec.msgpack.Decoder(_SubmitId)
_SUBMIT_TOKENS_DECODER = msgspec.msgpack.Decoder(_SubmitTokens)
_ANY_DECODER = msgspec.msgpack.Decoder(msgspec.Raw)  # builds nothing


class InvalidSubmitError(InvalidRequestError):
    """A SUBMIT whose body is a map but no request; `request_id` is "" if it could not be read."""

    def __init__(self, message: str, request_id: str | None) -> None:
        super().__init__(message)
        self.request_id = request_id


def encode(message: Message) -> list[bytes]:
    """Encode a message as its two frames: op byte, msgpack map."""
    return [_OP_FRAMES[message.op], _ENCODER.encode(message)]


class MessageDecoder:
    """Decodes the messages that one side may receive; every other op is unknown to it."""

    def __init__(self, accepted: Iterable[type[Message]], bounded: bool = False) -> None:
        self._bounded = bounded
        self._decoders = {int(m.op): msgspec.msgpack.Decoder(m) for m in accepted}

    def decode(self, frames: Sequence[bytes]) -> Message:
        """Decode one message.

        Raises:
            InvalidSubmitError: a SUBMIT with missing, unknown or out-of-range fields.
            ProtocolError: anything else that is no message.
        """
        if len(frames) != 2 or len(frames[0]) != 1:
            hint = ": a REQ socket? use DEALER" if frames and not frames[0] else ""
            raise ProtocolError(
                f"a message has two frames, an op byte and a body; got {len(frames)} frames of "
                f"{[len(frame) for frame in frames[:4]]} bytes{hint}"
            )
        op = frames[0][0]
        decoder = self._decoders.get(op)
        if decoder is None:
            raise ProtocolError(f"op 0x{op:02x} is not one this side receives", "unknown_op")
        if (why := why_no_map(frames[1])) is not None:
            raise ProtocolError(f"{Op(op).name}: {why}")
        try:
            return self._decode_body(op, decoder, frames[1])
        except InvalidSubmitError:
            raise
        except Exception as error:  # not only msgspec's own: see the module docstring
            why = explain(error, decoder.type)
            raise ProtocolError(shorten(f"{Op(op).name}: {why}")) from None

    def _decode_body(
        self, op: int, decoder: msgspec.msgpack.Decoder[Message], body: bytes
    ) -> Message:
        try:
            if self._bounded and op == Op.SUBMIT:
                _check_num_fields(body)
            if self._bounded and len(body) > MAX_SUBMIT_BYTES:
                _check_size(op, body)
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            if op != Op.SUBMIT:
                raise
            request_id = _submit_id(body)
            why = explain(error, decoder.type)
            raise InvalidSubmitError(shorten(f"SUBMIT: {why}"), request_id) from None


def client_decoder() -> MessageDecoder:
    """Decoder of what engines send."""
    return MessageDecoder(FROM_ENGINE)


def engine_decoder() -> MessageDecoder:
    """Decoder of what clients send."""
    return MessageDecoder(FROM_CLIENT, bounded=True)


def _check_num_fields(body: bytes) -> None:
    """Refuse a SUBMIT with more fields than there are: `sampling` may be there once or twice.

    Only for large maps, whose head says their size: of others the decoder names the wrong field.
    """
    num_bytes = _SIZE_BYTES.get(body[0], 0)
    num_fields = int.from_bytes(body[1 : 1 + num_bytes], "big")
    if num_fields > len(_SUBMIT_FIELDS) + MAX_UNKNOWN_FIELDS:
        raise msgspec.ValidationError(
            f"the map has {num_fields} fields: the known ones are {', '.join(_SUBMIT_FIELDS)}"
        )


def _check_size(op: int, body: bytes) -> None:
    """Refuse a body that would take long to decode.

    Tokens are decoded at the speed of a copy, `sampling` at a hundredth of that.
    """
    limit, num_bytes, what = MAX_BODY_BYTES, len(body), ""
    if op == Op.SUBMIT:
        tokens = _SUBMIT_TOKENS_DECODER.decode(body)
        num_bytes -= len(tokens.prompt_token_ids) + len(tokens.output_token_ids)
        limit, what = MAX_SUBMIT_BYTES, " beside its tokens"
    if num_bytes > limit:
        raise msgspec.ValidationError(f"the body has {num_bytes} bytes{what}: at most {limit}")


def _submit_id(body: bytes) -> str | None:
    """Return the id of a bad SUBMIT, shortened by `returned_id`; raise if the body is not whole
    msgpack.
    """
    try:
        return returned_id(_SUBMIT_ID_DECODER.decode(body).request_id)
    except msgspec.ValidationError:  # the id itself is bad: the error then names no request
        _ANY_DECODER.decode(body)
        return None


def returned_id(request_id: str) -> str | None:
    """Return a request id for an ERROR: as it was sent, unless it is very long."""
    return request_id if len(request_id) <= MAX_RETURNED_ID_CHARS else None


def pack_int32(values: Iterable[int]) -> bytes:
    """Pack integers as an int32 little-endian column; an array("i") is only copied.

    Raises:
        InvalidRequestError: a value is not an integer in int32's range.
    """
    if isinstance(values, array) and values.typecode == "i":
        return _little_endian(values[:] if sys.byteorder == "big" else values).tobytes()
    values = values if isinstance(values, list) else list(values)
    if not values:
        return b""
    try:
        # Python converts unsigned integers several times faster; token ids are never negative.
        column = array("I")
        column.fromlist(values)
        packed = _little_endian(column).tobytes()
        if packed[3::4].isascii():  # no highest bit is set, so they are the same as int32
            return packed
    except (OverflowError, TypeError):
        pass
    try:
        return _little_endian(array("i", values)).tobytes()
    except OverflowError:
        raise InvalidRequestError("token ids must be integers in [0, 2**31)") from None
    except TypeError as error:
        raise InvalidRequestError(f"token ids must be integers in [0, 2**31): {error}") from None


def pack_uint32(values: Iterable[int]) -> bytes:
    """Pack handles as a uint32 little-endian column."""
    return _little_endian(array("I", values)).tobytes()


def unpack_int32(column: bytes) -> array[int]:
    """Unpack an int32 little-endian column."""
    return _little_endian(array("i", column))


def unpack_uint32(column: bytes) -> array[int]:
    """Unpack a uint32 little-endian column."""
    return _little_endian(array("I", column))


def unpack_float32(column: bytes) -> array[float]:
    """Unpack a float32 little-endian column."""
    return _little_endian(array("f", column))


def abort_handles(abort: Abort) -> array[int]:
    """Return the handles of an ABORT.

    Raises:
        ProtocolError: the column is cut short.
    """
    try:
        return unpack_uint32(abort.handles)
    except ValueError as error:
        raise ProtocolError(f"ABORT: handles is cut short: {error}") from None


def unpack_output(output: Output) -> tuple[array[int], array[int] | None, array[int]]:
    """Return (handles, counts or None if all are 1, token ids) of an OUTPUT's columns.

    Raises:
        ProtocolError: the columns do not fit together.
    """
    try:
        handles, token_ids = unpack_uint32(output.handles), unpack_int32(output.tokens)
        counts = None if output.counts is None else unpack_uint32(output.counts)
    except ValueError as error:
        raise ProtocolError(f"OUTPUT: a column is cut short: {error}") from None
    num_counts = len(handles) if counts is None else len(counts)
    num_tokens = len(handles) if counts is None else sum(counts)
    if num_counts != len(handles) or num_tokens != len(token_ids):
        raise ProtocolError(
            f"OUTPUT: {len(handles)} handles, {num_counts} counts of {num_tokens} tokens in all, "
            f"and {len(token_ids)} tokens do not fit together"
        )
    return handles, counts, token_ids


class UnpackedLogprobs(NamedTuple):
    """The columns of a `TokenLogprobs`."""

    handles: array[int]
    ranks: array[int]
    counts: array[int]
    token_ids: array[int]
    logprobs: array[float]


def unpack_logprobs(columns: TokenLogprobs) -> UnpackedLogprobs:
    """Unpack an OUTPUT's log probabilities; each token has at least one candidate, itself.

    Raises:
        ProtocolError: they do not fit together.
    """
    try:
        unpacked = UnpackedLogprobs(
            unpack_uint32(columns.handles),
            unpack_uint32(columns.ranks),
            unpack_uint32(columns.counts),
            unpack_int32(columns.token_ids),
            unpack_float32(columns.logprobs),
        )
    except ValueError as error:
        raise ProtocolError(f"OUTPUT: a column of logprobs is cut short: {error}") from None
    lengths = [len(column) for column in unpacked]
    num_candidates = sum(unpacked.counts)
    if (
        lengths[:3] != [lengths[0]] * 3
        or lengths[3:] != [num_candidates] * 2
        or 0 in unpacked.counts
    ):
        raise ProtocolError(
            "OUTPUT: logprobs of {} handles, {} ranks, {} counts, {} token ids and {} numbers do "
            "not fit together: each token must have as many candidates as its count, including "
            "itself".format(*lengths)
        )
    return unpacked


def _little_endian(column: Column) -> Column:
    if sys.byteorder == "big":
        column.byteswap()
    return column
