"""AnswerStream: the events of an answer, read without awaiting.

A listener is called when there is news, so one loop can serve many answers in one iteration of the
event loop. `events` is the same for a caller with its own task.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from nanocore.client.chat.constraints import FormNames
from nanocore.client.chat.events import (
    ChatEvent,
    Failed,
    Finished,
    Logprobs,
    Reasoning,
    Started,
    Text,
    ToolArguments,
    ToolBegin,
    Usage,
)
from nanocore.client.chat.parsing.stream_reader import OutputParser, ParsedEvent
from nanocore.client.requests.request_outputs import SampleLogprobs
from nanocore.client.requests.request_stream import RequestStream
from nanocore.client.requests.sample import Sample
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import EngineOverloadedError, InvalidRequestError, NanocoreError


class AnswerStream:
    """A response that is being generated. It has one reader.

    Args:
        request: its stream; `listen` and `on_end` there tell of news that `read` may find.
        new_parser: makes the parser of the sample with this index.
        tokenizer: the model's.
        reasoning_end: mark that ends the reasoning, for counting reasoning tokens.
        omits_tools: the model does not see the request's tools.
        form_names: the caller's names of the structured output, for errors and `not_held`.
    """

    def __init__(
        self,
        request: RequestStream,
        new_parser: Callable[[int], OutputParser],
        tokenizer: Tokenizer,
        reasoning_end: str | None = None,
        omits_tools: bool = False,
        form_names: FormNames | None = None,
    ) -> None:
        self.request = request
        self.form_names = form_names or FormNames()
        self.omits_tools = omits_tools
        self.tokenizer = tokenizer
        self.reasoning_end: int | None = None
        if reasoning_end is not None:
            self.reasoning_end = tokenizer.backend.token_to_id(reasoning_end)
        self._new_parser = new_parser
        self._samples: list[_SampleEvents] = []
        self._has_started = False

    @property
    def finished(self) -> bool:
        """Whether everything was read, or reading has failed."""
        return self.request.finished

    @property
    def not_held(self) -> Sequence[str]:
        """Parts of a lenient schema that the engine's grammar lacks; known once answered."""
        return self.form_names.not_held(self.request.not_held)

    def read(self) -> list[ChatEvent]:
        """Return new events; of a long backlog only some, so that the event loop is not blocked.

        Raises:
            NanocoreError: the request was refused or has failed, or the engine is gone. Raised once
                everything that came before was read.
        """
        request = self.request
        events: list[ChatEvent] = []
        try:
            is_new = request.advance()
        except (InvalidRequestError, EngineOverloadedError) as error:
            self.form_names.rename(error)
            raise
        if is_new:
            if not self._has_started:
                self._start(events)
            for sample in self._samples:
                sample.read(events)
        return events

    def close(self) -> None:
        """Stop reading: the request is aborted unless it has ended. Idempotent."""
        self.request.close()

    async def events(self) -> AsyncGenerator[ChatEvent, None]:
        """Yield all events as they arrive; leaving aborts the request. Raises NanocoreError."""
        try:
            while not self.finished:
                events = self.read()
                for event in events:
                    yield event
                if self.request.progress.is_behind:
                    await asyncio.sleep(0)
                elif not events:
                    await self.request.news()
        except NanocoreError as error:
            if self._has_started:
                yield Failed(error)
            raise
        finally:
            self.close()

    def _start(self, events: list[ChatEvent]) -> None:
        request = self.request
        self._has_started = True
        self._samples = [
            _SampleEvents(self, sample, self._new_parser(sample.index))
            for sample in request.samples
        ]
        events.append(
            Started(
                request.request_id,
                request.prompt_token_ids,
                request.samples[0].num_cached_tokens or 0,
                request.seed,
                request.prompt_logprobs,
                self.not_held,
            )
        )


class _SampleEvents:
    """One sample's events so far."""

    def __init__(self, answer: AnswerStream, sample: Sample, parser: OutputParser) -> None:
        self._answer = answer
        self._sample = sample
        self._parser = parser
        self._reasoning: list[str] = []
        self._has_called = False
        self._bare_call: int | None = None
        self._num_logprobs = 0
        self._is_finished = False

    def read(self, events: list[ChatEvent]) -> None:
        sample = self._sample
        if sample.delta:
            for event in self._parser.feed(sample.delta):
                if type(event) is not Text or self._bare_call is not None:
                    self._note(event, events)
                events.append(event)
        if sample.finished and not self._is_finished:
            self._end(events)
        elif sample.logprobs is not None:
            self._add_logprobs(events)

    def _end(self, events: list[ChatEvent]) -> None:
        self._is_finished = True
        for event in self._parser.finish():
            self._note(event, events)
            events.append(event)
        if self._sample.finish_reason == "stop":
            self._add_no_arguments(events)
        self._add_logprobs(events)
        events.append(self._finished())

    def _add_logprobs(self, events: list[ChatEvent]) -> None:
        columns, num_read = self._sample.logprobs, self._sample.num_logprobs
        if columns is not None and num_read > self._num_logprobs:
            new = SampleLogprobs(columns, num_read)[self._num_logprobs :]
            self._num_logprobs = num_read
            events.append(Logprobs(new, self._sample.index))

    def _note(self, event: ParsedEvent, events: list[ChatEvent]) -> None:
        if isinstance(event, ToolArguments):
            self._bare_call = None
            return
        self._add_no_arguments(events)
        if isinstance(event, Reasoning):
            self._reasoning.append(event.delta)
        elif isinstance(event, ToolBegin):
            self._has_called = True
            self._bare_call = event.tool_index

    def _add_no_arguments(self, events: list[ChatEvent]) -> None:
        # Clients parse arguments as JSON, so a call without any gets an empty object.
        if self._bare_call is not None:
            events.append(ToolArguments(self._bare_call, "{}", self._sample.index))
            self._bare_call = None

    def _finished(self) -> Finished:
        sample, reason = self._sample, self._sample.finish_reason
        assert reason is not None, "it has ended"
        request, names = self._answer.request, self._answer.form_names
        usage = Usage(
            len(request.prompt_token_ids),
            request.samples[0].num_cached_tokens or 0,
            sample.num_read,
            self._num_reasoning_tokens(),
        )
        is_cut = isinstance(
            sample.stop_reason, str
        )  # by text or a repetition, perhaps inside a call
        return Finished(
            "tool_calls" if reason == "stop" and self._has_called and not is_cut else reason,
            usage,
            sample.stop_reason,
            names.named(sample.message) if sample.message is not None else None,
            sample.index,
            sample.is_invalid,
        )

    def _num_reasoning_tokens(self) -> int:
        if not self._reasoning:
            return 0
        end, token_ids = self._answer.reasoning_end, self._sample.token_ids
        if end is not None and end in token_ids:
            return token_ids.index(end) + 1
        text = "".join(self._reasoning)
        num_tokens = len(self._answer.tokenizer.encode(text, add_special_tokens=False))
        return min(num_tokens, len(token_ids))
