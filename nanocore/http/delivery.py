"""An answer on its way out, driven by the process's `DeliveryLoop`.

A `send` is run by hand. One that does not return at once, because its client reads slowly, gets a
task; until it is through, tokens pile up as token ids, and come merged in the next chunk. So a slow
reader costs kilobytes, and nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator, Sequence
from typing import Any, Protocol

from nanocore.client.chat.answer_stream import AnswerStream
from nanocore.client.chat.events import ChatEvent, Finished
from nanocore.http.errors import HttpError, bad_request, unavailable
from nanocore.http.exchange import JSON, Exchange
from nanocore.protocol.errors import NanocoreError


class Encoder(Protocol):
    """Events to bytes, in one dialect; pure, and made for one request.

    is_stream: what `feed` returns is sent as it comes; else all of it is kept, and `finish` returns
    the whole. keep_alive: what says that nothing has come yet.
    """

    is_stream: bool
    keep_alive: bytes

    def feed(self, number: int, events: Sequence[ChatEvent], num_output_tokens: int) -> bytes:
        """What these events of the request's prompt of this number say; may be empty.

        num_output_tokens: of that prompt, so far.
        """
        ...

    def finish(self) -> bytes:
        """What ends it, when all samples of all prompts are finished."""
        ...

    def fail(self, error: HttpError) -> bytes:
        """What ends a stream, after its first bytes, when it fails."""
        ...


class Delivery:
    """The answers to one request's prompts, on their way to its client.

    Args:
        exchange: the request.
        answers: of its prompts, in order. Closed when the delivery is over.
        encoder: of its dialect.
    """

    def __init__(
        self,
        exchange: Exchange,
        answers: Sequence[AnswerStream],
        encoder: Encoder,
    ) -> None:
        self._exchange = exchange
        self._send = exchange.send
        self._record = exchange.record
        self._write_chunk = exchange.chunk_writer
        self._answers = answers
        self._encoder = encoder
        self._loop = exchange.state.deliveries
        self._unfinished = [*range(len(answers))]
        self._num_answered = 0
        self._is_ready = False
        self._is_over = False
        self._is_quiet = False
        self._blocked: asyncio.Task[None] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._bug: BaseException | None = None
        for tool_prompt in filter(None, (answer.tool_prompt for answer in answers)):
            exchange.reply_headers[b"nanocore-tool-prompt"] = tool_prompt.encode()

    async def run(self) -> None:
        """Deliver until the end, or until the client leaves: then its requests are aborted."""
        self._task = asyncio.current_task()
        self._loop.add(self)
        try:
            for answer in self._answers:
                listen = answer.listen if self._encoder.is_stream else answer.on_end
                listen(self._wake)
            while (await self._exchange.receive())["type"] != "http.disconnect":
                pass  # a body that came with the request is of no interest
            if not self._is_over:
                self._exchange.note_disconnect()
        except asyncio.CancelledError:
            if self._bug is None:
                raise
            raise self._bug from None
        finally:
            self._close()

    def step(self) -> None:
        """Send what is new. Called by the loop after `wake`."""
        self._is_ready = False
        if self._blocked is not None or self._is_over:
            return
        try:
            body = self._read()
            if body:
                self._write(body)
        except Exception as error:
            self._show_bug(error)

    def tick(self) -> None:
        """Say that the stream lives, if it has said nothing since the last tick."""
        if self._is_over or self._blocked is not None or not self._encoder.is_stream:
            return
        if self._is_quiet:
            try:
                self._write(self._encoder.keep_alive)
            except Exception as error:
                self._show_bug(error)
        self._is_quiet = True

    def fail(self, error: HttpError) -> None:
        """End it with this error; one whose client does not read is cut later."""
        if self._blocked is None and not self._is_over:
            try:
                self._end_with(error, b"")
            except Exception as bug:
                self._show_bug(bug)

    # -- inside -----------------------------------------------------------------------------------

    def _show_bug(self, error: Exception) -> None:
        """One of ours must end the request that shows it, and nothing else."""
        self._bug = error
        if self._task is not None:
            self._task.cancel()

    def _wake(self) -> None:
        if not self._is_ready:
            self._is_ready = True
            self._loop.wake(self)

    def _read(self) -> bytes:
        """What is to be sent, and more will follow; the end is sent here."""
        if self._num_answered < len(self._answers) and not self._all_answered():
            return b""
        body = b""
        has_finished = False
        for number in self._unfinished:
            answer = self._answers[number]
            try:
                events = answer.read()
            except NanocoreError as error:
                self._end_with(self._exchange.http_error(error), body)
                return b""
            if events:
                if self._record is not None:
                    self._record.saw(events, answer)
                body += self._encoder.feed(number, events, answer.num_output_tokens)
                last = events[-1]
                if type(last) is Finished and last.message is not None:
                    self._end_with(_engine_error(last), body)
                    return b""
            if answer.is_behind:
                self._wake()
            elif answer.finished:
                has_finished = True
        if has_finished:
            self._unfinished = [n for n in self._unfinished if not self._answers[n].finished]
            if not self._unfinished:
                self._end(200, body + self._encoder.finish())
                return b""
        return body

    def _all_answered(self) -> bool:
        """Before that nothing begins: one of several prompts may be refused, with its status."""
        answers = self._answers
        while self._num_answered < len(answers) and answers[self._num_answered].is_answered:
            self._exchange.note_ignored(answers[self._num_answered].not_held)
            self._num_answered += 1
        return self._num_answered == len(answers)

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
        """body: what came before it in this turn."""
        self._exchange.note_error(error)
        if self._exchange.has_started:
            self._end(200, body + self._encoder.fail(error))
        else:
            self._exchange.reply_headers.update(error.headers)
            self._end(error.status, self._exchange.error_body(error))
        self._close_answers()

    async def _send_all(self, *messages: dict[str, Any]) -> None:
        for message in messages:
            await self._send(message)

    def _drive(self, sending: Coroutine[Any, Any, None]) -> None:
        """Run a `send` to its end at once; if it waits for its client, in a task."""
        try:
            awaited = sending.send(None)
        except StopIteration:
            return
        self._blocked = asyncio.ensure_future(self._rest(_Resumed(sending, awaited)))

    async def _rest(self, sending: _Resumed) -> None:
        await sending
        self._blocked = None
        self.step()

    def _close(self) -> None:
        self._is_over = True
        self._loop.remove(self)
        if self._blocked is not None:
            self._blocked.cancel()
        self._close_answers()

    def _close_answers(self) -> None:
        for answer in self._answers:
            answer.close()


class _Resumed:
    """A coroutine that was begun by hand, and waits for this: to be awaited to its end."""

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
    """Of a sample that the engine has ended for a reason of its own."""
    if end.finish_reason == "abort":
        return unavailable(end.message or "")
    if end.is_invalid:
        return bad_request(end.message or "")
    return HttpError(500, end.message or "", "internal_error")
