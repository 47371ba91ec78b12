"""Error codes and the exceptions that Python callers catch."""

from __future__ import annotations

from typing import get_args

import pytest

from nanocore.protocol.errors import (
    AddressInUseError,
    CacheMemoryError,
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    EngineDrainingError,
    EngineOverloadedError,
    ErrorCode,
    InvalidRequestError,
    ModelFileError,
    NanocoreError,
    ProtocolError,
    StartError,
    exception_for,
)

EXCEPTIONS: dict[ErrorCode, type[NanocoreError]] = {
    "invalid_request": InvalidRequestError,
    "context_length_exceeded": ContextLengthError,
    "duplicate_request_id": InvalidRequestError,
    "overloaded": EngineOverloadedError,
    "draining": EngineDrainingError,
    "engine_dead": EngineDeadError,
    "protocol_error": ProtocolError,
    "unknown_op": ProtocolError,
    "no_session": ProtocolError,
}


def test_every_code_has_an_expected_exception() -> None:
    assert set(EXCEPTIONS) == set(get_args(ErrorCode))


@pytest.mark.parametrize("code", get_args(ErrorCode))
def test_a_code_becomes_its_exception_with_the_message(code: ErrorCode) -> None:
    error = exception_for(code, "what went wrong")
    assert type(error) is EXCEPTIONS[code]
    assert str(error) == "what went wrong"


@pytest.mark.parametrize("code", ["protocol_error", "unknown_op", "no_session"])
def test_a_protocol_error_keeps_its_code(code: ErrorCode) -> None:
    error = exception_for(code, "no")
    assert isinstance(error, ProtocolError)
    assert error.code == code


@pytest.mark.parametrize(("sent", "expected"), [(2.5, 2.5), (None, 1.0)])
def test_an_overloaded_engine_says_when_to_try_again(sent: float | None, expected: float) -> None:
    error = exception_for("overloaded", "full", sent)
    assert isinstance(error, EngineOverloadedError)
    assert error.retry_after_s == expected


@pytest.mark.parametrize("error_type", [InvalidRequestError, ContextLengthError, ConfigError])
def test_errors_about_values_are_value_errors(error_type: type[NanocoreError]) -> None:
    assert issubclass(error_type, ValueError)


def test_start_errors_have_the_documented_exit_codes() -> None:
    kinds = [ConfigError, ModelFileError, CacheMemoryError, AddressInUseError, StartError]
    assert [kind.exit_code for kind in kinds] == [2, 3, 4, 5, 70]
