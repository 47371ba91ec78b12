"""Messages to frames and back, and token ids to `bin` columns and back.

Decoding is always typed and catches every exception: msgspec reports most bad input itself, but
deep nesting surfaces as RecursionError and bad UTF-8 as UnicodeDecodeError, outside its hierarchy.
A peer's bytes are data; whatever they are, the answer is a ProtocolError with a code.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeVar

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
from nanocore.protocol.wording import explain, why_no_map

MAX_BODY_BYTES: Final = 2**20
"""Of what a client sends, a SUBMIT's tokens apart."""
MAX_SUBMIT_BYTES: Final = 336 * 2**10
"""Of a SUBMIT, its tokens apart: about twice what its fields can need. See `_check_size`."""
MAX_RETURNED_ID_CHARS: Final = 1024
"""Of a bad request id: an ERROR says it all the same, so that its sender knows which request."""

MAX_UNKNOWN_FIELDS: Final = 64
"""Of a SUBMIT, whose decoder then names the first; beyond, they are not looked at."""

_SUBMIT_FIELDS = Submit.__struct_encode_fields__
_SIZE_BYTES = {0xDE: 2, 0xDF: 4}  # of a map's size, by its first byte
Column = TypeVar("Column", "array[int]", "array[float]")
_ENCODER = msgspec.msgpack.Encoder()
_OP_FRAMES = {op: bytes([op]) for op in Op}


class _SubmitId(msgspec.Struct):
    """The one field needed to say which SUBMIT was bad."""

    request_id: str


class _SubmitTokens(msgspec.Struct):
    """The fields of a SUBMIT that may be long; not copied, only measured."""

    prompt_token_ids: memoryview = memoryview(b"")
    output_token_ids: memoryview = memoryview(b"")


_SUBMIT_ID_DECODER = msgspec.msgpack.Decoder(_SubmitId)
_SUBMIT_TOKENS_DECODER = msgspec.msgpack.Decoder(_SubmitTokens)
_ANY_DECODER = msgspec.msgpack.Decoder(msgspec.Raw)  # builds nothing


class InvalidSubmitError(InvalidRequestError):
    """A SUBMIT whose body is a map but no request; `request_id` if it could be read."""

    def __init__(self, message: str, request_id: str | None) -> None:
        super().__init__(message)
        self.request_id = request_id


def encode(message: Message) -> list[bytes]:
    """The two frames of a message: op byte, msgpack map."""
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
    """For a client: decodes what engines send."""
    return MessageDecoder(FROM_ENGINE)


def engine_decoder() -> MessageDecoder:
    """For an engine: decodes what clients send."""
    return MessageDecoder(FROM_CLIENT, bounded=True)


def _check_num_fields(body: bytes) -> None:
    """Refuse a SUBMIT with more fields than there are: `sampling` may be there but once or twice.

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
    """The id of a bad SUBMIT, as `returned_id` has it; raises if the body is not whole msgpack."""
    try:
        return returned_id(_SUBMIT_ID_DECODER.decode(body).request_id)
    except msgspec.ValidationError:  # the id itself is bad: the error then names no request
        _ANY_DECODER.decode(body)
        return None


def returned_id(request_id: str) -> str | None:
    """What an ERROR says of a request's id: as it was sent, unless it is very long."""
    return request_id if len(request_id) <= MAX_RETURNED_ID_CHARS else None


def pack_int32(values: Iterable[int]) -> bytes:
    """Integers as an int32 little-endian column; an array("i") is one already, and only copied.

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
    except (OverflowError, TypeError) as error:
        raise InvalidRequestError(f"token ids must be integers in [0, 2**31): {error}") from None


def pack_uint32(values: Iterable[int]) -> bytes:
    """Handles as a uint32 little-endian column."""
    return _little_endian(array("I", values)).tobytes()


def unpack_int32(column: bytes) -> array[int]:
    """An int32 little-endian column as an array of integers."""
    return _little_endian(array("i", column))


def unpack_uint32(column: bytes) -> array[int]:
    """A uint32 little-endian column as an array of integers."""
    return _little_endian(array("I", column))


def unpack_float32(column: bytes) -> array[float]:
    """A float32 little-endian column as an array of numbers."""
    return _little_endian(array("f", column))


def abort_handles(abort: Abort) -> array[int]:
    """The handles of an ABORT.

    Raises:
        ProtocolError: the column is cut short.
    """
    try:
        return unpack_uint32(abort.handles)
    except ValueError as error:
        raise ProtocolError(f"ABORT: handles is cut short: {error}") from None


def unpack_output(output: Output) -> tuple[array[int], array[int] | None, array[int]]:
    """(handles, counts or None if all are one, token ids) of an OUTPUT's columns.

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
    """The columns of an OUTPUT's log probabilities; each token has one candidate at least, itself.

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
            "not fit together: of each token there must be as many candidates as its count says, "
            "itself among them".format(*lengths)
        )
    return unpacked


def _little_endian(column: Column) -> Column:
    if sys.byteorder == "big":
        column.byteswap()
    return column
