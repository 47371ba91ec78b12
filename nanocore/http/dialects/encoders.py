"""What encoders of several dialects have in common; see `delivery.Encoder`."""

from __future__ import annotations

from typing import Any

from nanocore.http.dialects.sse import COMMENT, DONE, data, on_one_line
from nanocore.http.dialects.usage import UsageSum
from nanocore.http.errors import HttpError, openai_body


class WholeEncoder:
    """Base of those that say all at the end."""

    is_stream = False
    keep_alive = b""

    def fail(self, error: HttpError) -> bytes:
        """Not called: nothing is sent before the end."""
        raise AssertionError("a whole answer that fails has not begun")


class ChunkEncoder:
    """Base of those of OpenAI's streams of chunks.

    head: the fields with which each chunk begins. with_usage: a last chunk has it, and in others it
    is null.
    """

    is_stream = True
    keep_alive = COMMENT

    def __init__(self, head: dict[str, Any], with_usage: bool) -> None:
        self._head = {**head, "usage": None} if with_usage else head
        self._with_usage = with_usage
        self._usage = UsageSum()

    def finish(self) -> bytes:
        """The usage, and the end."""
        end = DONE
        if self._with_usage:
            end = data({**self._head, "choices": [], "usage": self._usage.as_object()}) + end
        return end

    def fail(self, error: HttpError) -> bytes:
        """An error instead of the rest."""
        return b"data: " + on_one_line(openai_body(error)) + b"\n\n"

    def _with_count(self, chunk: dict[str, Any], num_tokens: int) -> dict[str, Any]:
        """The chunk with the usage so far. num_tokens: of the output."""
        usage = self._usage.as_object()
        usage["completion_tokens"] = num_tokens
        usage["total_tokens"] = usage["prompt_tokens"] + num_tokens
        return {**chunk, "usage": usage}
