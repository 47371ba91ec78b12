"""Outputs of a request to the events of its answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator

from nanocore.client.chat.events import (
    ChatEvent,
    Failed,
    Finished,
    Logprobs,
    Reasoning,
    Started,
    ToolArguments,
    ToolBegin,
    Usage,
)
from nanocore.client.chat.parsing.parser import OutputParser, ParsedEvent
from nanocore.client.outputs import CompletionOutput, RequestOutput
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import NanocoreError


async def chat_events(
    outputs: AsyncIterable[RequestOutput],
    new_parser: Callable[[int], OutputParser],
    tokenizer: Tokenizer,
) -> AsyncGenerator[ChatEvent, None]:
    """The events of these outputs.

    new_parser: of the sample of this index.

    Raises:
        NanocoreError: what the outputs raise; after Started, Failed says it first.
    """
    samples: dict[int, _SampleEvents] = {}
    started = False
    try:
        async for output in outputs:
            if not started:
                started = True
                yield Started(
                    output.request_id, output.prompt_token_ids, output.num_cached_tokens or 0
                )
            for completion in output.outputs:
                sample = samples.get(completion.index)
                if sample is None:
                    sample = _SampleEvents(new_parser(completion.index), tokenizer)
                    samples[completion.index] = sample
                for event in sample.read(completion, output):
                    yield event
    except NanocoreError as error:
        if started:
            yield Failed(error)
        raise


class _SampleEvents:
    """One sample's events so far."""

    def __init__(self, parser: OutputParser, tokenizer: Tokenizer) -> None:
        self._parser = parser
        self._tokenizer = tokenizer
        self._reasoning: list[str] = []
        self._has_called = False
        self._bare_call: int | None = None
        self._num_logprobs = 0
        self._is_finished = False

    def read(self, completion: CompletionOutput, output: RequestOutput) -> Iterator[ChatEvent]:
        """What is new."""
        if self._is_finished:
            return
        if completion.delta:
            yield from self._noted(self._parser.feed(completion.delta))
        ends = completion.finish_reason is not None
        if ends:
            yield from self._noted(self._parser.finish())
            if completion.finish_reason == "stop":
                yield from self._no_arguments(completion.index)
        logprobs = completion.logprobs
        if logprobs is not None and len(logprobs) > self._num_logprobs:
            new = logprobs[self._num_logprobs :]
            self._num_logprobs = len(logprobs)
            yield Logprobs(new, completion.index)
        if ends:
            self._is_finished = True
            yield self._finished(completion, output)

    def _noted(self, events: list[ParsedEvent]) -> Iterator[ParsedEvent]:
        for event in events:
            if isinstance(event, ToolArguments):
                self._bare_call = None
            else:
                yield from self._no_arguments(event.index)
            if isinstance(event, Reasoning):
                self._reasoning.append(event.delta)
            elif isinstance(event, ToolBegin):
                self._has_called = True
                self._bare_call = event.tool_index
            yield event

    def _no_arguments(self, index: int) -> Iterator[ParsedEvent]:
        """What a call that the model wrote without any has: clients read them as JSON."""
        if self._bare_call is not None:
            yield ToolArguments(self._bare_call, "{}", index)
            self._bare_call = None

    def _finished(self, completion: CompletionOutput, output: RequestOutput) -> Finished:
        reason = completion.finish_reason
        assert reason is not None, "it has ended"
        usage = Usage(
            len(output.prompt_token_ids),
            output.num_cached_tokens or 0,
            completion.num_tokens,
            self._num_reasoning_tokens(completion),
        )
        return Finished(
            "tool_calls" if reason == "stop" and self._has_called else reason,
            usage,
            completion.stop_reason,
            completion.message,
            completion.index,
        )

    def _num_reasoning_tokens(self, completion: CompletionOutput) -> int:
        """Up to the token that ends it; if no single one does, as many as its text has."""
        if not self._reasoning:
            return 0
        end = self._tokenizer.backend.token_to_id("</think>")
        token_ids = completion.token_ids
        if end is not None and end in token_ids:
            return token_ids.index(end) + 1
        text = "".join(self._reasoning)
        return min(len(self._tokenizer.encode(text, add_special_tokens=False)), len(token_ids))
