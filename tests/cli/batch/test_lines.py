"""Lines of a batch: what is asked for, and what is said of a line that asks for nothing."""

from __future__ import annotations

import io
import json

import pytest

from nanocore.cli.batch.lines import (
    ENVELOPE_BYTES,
    MAX_CUSTOM_ID_CHARS,
    BadLine,
    BatchRequest,
    read_lines,
)


def request_line(**changes: object) -> bytes:
    fields = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    return json.dumps(fields | changes).encode()


def read(data: bytes, max_body_bytes: int = 1000) -> list[BatchRequest | BadLine]:
    return list(read_lines(io.BytesIO(data), max_body_bytes))


def test_a_line_is_a_request_whose_body_stays_as_it_is_written() -> None:
    line = b'{"body": {"n":  1},"url":"/v1/embeddings","method":"POST","custom_id":"\\u00e9"}\r\n'
    assert read(line) == [BatchRequest(1, "é", "/v1/embeddings", b'{"n":  1}')]


def test_blank_lines_count_and_are_nothing_else() -> None:
    lines = read(b"\xef\xbb\xbf" + request_line() + b"\n\n  \n" + request_line(custom_id="b"))
    assert [(line.line, line.custom_id) for line in lines] == [(1, "a"), (4, "b")]


@pytest.mark.parametrize(
    ("line", "custom_id", "code", "text"),
    [
        (b"{", None, "invalid_json_line", "invalid JSON"),
        (b"\xff", None, "invalid_json_line", "invalid JSON"),
        (b'"' + b"[" * 100, None, "invalid_json_line", "invalid JSON"),
        (b"[]", None, "invalid_line", "Expected `object`, got `array`"),
        (b"{}", None, "invalid_line", "missing required field `custom_id`"),
        (request_line(custom_id=7), None, "invalid_line", "Expected `str`, got `int`"),
        (request_line(custom_id=""), None, "invalid_custom_id", "has 0 characters: 1 to 512"),
        (request_line(custom_id="a" * (MAX_CUSTOM_ID_CHARS + 1)), None, "invalid_custom_id",
         "has 513 characters"),
        (request_line(method="GET"), "a", "invalid_method", "'GET' is not served: POST"),
        (request_line(url="/v1/x"), "a", "invalid_url", "'/v1/x' is not served: /v1/chat/"),
        (request_line(body={"stream": True}), "a", "invalid_body", "leave stream out"),
    ],
)  # fmt: skip
def test_a_line_that_asks_for_nothing_says_why(
    line: bytes, custom_id: str | None, code: str, text: str
) -> None:
    (bad, good) = read(line + b"\n" + request_line(custom_id="b"))
    assert isinstance(bad, BadLine)
    assert (bad.line, bad.custom_id, bad.code) == (1, custom_id, code)
    assert text in bad.message
    assert isinstance(good, BatchRequest)


@pytest.mark.parametrize("body", [[], "text", {"stream": False}, {"prompt": 1}])
def test_what_is_wrong_with_a_body_is_the_dialects_to_say(body: object) -> None:
    (line,) = read(request_line(body=body))
    assert isinstance(line, BatchRequest)
    assert json.loads(line.body) == body


def test_a_line_that_is_too_long_is_never_held_whole() -> None:
    class Counting(io.BytesIO):
        longest = 0

        def readline(self, size: int | None = -1, /) -> bytes:
            data = super().readline(size)
            self.longest = max(self.longest, len(data))
            return data

    long = request_line(body={"prompt": "x" * (5 * ENVELOPE_BYTES)})
    file = Counting(long + b"\n" + request_line() + b"\n" + long)
    lines = list(read_lines(file, 1000))
    assert [getattr(line, "code", None) for line in lines] == [
        "line_too_long", None, "line_too_long"
    ]  # fmt: skip
    assert [line.line for line in lines] == [1, 2, 3]
    assert file.longest <= ENVELOPE_BYTES + 1001
