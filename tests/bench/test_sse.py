"""Events out of bytes, and what they say."""

from __future__ import annotations

import msgspec
import pytest

from nanocore.bench.sse import EventReader, chunk_of

STREAM = b': hello\n\ndata: {"a": 1}\n\nevent: x\nid: 3\ndata:two\ndata: lines\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a": 1}', b"two\nlines", b"[DONE]"]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_events_are_the_same_however_the_bytes_come(line_end: bytes) -> None:
    stream = STREAM.replace(b"\n", line_end)
    for size in range(1, len(stream) + 1):
        reader = EventReader()
        parts = [stream[i : i + size] for i in range(0, len(stream), size)]
        assert [event for part in parts for event in reader.feed(part)] == EVENTS


def test_an_event_that_is_not_whole_is_kept_back() -> None:
    reader = EventReader()
    assert reader.feed(b"data: x\n") == []
    assert reader.feed(b"\n") == [b"x"]


@pytest.mark.parametrize(
    ("choice", "has_tokens", "text"),
    [
        ('{"text": " a"}', True, " a"),
        ('{"text": ""}', True, ""),
        ('{"text": "", "finish_reason": "stop"}', False, ""),
        ('{"text": "b", "finish_reason": "length"}', True, "b"),
        ('{"delta": {"role": "assistant", "content": ""}}', False, ""),
        ('{"delta": {"role": "assistant", "content": "c"}}', True, "c"),
        ('{"delta": {"reasoning_content": "d"}}', True, "d"),
        ('{"delta": {"reasoning": "e", "reasoning_content": "e"}}', True, "e"),
        ('{"delta": {"content": null}}', True, ""),
        ('{"delta": {"tool_calls": [{"index": 0}]}, "finish_reason": "tool_calls"}', True, ""),
        ('{"delta": {}, "finish_reason": "stop"}', False, ""),
    ],
)
def test_a_chunk_brings_tokens_unless_it_is_a_role_or_an_end(
    choice: str, has_tokens: bool, text: str
) -> None:
    (found,) = chunk_of(f'{{"id": "x", "choices": [{choice}]}}'.encode()).choices
    assert (found.has_tokens, found.added_text) == (has_tokens, text)


def test_a_chunk_that_is_no_utf_8_is_one_and_one_without_end_is_none() -> None:
    (found,) = chunk_of(b'{"choices": [{"text": "a\xff"}]}').choices
    assert found.text == "a\ufffd"
    with pytest.raises(msgspec.MsgspecError, match="too deeply"):
        chunk_of(b'{"error": ' + b"[" * 100_000)
