"""One request's output on the client: collected as it arrives, turned into text as it is read.

The connection only appends token ids; a consumer that reads slowly costs one list, not a queue of
messages, and finds everything merged. Detokenization and stop strings run when the consumer reads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from nanocore.client.detokenizer import IncrementalDetokenizer
from nanocore.client.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanocore.client.stop_strings import StopStringMatcher
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import NanocoreError
from nanocore.protocol.messages import Event, FinishReason
from nanocore.protocol.sampling import SamplingParams


class RequestStream:
    """An async iterator of RequestOutput with one reader, and what feeds it.

    Args:
        request_id, prompt, prompt_token_ids, params: the request.
        tokenizer: None if the request wants no text.
        leave: ends the request early; called with this stream, at most once, not after its end.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        leave: Callable[[RequestStream], None],
    ) -> None:
        self.request_id = request_id
        self.handle: int | None = None  # the engine's name for it, once accepted
        self._prompt, self._prompt_token_ids = prompt, prompt_token_ids
        self._leave = leave
        self._skip_special_tokens, self._tokenizer = params.skip_special_tokens, tokenizer
        self._detokenizer: IncrementalDetokenizer | None = None
        self._keeps_stop = params.include_stop_str_in_output
        stops = params.stop_strings
        self._stops = StopStringMatcher(stops, self._keeps_stop) if stops else None
        # What has arrived; of the tokens, the first `_num_read` were read.
        self._token_ids: list[int] = []
        self._end: Event | None = None
        self._error: NanocoreError | None = None
        self._num_cached_tokens: int | None = None
        self._start_s = time.monotonic()
        self._first_token_s: float | None = None
        self._end_s: float | None = None
        # Who waits: a reader for anything, or `final` for the end.
        self._news: asyncio.Future[None] | None = None
        self._over: asyncio.Future[None] | None = None
        # What was read.
        self.finished = False
        self._num_read = 0
        self._parts: list[str] = []

    # -- called by the connection -----------------------------------------------------------------

    def push_token(self, token_id: int) -> None:
        """Add one new token, and wake the reader if it waits for one."""
        if self._first_token_s is None:
            self._first_token_s = time.monotonic()
        self._token_ids.append(token_id)
        if self._news is not None:
            self._wake()

    def push_tokens(self, token_ids: Iterable[int]) -> None:
        """Add new tokens, one or more, and wake the reader."""
        if self._first_token_s is None:
            self._first_token_s = time.monotonic()
        self._token_ids += token_ids
        self._wake()

    def push_event(self, event: Event) -> None:
        """Take in what an event says: cached tokens at the start, or how the request ended."""
        if event.num_cached_tokens is not None:
            self._num_cached_tokens = event.num_cached_tokens
        if event.finish_reason is not None:
            self._end = event
            self._end_s = time.monotonic()
            self._wake_all()

    def fail(self, error: NanocoreError) -> None:
        """End the stream with an error, which is raised in its reader."""
        self._error = error
        self._wake_all()

    # -- called by the consumer -------------------------------------------------------------------

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """Wait for news, and return everything that has arrived as one output.

        Raises:
            NanocoreError: the request was refused, failed in the engine, or the engine is gone.
        """
        while not self.finished:
            output = self.read()
            if output is not None:
                return output
            await self.news()
        raise StopAsyncIteration

    async def final(self) -> RequestOutput:
        """The last output. Reads once, at the end, unless stop strings need watching.

        Raises:
            NanocoreError: as `__anext__`.
        """
        if self._stops is None and self._end is None and self._error is None:
            self._over = asyncio.Future()
            await self._over
        last = None
        async for output in self:
            last = output
        assert last is not None, "a request ends with an output or an error"
        return last

    def news(self) -> asyncio.Future[None]:
        """To be awaited after `read` found nothing, and before it is called again."""
        self._news = asyncio.Future()
        return self._news

    def read(self) -> RequestOutput | None:
        """Take in what has arrived; None if that is nothing a consumer would notice.

        Raises:
            NanocoreError: as `__anext__`, once everything that came before was read.
        """
        end = self._end
        if self.finished or (end is None and len(self._token_ids) == self._num_read):
            if self._error is None or self.finished:
                return None
            self.finished = True
            raise self._error
        token_ids = self._token_ids[self._num_read :]
        delta, stop, num_used = self._to_text(token_ids, end)
        self._num_read += num_used
        finish_reason: FinishReason | None = None
        stop_reason: int | str | None = None
        message: str | None = None
        if stop is not None:
            self.close()
            self._end_s = time.monotonic()
            finish_reason, stop_reason = "stop", stop
        elif end is not None:
            self.finished = True
            finish_reason, stop_reason, message = end.finish_reason, end.stop_reason, end.message
        if delta:
            self._parts.append(delta)
        return RequestOutput(
            self.request_id,
            self._prompt,
            self._prompt_token_ids,
            [
                CompletionOutput(
                    self._parts,
                    len(self._parts),
                    self._token_ids,
                    self._num_read,
                    delta,
                    finish_reason,
                    stop_reason,
                    message,
                )
            ],
            self.finished,
            self._num_cached_tokens,
            self._metrics(),
        )

    def close(self) -> None:
        """Stop reading: the request is aborted unless it has ended. Idempotent."""
        if self.finished:
            return
        self.finished = True
        if self._end is None and self._error is None:
            self._leave(self)

    # -- inside -----------------------------------------------------------------------------------

    def _to_text(self, token_ids: list[int], end: Event | None) -> tuple[str, str | None, int]:
        """(text to show, stop string found or None, how many of the tokens were used)."""
        if self._tokenizer is None:
            return "", None, len(token_ids)
        if self._detokenizer is None:  # only now has the engine checked the prompt's ids
            self._detokenizer = IncrementalDetokenizer(
                self._tokenizer, self._prompt_token_ids, self._skip_special_tokens
            )
        shown = token_ids
        if end is not None and end.finish_reason == "stop" and not self._keeps_stop:
            shown = token_ids[:-1]  # the EOS or stop token itself is not text
        if self._stops is None:
            text = self._detokenizer.append(shown)
            if end is not None:
                text += self._detokenizer.flush()
            return text, None, len(token_ids)
        pieces = []
        for i, token_id in enumerate(shown):  # one by one: the result must not depend on merging
            text, stop = self._stops.push(self._detokenizer.append([token_id]))
            pieces.append(text)
            if stop is not None:
                return "".join(pieces), stop, i + 1
        stop = None
        if end is not None:
            text, stop = self._stops.push(self._detokenizer.flush())
            pieces.append(text if stop is not None else text + self._stops.flush())
        return "".join(pieces), stop, len(token_ids)

    def _metrics(self) -> RequestMetrics:
        start_s, first_s = self._start_s, self._first_token_s
        return RequestMetrics(
            None if first_s is None else first_s - start_s,
            (self._end_s or time.monotonic()) - start_s,
            self._num_read,
        )

    def _wake(self) -> None:
        news, self._news = self._news, None
        if news is not None and not news.done():
            news.set_result(None)

    def _wake_all(self) -> None:
        self._wake()
        if self._over is not None and not self._over.done():
            self._over.set_result(None)
