"""Delivery: sends the response of one request, driven by the process's `DeliveryLoop`.

`send` is stepped by hand. If it does not return at once, because the client reads slowly, it gets a
task; until that ends, tokens accumulate as token ids and arrive merged in the next chunk. So a slow
reader costs kilobytes and delays nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator, Sequence
from typing import Any, Protocol

from nanocore.client.chat.answer_stream import AnswerStream
from nanocore.client.chat.events import ChatEvent, Finished
from nanocore.http.exchange import JSON, Exchange
from nanocore.http.http_errors import HttpError, bad_request, unavailable
from nanocore.http.request_record import DISCONNECTED
from nanocore.protocol.errors import NanocoreError


class Encoder(Protocol):
    """Encodes the events of one request as bytes of one dialect.

    is_stream: what `feed` returns is sent at once; otherwise `finish` returns the whole response.
    keep_alive: what a silent stream sends.
    """

    is_stream: bool
    keep_alive: bytes

    def feed(self, number: int, events: Sequence[ChatEvent], num_output_tokens: int) -> bytes:
        """Encode new events; the result may be empty.

        number: index of the prompt within the request. num_output_tokens: of that prompt so far.
        """
        ...

    def finish(self) -> bytes:
        """Return the end of the response, after all samples of all prompts are finished."""
        ...

    def fail(self, error: HttpError) -> bytes:
        """Return the end of a stream that has begun and fails."""
        ...


class Delivery:
    """The response of one request on its way to the client.

    Args:
        exchange: the request.
        streams: of its prompts, in order; closed when the delivery is over.
        encoder: of its dialect.
    """

    def __init__(
        self, exchange: Exchange, streams: Sequence[AnswerStream], encoder: Encoder
    ) -> None:
        self._exchange = exchange
        self._send = exchange.send
        # Without spans nothing is noted: it would cost time for each token.
        self._record = exchange.record if exchange.state.spans is not None else None
        self._write_chunk = exchange.chunk_writer
        self._streams = streams
        self._encoder = encoder
        self._loop = exchange.state.deliveries
        self._unfinished = [*range(len(streams))]
        self._num_accepted = 0
        self._is_ready = False
        self._is_over = False
        self._is_quiet = False
        self._blocked: asyncio.Task[None] | None = None  # runs a `send` that waits for the client
        self._task: asyncio.Task[Any] | None = None
        self._bug: BaseException | None = None
        if any(stream.omits_tools for stream in streams):
            exchange.reply_headers[b"nanocore-tool-prompt"] = b"none"

    async def run(self) -> None:
        """Deliver until the end, or until the client disconnects, which aborts its requests."""
        self._task = asyncio.current_task()
        self._loop.add(self)
        try:
            for answer in self._streams:
                request = answer.request
                listen = request.listen if self._encoder.is_stream else request.on_end
                listen(self._wake)
            # The loop does the work; this task only notices the end of the connection, which the
            # server reports after a complete response, too.
            await self._exchange.disconnected()
            if not self._is_over:
                self._exchange.record.error = DISCONNECTED
        except asyncio.CancelledError:
            if self._bug is None:
                raise
            raise self._bug from None
        finally:
            self._is_over = True
            self._loop.remove(self)
            if self._blocked is not None:
                self._blocked.cancel()
            self._close_streams()

    def step(self) -> None:
        """Send what is new. The loop calls it after `wake`."""
        self._is_ready = False
        if self._blocked is not None or self._is_over:
            return  # `_rest` steps again
        try:
            body = self._read()
            if body:
                self._write(body)
        except Exception as error:
            self._raise_in_run(error)

    def tick(self) -> None:
        """Send a keep-alive if nothing was sent since the last tick."""
        if self._is_over or self._blocked is not None or not self._encoder.is_stream:
            return
        if self._is_quiet:
            try:
                self._write(self._encoder.keep_alive)
            except Exception as error:
                self._raise_in_run(error)
        self._is_quiet = True

    def fail(self, error: HttpError) -> None:
        """End the response with this error, unless its client does not read."""
        if self._blocked is None and not self._is_over:
            try:
                self._end_with(error, b"")
            except Exception as bug:
                self._raise_in_run(bug)

    def _raise_in_run(self, error: Exception) -> None:
        # The loop calls for all requests: a bug must end the request that shows it and no other.
        self._bug = error
        if self._task is not None:
            self._task.cancel()

    def _wake(self) -> None:
        if not self._is_ready:
            self._is_ready = True
            self._loop.wake(self)

    def _read(self) -> bytes:
        """Return what to send while more will follow; the end of a response is sent here."""
        if self._num_accepted < len(self._streams) and not self._all_accepted():
            return b""
        body = b""
        has_finished = False
        for number in self._unfinished:
            stream = self._streams[number]
            try:
                events = stream.read()
            except NanocoreError as error:
                self._end_with(self._exchange.http_error(error), body)
                return b""
            if events:
                if self._record is not None:
                    self._record.note_events(events, stream.request.progress)
                body += self._encoder.feed(number, events, stream.request.num_output_tokens)
                last = events[-1]
                if type(last) is Finished and last.message is not None:
                    self._end_with(_engine_error(last), body)
                    return b""
            # It parses a bounded amount per read, so that others have a turn.
            if stream.request.progress.is_behind:
                self._wake()
            elif stream.finished:
                has_finished = True
        if has_finished:
            self._unfinished = [n for n in self._unfinished if not self._streams[n].finished]
            if not self._unfinished:
                self._end(200, body + self._encoder.finish())
                return b""
        return body

    def _all_accepted(self) -> bool:
        # Nothing is sent before that: if one of several prompts is refused, the response must
        # still get its status.
        streams = self._streams
        while self._num_accepted < len(streams) and streams[self._num_accepted].request.is_answered:
            self._exchange.note_ignored(streams[self._num_accepted].not_held)
            self._num_accepted += 1
        return self._num_accepted == len(streams)

    def _write(self, body: bytes) -> None:
        self._is_quiet = False
        if not self._exchange.has_started:
            self._start_stream(body)
            return
        if self._write_chunk is None or not self._write_chunk(body):
            self._drive(self._send({"type": "http.response.body", "body": body, "more_body": True}))

    def _start_stream(self, body: bytes, more_body: bool = True) -> None:
        headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        start = self._exchange.start(200, b"text/event-stream; charset=utf-8", headers)
        rest = {"type": "http.response.body", "body": body, "more_body": more_body}
        self._drive(self._send_all(start, rest))

    def _end(self, status: int, body: bytes) -> None:
        self._is_over = True
        last = {"type": "http.response.body", "body": body}
        if self._exchange.has_started:
            self._drive(self._send(last))
        elif self._encoder.is_stream and status == 200:
            self._start_stream(body, more_body=False)
        else:
            headers = [(b"content-length", b"%d" % len(body))]
            self._drive(self._send_all(self._exchange.start(status, JSON, headers), last))

    def _end_with(self, error: HttpError, body: bytes) -> None:
        """End with an error. body: encoded in this step before it."""
        self._exchange.note_error(error)
        if self._exchange.has_started:
            self._end(200, body + self._encoder.fail(error))
        else:
            self._exchange.reply_headers.update(error.headers)
            self._end(error.status, self._exchange.error_body(error))
        self._close_streams()

    async def _send_all(self, *messages: dict[str, Any]) -> None:
        for message in messages:
            await self._send(message)

    def _drive(self, sending: Coroutine[Any, Any, None]) -> None:
        """Run a `send` to its end at once; if it waits for the client, continue it in a task."""
        try:
            awaited = sending.send(None)
        except StopIteration:
            return
        self._blocked = asyncio.ensure_future(self._rest(_Resumed(sending, awaited)))

    async def _rest(self, sending: _Resumed) -> None:
        await sending
        self._blocked = None
        self.step()

    def _close_streams(self) -> None:
        for stream in self._streams:
            stream.close()


class _Resumed:
    """Awaitable for the rest of a coroutine that was stepped by hand and waits for `awaited`."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], awaited: Any) -> None:
        self._coroutine = coroutine
        self._awaited = awaited

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            yield self._awaited
        except BaseException:  # cancelled
            self._coroutine.close()
            raise
        yield from self._coroutine.__await__()


def _engine_error(end: Finished) -> HttpError:
    if end.finish_reason == "abort":
        return unavailable(end.message or "")
    if end.is_invalid:
        return bad_request(end.message or "")
    return HttpError(500, end.message or "", "internal_error")
