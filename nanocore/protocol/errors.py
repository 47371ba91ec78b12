"""The errors that users meet, on either side of the socket; and the report of a launched engine.

Every message says what was wrong, the value, the limit and the remedy. Request errors cross the
wire as an ERROR message with a code from a closed set (`ErrorCode`); `exception_for` turns a code
back into the exception a Python caller catches. Start-up errors carry the process's exit code.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Literal

import msgspec


class StartFile(msgspec.Struct, frozen=True):
    """A file of the model, whose content the user's cache folder has. sha256: in hex digits."""

    name: str
    num_bytes: int
    sha256: str


class StartReport(msgspec.Struct, frozen=True):
    """A line of JSON from a launched engine to its client: ready, or the error and exit code.

    standing_by: not ready yet: all is loaded, and it waits until nobody serves at its endpoint.
    files: not ready yet: those of the model that the cache folder has.
    """

    error: str | None = None
    exit_code: int = 0
    standing_by: bool = False
    files: list[StartFile] | None = None


ErrorCode = Literal[
    "invalid_request",  # a field, a value or a combination that no engine would accept
    "context_length_exceeded",  # the prompt, or prompt + max_tokens, does not fit
    "duplicate_request_id",  # the id is in use in this session
    "overloaded",  # try again later
    "draining",  # the engine is about to end: try another one, or the next one here
    "engine_dead",  # the engine failed; no request of it will continue
    "protocol_error",  # bytes that are no message
    "unknown_op",  # an op byte outside the closed set
    "no_session",  # a message before HELLO, or after BYE
]


_MAX_QUOTED_CHARS = 400


def shorten(text: str) -> str:
    """Return a text, cut if it is long: messages quote what peers and users sent."""
    if len(text) <= _MAX_QUOTED_CHARS:
        return text
    return f"{text[:_MAX_QUOTED_CHARS]}... ({len(text)} characters)"


def counted(number: float, noun: str) -> str:
    """Return a number and its noun: "1 token", "2 tokens"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def quoted(value: object) -> str:
    """Return a value's repr for messages, whatever it is: repr fails for very deep or large
    values.
    """
    try:
        return shorten(repr(value))
    except (RecursionError, ValueError):
        return f"a {type(value).__name__} too deep or too large to be shown"


class NanocoreError(Exception):
    """Base of every error that nanocore raises on purpose."""


class InvalidRequestError(NanocoreError, ValueError):
    """The request cannot be served as written; sending it again will not help.

    code: of its ERROR message. param: the field that it is about, where somebody wants to know.
    """

    code: ClassVar[ErrorCode] = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """The prompt, or prompt plus max_tokens, exceeds the model's or the KV cache's capacity."""

    code = "context_length_exceeded"


class EngineOverloadedError(NanocoreError):
    """The engine accepts no more requests now; `retry_after_s` is its estimate."""

    code: ClassVar[ErrorCode] = "overloaded"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDrainingError(EngineOverloadedError):
    """The engine finishes its requests, accepts no new ones, and then stops."""

    code = "draining"


class EngineDeadError(NanocoreError):
    """The engine process is gone, has stopped answering, or was replaced by a new one."""


class ClientStateError(NanocoreError, RuntimeError):
    """A client is used before it is entered, after it is closed, or in another event loop."""


class ProtocolError(NanocoreError):
    """The peer violates the protocol, or speaks another version of it."""

    def __init__(self, message: str, code: str = "protocol_error") -> None:
        super().__init__(message)
        self.code = code


class StartError(NanocoreError):
    """Base of errors that stop an engine from starting; `exit_code` is the process's."""

    exit_code: ClassVar[int] = 70


class ConfigError(StartError, ValueError):
    """A flag or a combination of flags is invalid."""

    exit_code = 2


class KeyFileError(ConfigError):
    """A CURVE key file is missing, malformed, or open to other users."""


class ModelFileError(StartError):
    """A model folder is missing, incomplete, damaged or of an unknown architecture."""

    exit_code = 3


class CacheMemoryError(StartError):
    """Memory is too small for the KV cache, for one request of the model's length, or at all."""

    exit_code = 4


class WorkerError(StartError):
    """A worker process failed, died or stopped answering; the message names its rank."""


class AddressInUseError(StartError):
    """Another engine serves this endpoint."""

    exit_code = 5


class EngineStartError(NanocoreError):
    """The engine that a client launched did not start.

    The message is the engine's own cause; `exit_code` is its process's (see `nanocore-engine -h`).
    """

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


_NO_MEMORY_TEXTS = (
    "out of memory",  # torch, on CUDA
    "allocate memory",  # torch on a CPU, and the C library
    "can't start new thread",
    "failed to map segment",  # of a library that is imported
    "bad_alloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the system has no memory to give, or none for a thread.

    Python has several types for that, and others only a text.
    """
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    if isinstance(error, (RuntimeError, ImportError, OSError)):
        return any(text in str(error).lower() for text in _NO_MEMORY_TEXTS)
    return False


@contextmanager
def memory_errors(where: str) -> Iterator[None]:
    """Turn out-of-memory errors into a CacheMemoryError that begins with `where`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, StartError) or not is_out_of_memory(error):
            raise
        first_line = shorten(str(error).partition("\n")[0])
        raise CacheMemoryError(
            f"{where}out of memory ({type(error).__name__}: {first_line}): give the engine more, "
            "or choose a smaller model, --max-num-batched-tokens or --max-num-seqs"
        ) from None


def exception_for(code: str, message: str, retry_after_s: float | None = None) -> NanocoreError:
    """Return the exception for a wire error's code; ProtocolError for unknown codes."""
    match code:
        case "invalid_request" | "duplicate_request_id":
            return InvalidRequestError(message)
        case "context_length_exceeded":
            return ContextLengthError(message)
        case "overloaded" | "draining":
            kind = EngineDrainingError if code == "draining" else EngineOverloadedError
            return kind(message, 1.0 if retry_after_s is None else retry_after_s)
        case "engine_dead":
            return EngineDeadError(message)
    return ProtocolError(message, code)
