"""Token ids and handles as `bin` columns of little-endian integers."""

from __future__ import annotations

import math
import struct
from array import array

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanocore.protocol.codec import pack_int32, unpack_int32, unpack_logprobs, unpack_uint32
from nanocore.protocol.errors import InvalidRequestError, ProtocolError
from nanocore.protocol.messages import TokenLogprobs

PROPERTY = settings(max_examples=50, deadline=None, derandomize=True)
LOGPROBS = TokenLogprobs(
    handles=struct.pack("<2I", 2**32 - 1, 7),
    ranks=struct.pack("<2I", 3, 1),
    counts=struct.pack("<2I", 2, 1),
    token_ids=pack_int32([5, 0, 9]),
    logprobs=struct.pack("<3f", -math.inf, -0.5, 0.0),
)


def test_a_column_is_little_endian() -> None:
    assert pack_int32([1, 256, -1]) == b"\1\0\0\0\0\1\0\0\xff\xff\xff\xff"


@PROPERTY
@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50))
def test_what_is_packed_is_unpacked(values: list[int]) -> None:
    assert unpack_int32(pack_int32(values)).tolist() == values


@PROPERTY
@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_handles_are_unsigned(values: list[int]) -> None:
    column = b"".join(value.to_bytes(4, "little") for value in values)
    assert unpack_uint32(column).tolist() == values


@pytest.mark.parametrize("value", [0, 1, 2**31 - 1, -1, -(2**31), True])
def test_the_ends_of_the_range_are_in_it(value: int) -> None:
    assert unpack_int32(pack_int32([5, value, 7])).tolist() == [5, value, 7]


def test_an_array_of_int32_is_a_column_already() -> None:
    values = [1, 256, -1]
    assert pack_int32(array("i", values)) == pack_int32(values)
    assert pack_int32(array("q", values)) == pack_int32(values)


def test_any_iterable_of_integers_is_packed() -> None:
    assert pack_int32(iter(range(3))) == pack_int32([0, 1, 2]) == pack_int32((0, 1, 2))


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**64, 1.0, "1", None])
def test_a_value_that_is_no_int32_is_an_invalid_request(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="token ids must be integers"):
        pack_int32([1, value])  # type: ignore[list-item]


def test_log_probabilities_are_unpacked() -> None:
    columns = [list(column) for column in unpack_logprobs(LOGPROBS)]
    assert columns == [[2**32 - 1, 7], [3, 1], [2, 1], [5, 0, 9], [-math.inf, -0.5, 0.0]]
    assert not any(unpack_logprobs(TokenLogprobs()))


@pytest.mark.parametrize("cut", [1, 4])
@pytest.mark.parametrize("name", TokenLogprobs.__struct_fields__)
def test_log_probabilities_that_do_not_fit_together_are_malformed(name: str, cut: int) -> None:
    columns = msgspec.structs.replace(LOGPROBS, **{name: getattr(LOGPROBS, name)[:-cut]})
    with pytest.raises(ProtocolError, match=r"cut short|not fit together"):
        unpack_logprobs(columns)
