"""What a caller receives while its request runs.

Each output is a snapshot that shares the request's growing lists, so streaming n tokens costs O(n);
text and token ids are put together when they are read. They are made once per token, hence structs:
a frozen dataclass costs eight times as much.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from nanocore.protocol.messages import FinishReason


class RequestMetrics(msgspec.Struct, frozen=True, gc=False):
    """Times of one request, in seconds, by the client's monotonic clock.

    time_to_first_token_s: from submission; None before there is one. e2e_latency_s: so far, or in
    all once finished. num_output_tokens: so far.
    """

    time_to_first_token_s: float | None
    e2e_latency_s: float
    num_output_tokens: int


class CompletionOutput(msgspec.Struct, frozen=True, gc=False, eq=False):
    """The generated part of a request, as of one moment.

    delta: text that is new in this output. finish_reason: None while it runs, then "stop",
    "length", "abort" or "error". stop_reason: which of stop_token_ids (an int) or which stop string
    (a str) ended it; None if anything else did, EOS included. message: the cause of an "error", and
    of an "abort" that the caller did not ask for.
    """

    _parts: list[str]
    _num_parts: int
    _token_ids: list[int]
    _num_tokens: int
    delta: str
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    message: str | None = None
    index: int = 0

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._parts[: self._num_parts])

    @property
    def token_ids(self) -> list[int]:
        """The token ids so far, special tokens included."""
        return self._token_ids[: self._num_tokens]

    def __repr__(self) -> str:
        message = f", message={self.message!r}" if self.message is not None else ""
        return (
            f"CompletionOutput(text={self.text!r}, num_tokens={self._num_tokens}, "
            f"finish_reason={self.finish_reason!r}, stop_reason={self.stop_reason!r}{message})"
        )


class RequestOutput(msgspec.Struct, frozen=True, gc=False, eq=False):
    """One request, as of one moment.

    prompt: the text it was made from, if it was text. prompt_token_ids: a list, or the array that
    was given. outputs: one completion.
    num_cached_tokens: prompt tokens found in the prefix cache; None until the first token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None
    metrics: RequestMetrics
