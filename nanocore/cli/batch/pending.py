"""The input of a batch: its lines, errors of invalid ones, and those that have no result yet.

Bodies stay bytes: the dialects parse them like bodies from HTTP. Of a batch only custom_ids are
kept in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import msgspec

from nanocore.protocol.errors import shorten

URLS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_CUSTOM_ID_CHARS: Final = 512
ENVELOPE_BYTES: Final = 64 * 1024
"""Limit of a line without its body."""
DUPLICATE_CODE: Final = "duplicate_custom_id"
_BOM: Final = b"\xef\xbb\xbf"


class ResultIndex(msgspec.Struct, eq=False):
    """What has a result. failed: whether it is an error, by custom_id. bad_lines: line numbers."""

    failed: dict[str, bool] = {}
    bad_lines: set[int] = set()


class PendingLines:
    """Lines that have no result yet, in order.

    num_done: lines skipped because they have results. num_failed: of those, errors. Used by one
    thread at a time.
    """

    def __init__(self, lines: Iterator[BatchRequest | BadLine], index: ResultIndex) -> None:
        self.num_done = 0
        self.num_failed = 0
        self._held: BatchRequest | BadLine | None = None
        self._lines = lines
        self._index = index
        self._first_lines: dict[str, int] = {}  # by custom_id

    def has_more(self) -> bool:
        self._held = self.next()
        return self._held is not None

    def next(self) -> BatchRequest | BadLine | None:
        """Return the next line without a result, or None."""
        held, self._held = self._held, None
        return held or self._find()

    def _find(self) -> BatchRequest | BadLine | None:
        for line in self._lines:
            line = self._unless_duplicate(line)
            failed = self._result(line)
            if failed is None:
                return line
            self.num_done += 1
            self.num_failed += failed
        return None

    def _unless_duplicate(self, line: BatchRequest | BadLine) -> BatchRequest | BadLine:
        if line.custom_id is None:
            return line
        first = self._first_lines.setdefault(line.custom_id, line.line)
        if first == line.line:
            return line
        text = f"line {first} has the same custom_id"
        return BadLine(line.line, line.custom_id, DUPLICATE_CODE, text)

    def _result(self, line: BatchRequest | BadLine) -> bool | None:
        """Return whether the line's result is an error; None if it has none."""
        if (isinstance(line, BadLine) and line.code == DUPLICATE_CODE) or line.custom_id is None:
            return True if line.line in self._index.bad_lines else None
        return self._index.failed.get(line.custom_id)


class BatchRequest(msgspec.Struct, frozen=True):
    """A valid line. line: its number, from 1."""

    line: int
    custom_id: str
    url: str
    body: bytes


class BadLine(msgspec.Struct, frozen=True):
    """An invalid line. custom_id: None if unknown. code: for programs."""

    line: int
    custom_id: str | None
    code: str
    message: str


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Streams(msgspec.Struct):
    stream: Any = None


def read_lines(file: BinaryIO, max_body_bytes: int) -> Iterator[BatchRequest | BadLine]:
    """Yield all lines that are not blank. file: at its beginning."""
    limit = max_body_bytes + ENVELOPE_BYTES
    number = 0
    while data := file.readline(limit + 1):
        number += 1
        if len(data) > limit:
            while not data.endswith(b"\n") and (data := file.readline(limit)):
                pass
            text = f"it has more than {limit} bytes: send less, or raise --max-body-bytes"
            yield BadLine(number, None, "line_too_long", text)
        elif data := (data.removeprefix(_BOM) if number == 1 else data).strip():
            yield read_line(data, number)


def read_line(data: bytes, number: int) -> BatchRequest | BadLine:
    try:
        line = msgspec.json.decode(data, type=_Line)
    except msgspec.ValidationError as error:
        return BadLine(number, None, "invalid_line", f"{error}: custom_id, method, url, body")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return BadLine(number, None, "invalid_json_line", f"invalid JSON: {error}")
    if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID_CHARS:
        text = f"its custom_id has {len(line.custom_id)} characters: 1 to {MAX_CUSTOM_ID_CHARS}"
        return BadLine(number, None, "invalid_custom_id", text)
    if line.method != "POST":
        text = f"the method {shorten(line.method)!r} is not served: POST"
        return BadLine(number, line.custom_id, "invalid_method", text)
    if line.url not in URLS:
        text = f"the url {shorten(line.url)!r} is not served: {', '.join(URLS)}"
        return BadLine(number, line.custom_id, "invalid_url", text)
    body = bytes(line.body)
    if _is_streamed(body):
        text = "batches do not stream: leave stream out of the body"
        return BadLine(number, line.custom_id, "invalid_body", text)
    return BatchRequest(number, line.custom_id, line.url, body)


def _is_streamed(body: bytes) -> bool:
    try:
        return bool(msgspec.json.decode(body, type=_Streams).stream)
    except (msgspec.ValidationError, RecursionError):
        return False  # the dialect reports what is wrong with the body
