"""One sample of a request on the client: collected as it arrives, turned into text when read.

The connection only appends token ids. A slow consumer costs one list, not a queue of messages, and
finds everything merged. Detokenization and stop strings run when the consumer reads, in slices that
do not block the event loop.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Sequence

from nanocore.client.detokenizer import SampleText
from nanocore.client.requests.progress import Progress
from nanocore.client.requests.request_outputs import CompletionOutput, LogprobTable, SampleLogprobs
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.codec import UnpackedLogprobs, unpack_float32
from nanocore.protocol.errors import ProtocolError
from nanocore.protocol.messages import Event, FinishReason
from nanocore.protocol.sampling import SamplingParams


class Sample:
    """Tokens of one sample of a request as they arrive, and its text as it is read.

    Args:
        prompt_token_ids, params: of the request.
        tokenizer: None without detokenization.
        progress: of the request.

    request_id: the wire's. handle: once accepted. logprobs, prompt_logprobs: None if not requested;
    only the first sample has prompt_logprobs. embedding: set at the end, if requested. delta: new
    text of the last `read`. finished: everything was read.
    """

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        progress: Progress,
    ) -> None:
        self.request_id, self.index = request_id, index
        self.handle: int | None = None
        self._progress = progress
        self._num_prompt_tokens = len(prompt_token_ids)
        self._tokenizer = tokenizer
        self._text: SampleText | None = None
        self._push: Callable[[int], str] | None = None  # the short way, from the second read on
        if tokenizer is not None:
            self._text = SampleText(tokenizer, prompt_token_ids, params)
        # Data that has arrived; the first `num_read` tokens were read.
        self._token_ids: list[int] = []
        self._end: Event | None = None
        self.num_cached_tokens: int | None = None
        self._pools = params.pooling is not None
        self.embedding: array[float] | None = None
        self.ended = False  # by the engine, or by a stop string
        self.logprobs = None if params.logprobs is None else LogprobTable(tokenizer)
        self.prompt_logprobs: LogprobTable | None = None
        if params.prompt_logprobs is not None and index == 0:
            self.prompt_logprobs = LogprobTable(tokenizer)
        # Data that was read.
        self.finished = False
        self.num_read = 0
        self.delta = ""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.message: str | None = None
        self.is_invalid = False  # it ended with an "error" that its parameters bring about
        self._parts: list[str] = []

    # -- called by the connection -----------------------------------------------------------------

    def push_token(self, token_id: int) -> None:
        """Add one new token, and wake the reader if it waits for one."""
        self._token_ids.append(token_id)
        if self._progress.is_awaited:
            self._progress.token_came()

    def push_tokens(self, token_ids: Iterable[int]) -> None:
        """Add new tokens, one or more, and wake the reader."""
        self._token_ids += token_ids
        if self._progress.is_awaited:
            self._progress.token_came()

    def push_logprobs(self, message: UnpackedLogprobs, index: int, start: int) -> None:
        """Add logprobs of the next token: a message's index-th, whose candidates begin at start.

        Raises:
            ProtocolError: they are of another token.
        """
        if self.logprobs is None:
            return
        place, token_id = len(self.logprobs), message.token_ids[start]
        if self._token_ids[place : place + 1] != [token_id]:
            raise ProtocolError(
                f"OUTPUT: logprobs of token {token_id}, which is not the sample's token {place}"
            )
        self.logprobs.append(message, index, start)

    def push_prompt_logprobs(self, message: UnpackedLogprobs, index: int, start: int) -> None:
        """Add the log probabilities of the prompt's next token."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.append(message, index, start)

    def check_logprobs(self) -> None:
        """Raises ProtocolError unless there are as many as tokens."""
        num_tokens, columns = len(self._token_ids), self.logprobs
        if columns is not None and len(columns) != num_tokens:
            raise ProtocolError(f"OUTPUT: {len(columns)} logprobs of {num_tokens} tokens")
        columns, num_wanted = self.prompt_logprobs, self._num_prompt_tokens - 1
        num_least = num_wanted if num_tokens else 0
        if columns is not None and not num_least <= len(columns) <= num_wanted:
            raise ProtocolError(
                f"OUTPUT: {len(columns)} prompt_logprobs of a prompt of {num_wanted + 1} tokens"
            )

    def push_event(self, event: Event) -> None:
        """Store an event: cached tokens at the start, or the end of the sample.

        Raises:
            ProtocolError: it ended without the requested embedding.
        """
        if event.num_cached_tokens is not None and self.num_cached_tokens is None:
            self.num_cached_tokens = event.num_cached_tokens
        if event.finish_reason is not None and not self.ended:
            if self._pools and event.finish_reason == "stop":
                column = event.embedding or b""
                if not column or len(column) % 4:
                    raise ProtocolError(
                        f"OUTPUT: an embedding of {len(column)} bytes: 4 for each number"
                    )
                self.embedding = unpack_float32(column)
            self._end = event
            self._set_ended()

    # -- for resubmission ------------------------------------------------------------------------

    @property
    def arrived_token_ids(self) -> list[int]:
        """Token ids that have arrived, read or not; do not modify."""
        return self._token_ids

    def begin_again(self) -> None:
        """Discard prompt logprobs: the next engine sends them from the beginning."""
        if self.prompt_logprobs is not None and not self._token_ids:
            self.prompt_logprobs = LogprobTable(self._tokenizer)

    # -- called by the stream ---------------------------------------------------------------------

    @property
    def outlives_reading(self) -> bool:
        """Whether a stop string has ended it while the engine still runs it."""
        return self.finished and self._end is None

    @property
    def output(self) -> CompletionOutput:
        """Output as of the last `read`."""
        logprobs = self.logprobs
        return CompletionOutput(
            self._parts,
            len(self._parts),
            self._token_ids,
            self.num_read,
            self.delta,
            self.finish_reason,
            self.stop_reason,
            self.message,
            self.index,
            None if logprobs is None else SampleLogprobs(logprobs, self.num_logprobs),
        )

    @property
    def num_logprobs(self) -> int:
        """Number of tokens that were read and have logprobs."""
        return 0 if self.logprobs is None else min(self.num_read, len(self.logprobs))

    @property
    def token_ids(self) -> list[int]:
        """Token ids that were read."""
        return self._token_ids[: self.num_read]

    def read(self) -> bool:
        """Read news; return whether there was any. If not, `delta` is empty.

        The end is read after all tokens before it.
        """
        num_read, end = self.num_read, self._end
        num_new = len(self._token_ids) - num_read
        # Fast path of streaming, where each token is read as it arrives.
        if num_new == 1 and end is None and self._push is not None:
            self.delta = delta = self._push(self._token_ids[num_read])
            if delta:
                self._parts.append(delta)
            self.num_read = num_read + 1
            return True
        if num_new != 1 or self.finished:  # which is seldom, when tokens are read as they come
            if self.finished or (num_new == 0 and end is None):
                self.delta = ""
                return False
            # A long backlog is read in slices, the end only with the last one.
            if num_new > (num_most := self._slice()):
                num_new, end = num_most, None
                self._progress.is_behind = True
        delta, stop = "", None
        if self._text is not None:
            token_ids = self._token_ids[num_read : num_read + num_new]
            delta, stop, num_new = self._text.read(token_ids, num_read, end)
            self._push = self._text.push
            if delta:
                self._parts.append(delta)
        self.delta = delta
        self.num_read = num_read + num_new
        if stop is not None:
            self._finish("stop", stop)
        elif end is not None:
            assert end.finish_reason is not None, "it is an end"
            self.is_invalid = end.code == "invalid_request"
            self._finish(end.finish_reason, end.stop_cause or end.stop_reason, end.message)
        return True

    def _slice(self) -> int:
        """Return how many tokens may be read at once without blocking the event loop."""
        if self._text is None:
            return sys.maxsize
        return max(1, self._text.tokens_per_slice // self._progress.num_unread)

    def _finish(
        self, reason: FinishReason, stop_reason: int | str | None, message: str | None = None
    ) -> None:
        self.finish_reason, self.stop_reason, self.message = reason, stop_reason, message
        self.finished = True
        self._progress.num_unread -= 1
        if not self.ended:  # a stop string that the engine does not know
            self._set_ended()

    def _set_ended(self) -> None:
        self.ended = True
        self._progress.sample_ended()
