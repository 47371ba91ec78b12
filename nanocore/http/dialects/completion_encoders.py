"""Encoders of /v1/completions: a whole text_completion, or a stream of chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from nanocore.client.chat.events import ChatEvent, Finished, Logprobs, Started, Text
from nanocore.http.dialects.encoding import (
    ChunkEncoder,
    OpenAIUsage,
    UsageSum,
    WholeEncoder,
    around,
    data,
    escaped,
)
from nanocore.http.dialects.openai_logprobs import (
    Echo,
    LogprobsShown,
    TextLogprobs,
    TextOffsets,
    prompt_logprobs,
)

_TEXT: Final = "\x00text"
"""Placeholder for the text of a chunk."""
NUM_SEEDS: Final = 2**53
"""Sample i has the first sample's seed plus i, modulo this."""
SampleEvent: TypeAlias = Text | Logprobs | Finished


class TextChoice(msgspec.Struct, kw_only=True):
    """One sample of one prompt. seed: reproduces this sample alone."""

    index: int
    text: str = ""
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    seed: int | None = None
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET


class TextCompletion(msgspec.Struct, kw_only=True):
    """OpenAI's text_completion. Choices are in the order of prompts, then samples."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[TextChoice]
    usage: OpenAIUsage


class CompletionStyle(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a response that is not in its events, and which of these it shows.

    head: first fields of the response. num_samples: of each prompt. logprobs: None shows none.
    shows_output: False for max_tokens=0, where the engine still samples a token. shows_prompt: with
    vLLM's `prompt_logprobs`. skip_special_tokens: they are not in the text. echoes: of each prompt,
    if they are requested.
    """

    head: dict[str, Any]
    num_samples: int
    logprobs: LogprobsShown | None
    shows_output: bool
    shows_prompt: bool
    skip_special_tokens: bool
    echoes: Sequence[Echo]

    def echo(self, number: int) -> Echo | None:
        return self.echoes[number] if self.echoes else None


class PromptSamples:
    """State of one prompt's samples: seeds and text offsets."""

    def __init__(self, style: CompletionStyle, number: int, started: Started) -> None:
        self._style = style
        self._started = started
        self._echo = style.echo(number)
        self._offsets: dict[int, TextOffsets] = {}

    def ending(self, event: Finished) -> dict[str, Any]:
        """Return the fields of a choice at its end."""
        first = self._started.seed
        is_shown = self._style.shows_output or event.finish_reason not in ("stop", "length")
        return {
            "finish_reason": event.finish_reason if is_shown else "length",
            "stop_reason": event.stop_reason if is_shown else None,
            "seed": None if first is None else (first + event.index) % NUM_SEEDS,
        }

    def echoed_logprobs(self) -> TextLogprobs | None:
        """Return the prompt's logprobs, if they are shown."""
        shown, found = self._style.logprobs, self._started.prompt_logprobs
        if self._echo is None or shown is None or found is None:
            return None
        columns = TextLogprobs()
        # There are fewer of them than tokens if the prompt was not computed to its end.
        tokens = zip(self._started.prompt_token_ids, found, self._echo.offsets, strict=False)
        shown.add(columns, tokens)
        return columns

    def add_logprobs(self, columns: TextLogprobs, event: Logprobs) -> None:
        style, shown = self._style, self._style.logprobs
        if shown is None:
            return
        offsets = self._offsets.get(event.index)
        if offsets is None:
            start = 0 if self._echo is None else len(self._echo.text)
            offsets = TextOffsets(
                shown.tokenizer, self._started.prompt_token_ids, style.skip_special_tokens, start
            )
            self._offsets[event.index] = offsets
        ids = [next(iter(candidates)) for candidates in event.tokens]
        shown.add(columns, zip(ids, event.tokens, map(offsets.next, ids), strict=True))


class CompletionStreamEncoder(ChunkEncoder):
    """Encoder of a stream of chunks; see `delivery.Encoder`.

    Args:
        style: of the response.
        with_usage: add a last chunk with the usage.
        always_usage: add the usage so far to every chunk.
    """

    def __init__(self, style: CompletionStyle, with_usage: bool, always_usage: bool) -> None:
        super().__init__(style.head, with_usage)
        self._style = style
        self._always_usage = always_usage
        self._is_plain = style.shows_output and not always_usage
        self._texts: dict[int, tuple[bytes, bytes]] = {}  # around a text, by choice
        self._prompts: dict[int, PromptSamples] = {}
        self._num_tokens: dict[int, int] = {}

    def feed(self, number: int, events: Sequence[ChatEvent], num_output_tokens: int) -> bytes:
        # Fast path of nearly every token: a text alone, encoded between two fixed pieces.
        if len(events) == 1 and self._is_plain:
            only = events[0]
            if type(only) is Text:
                index = number * self._style.num_samples + only.index
                before, after = self._texts.get(index) or self._around(index)
                return before + escaped(only.delta) + after
        self._num_tokens[number] = num_output_tokens
        chunks: list[bytes] = []
        if events and isinstance(events[0], Started):
            chunks += self._start(number, events[0])
        chunks += [self._chunk(number, of_one) for of_one in by_sample(events)]
        return b"".join(chunks)

    def _start(self, number: int, event: Started) -> Iterator[bytes]:
        self._usage.add_prompt(len(event.prompt_token_ids), event.num_cached_tokens)
        prompt = PromptSamples(self._style, number, event)
        self._prompts[number] = prompt
        echo = self._style.echo(number)
        if echo is None:
            return
        logprobs = prompt.echoed_logprobs()
        if echo.text or logprobs is not None:
            for index in range(self._style.num_samples):
                yield self._data(number, index, text=echo.text, logprobs=logprobs)

    def _chunk(self, number: int, events: list[SampleEvent]) -> bytes:
        style = self._style
        text = ""
        logprobs: TextLogprobs | None = None
        more: dict[str, Any] = {}
        for event in events:
            if isinstance(event, Finished):
                more = self._prompts[number].ending(event)
                if style.shows_output:
                    self._usage.add_sample(event.usage)
            elif not style.shows_output:
                continue
            elif isinstance(event, Text):
                text += event.delta
            else:
                logprobs = logprobs or TextLogprobs()
                self._prompts[number].add_logprobs(logprobs, event)
        if not (text or logprobs or more):
            return b""
        return self._data(number, events[0].index, text=text, logprobs=logprobs, **more)

    def _data(self, number: int, index: int, **fields: Any) -> bytes:
        chunk = self._object(number * self._style.num_samples + index, fields)
        if self._always_usage:
            num_tokens = sum(self._num_tokens.values()) if self._style.shows_output else 0
            chunk = self._with_count(chunk, num_tokens)
        return data(chunk)

    def _object(self, index: int, fields: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "text": "", "logprobs": None, "finish_reason": None, **fields}
        return {**self._head, "choices": [choice]}

    def _around(self, index: int) -> tuple[bytes, bytes]:
        found = around(self._object(index, {"text": _TEXT}), _TEXT)
        self._texts[index] = found
        return found


class CompletionEncoder(WholeEncoder):
    """Encoder of a whole `TextCompletion`; see `delivery.Encoder`."""

    def __init__(self, style: CompletionStyle) -> None:
        self._style = style
        self._usage = UsageSum()
        self._prompts: dict[int, PromptSamples] = {}
        self._choices: dict[int, TextChoice] = {}
        self._texts: dict[int, list[str]] = {}  # pieces of each choice's text

    def feed(self, number: int, events: Sequence[ChatEvent], num_output_tokens: int) -> bytes:
        if events and isinstance(events[0], Started):
            self._start(number, events[0])
        for of_one in by_sample(events):
            for event in of_one:
                self._add(number, event)
        return b""

    def finish(self) -> bytes:
        for index, pieces in self._texts.items():
            self._choices[index].text = "".join(pieces)
        whole = TextCompletion(
            **self._style.head,
            choices=[self._choices[index] for index in sorted(self._choices)],
            usage=self._usage.as_object(),
        )
        return msgspec.json.encode(whole)

    def _start(self, number: int, event: Started) -> None:
        style = self._style
        self._usage.add_prompt(len(event.prompt_token_ids), event.num_cached_tokens)
        prompt = self._prompts[number] = PromptSamples(style, number, event)
        echo = style.echo(number)
        for sample in range(style.num_samples):
            index = number * style.num_samples + sample
            choice = self._choices[index] = TextChoice(index=index)
            self._texts[index] = [] if echo is None else [echo.text]
            if style.shows_prompt and event.prompt_logprobs is not None:
                choice.prompt_logprobs = prompt_logprobs(event.prompt_logprobs)
            if style.logprobs is not None:
                choice.logprobs = prompt.echoed_logprobs() or TextLogprobs()

    def _add(self, number: int, event: SampleEvent) -> None:
        style = self._style
        index = number * style.num_samples + event.index
        choice = self._choices[index]
        if isinstance(event, Finished):
            for name, value in self._prompts[number].ending(event).items():
                setattr(choice, name, value)
            if style.shows_output:
                self._usage.add_sample(event.usage)
        elif not style.shows_output:
            return
        elif isinstance(event, Text):
            self._texts[index].append(event.delta)
        elif choice.logprobs is not None:
            self._prompts[number].add_logprobs(choice.logprobs, event)


def by_sample(events: Sequence[ChatEvent]) -> Iterator[list[SampleEvent]]:
    """Group consecutive events of one sample; a completion has only text and logprobs."""
    of_samples = [event for event in events if isinstance(event, SampleEvent)]
    for _, of_one in groupby(of_samples, key=lambda event: event.index):
        yield list(of_one)
