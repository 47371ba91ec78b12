"""Flags and input lines of nanocore batch."""

from __future__ import annotations

import io
import json

import pytest

from nanocore.cli.batch.command import parse
from nanocore.cli.batch.pending import (
    ENVELOPE_BYTES,
    MAX_CUSTOM_ID_CHARS,
    BadLine,
    BatchRequest,
    read_lines,
)
from nanocore.protocol.errors import ConfigError


@pytest.mark.parametrize(
    "arguments",
    [
        ["in", "-", "--model", "m", "--max-num-seqs", "8"],
        ["-i", "in", "-o", "-", "--model=m", "--max-num-seqs", "8"],
        ["--max-num-seqs", "8", "--input-file", "in", "--output-file=-", "--model", "m"],
    ],
)
def test_files_come_first_or_have_flags_and_the_rest_is_the_engines(arguments: list[str]) -> None:
    options = parse(arguments)
    assert (options.input, options.output) == ("in", "-")
    assert options.engine.flags == ("--model=m", "--max-num-seqs", "8")


def test_answers_are_as_a_server_gives_them() -> None:
    options = parse(["in", "out", "--served-model-name", "a", "b", "--reasoning-parser", "none"])
    assert options.app.served_model_names == ("a", "b")
    assert (options.app.tool_parser, options.app.reasoning_parser) == ("auto", None)
    assert options.app.stored_responses_bytes == 0
    assert options.app.api_keys == ()
    assert options.app.allowed_hosts is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "nanocore batch IN OUT"),
        (["in"], "nanocore batch IN OUT"),
        (["--tp", "2", "in", "out"], "an input and an output first"),
        (["-i", "in"], "an input and an output first"),
        (["in", "out", "-i", "in"], "either IN OUT, or -i"),
        (["in", "out", "--max-concurrency", "0"], "not an integer >= 1"),
        (["in", "out", "--endpoint", "ipc:///e", "--max-concurency", "1"],
         "did you mean --max-concurrency?"),
        (["in", "out", "--endpoint", "ipc:///e", "--model", "m"], "leave m out"),
        (["in", "out", "--listen", "ipc:///e"], "not a flag of nanocore batch"),
        (["in", "out", "--tool-call-parser", "x"], "choose auto, none"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said(arguments: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(arguments)
    assert text in str(caught.value)


def request_line(**changes: object) -> bytes:
    fields = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    return json.dumps(fields | changes).encode()


def read(data: bytes, max_body_bytes: int = 1000) -> list[BatchRequest | BadLine]:
    return list(read_lines(io.BytesIO(data), max_body_bytes))


def test_a_line_is_a_request_with_its_body_as_written_and_blank_ones_only_count() -> None:
    line = b'{"body": {"n":  1},"url":"/v1/embeddings","method":"POST","custom_id":"\\u00e9"}\r\n'
    assert read(line) == [BatchRequest(1, "é", "/v1/embeddings", b'{"n":  1}')]

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
