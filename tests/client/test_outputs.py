"""What a caller sees of a completion when it is printed."""

from __future__ import annotations

from nanocore.client.requests.request_outputs import CompletionOutput


def test_a_printed_completion_shows_its_own_moment() -> None:
    parts, token_ids = ["a"], [1]
    completion = CompletionOutput(parts, 1, token_ids, 1, "a", "stop", "END")
    parts.append("b")
    token_ids.append(2)
    assert repr(completion) == (
        "CompletionOutput(text='a', num_tokens=1, finish_reason='stop', stop_reason='END')"
    )


def test_a_printed_completion_shows_the_cause_of_its_end() -> None:
    completion = CompletionOutput([], 0, [], 0, "", "error", None, "out of memory")
    assert repr(completion).endswith("stop_reason=None, message='out of memory')")
