"""The lines of a batch's results: as OpenAI has them, and read again by the run that resumes.

Whatever fails has an `error`, beside the answer's status and body if there was an answer.
"""

from __future__ import annotations

import uuid
from typing import Final

import msgspec

from nanocore.cli.batch.in_process import Answer
from nanocore.cli.batch.lines import BadLine, BatchRequest

START: Final = b'{"id":"batch_req_'
"""How each line begins."""


class ResultError(msgspec.Struct, frozen=True):
    """code: for programs. line: of the input, from 1."""

    code: str | None
    message: str
    line: int


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _ResultLine(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Response | None
    error: ResultError | None


class ResultHead(msgspec.Struct, frozen=True):
    """What a resumed run needs to know of a line."""

    id: str
    custom_id: str | None
    error: ResultError | None

    @property
    def is_of_line(self) -> bool:
        """Whether it belongs to a line of the input, and is no custom_id's result."""
        return self.custom_id is None or (
            self.error is not None and self.error.code == DUPLICATE_CODE
        )


DUPLICATE_CODE: Final = "duplicate_custom_id"


class _ErrorOfBody(msgspec.Struct, frozen=True):
    message: str = "it has failed"
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorOfBody = _ErrorOfBody()


def of_answer(request: BatchRequest, answer: Answer) -> tuple[bytes, bool]:
    """(its line, whether it is an error)."""
    error = None
    if answer.status >= 400:
        told = msgspec.json.decode(answer.body, type=_ErrorBody).error
        error = ResultError(told.code, told.message, request.line)
    # A line break outside of JSON's strings is a space, and within them there is none.
    body = msgspec.Raw(answer.body.replace(b"\n", b" "))
    response = _Response(answer.status, answer.request_id, body)
    return _encode(_ResultLine(_new_id(), request.custom_id, response, error)), error is not None


def of_bad_line(bad: BadLine) -> bytes:
    """The line of what could not be asked."""
    error = ResultError(bad.code, f"line {bad.line}: {bad.message}", bad.line)
    return _encode(_ResultLine(_new_id(), bad.custom_id, None, error))


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


def _encode(line: _ResultLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"
