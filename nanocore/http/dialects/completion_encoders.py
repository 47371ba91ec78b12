"""Events to what /v1/completions answers: one object, or a stream of chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final, TypeAlias

import msgspec

from nanocore.client.chat.events import ChatEvent, Finished, Logprobs, Started, Text
from nanocore.http.dialects.encoders import ChunkEncoder, WholeEncoder
from nanocore.http.dialects.logprobs import prompt_logprobs
from nanocore.http.dialects.sse import around, data, escaped
from nanocore.http.dialects.text_logprobs import Echo, LogprobsShown, TextLogprobs, TextOffsets
from nanocore.http.dialects.usage import UsageSum

_TEXT: Final = "\x00text"
"""No text of a chunk but the place of one."""
NUM_SEEDS: Final = 2**53
"""Of sample i it is the first one's, plus i, modulo this."""
SampleEvent: TypeAlias = Text | Logprobs | Finished


class CompletionStyle(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer says beside its events, and which of them it shows.

    fingerprint: equal ones promise equal answers to equal requests. num_samples: of each prompt.
    logprobs: None if none are shown. shows_output: if not, the tokens that the engine had to make
    are left out. shows_prompt: with vLLM's `prompt_logprobs`. skip_special_tokens: they are not in
    the text. echoes: of each prompt, if they go before their answers.
    """

    id: str
    created_s: int
    model: str
    fingerprint: str | None
    num_samples: int
    logprobs: LogprobsShown | None
    shows_output: bool
    shows_prompt: bool
    skip_special_tokens: bool
    echoes: Sequence[Echo]

    def head(self) -> dict[str, Any]:
        """The fields with which an object begins."""
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def echo(self, number: int) -> Echo | None:
        """Of this prompt."""
        return self.echoes[number] if self.echoes else None


class PromptAnswers:
    """The samples of one prompt: where their tokens begin, and their seeds."""

    def __init__(self, style: CompletionStyle, number: int, started: Started) -> None:
        self._style = style
        self._started = started
        self._echo = style.echo(number)
        self._offsets: dict[int, TextOffsets] = {}

    def seed(self, index: int) -> int | None:
        """Of the sample of this index."""
        first = self._started.seed
        return None if first is None else (first + index) % NUM_SEEDS

    def echoed_logprobs(self) -> TextLogprobs | None:
        """The prompt's own, if they are shown."""
        shown, found = self._style.logprobs, self._started.prompt_logprobs
        if self._echo is None or shown is None or found is None:
            return None
        columns = TextLogprobs()
        # Fewer of them than tokens have come of a prompt that was not computed to its end.
        tokens = zip(self._started.prompt_token_ids, found, self._echo.offsets, strict=False)
        shown.add(columns, tokens)
        return columns

    def add_logprobs(self, columns: TextLogprobs, event: Logprobs) -> None:
        """Append those of new tokens."""
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
    """Implements `delivery.Encoder`.

    with_usage: a last chunk has it. always_usage: every chunk has it, so far.
    """

    def __init__(self, style: CompletionStyle, with_usage: bool, always_usage: bool) -> None:
        super().__init__(style.head(), with_usage)
        self._style = style
        self._always_usage = always_usage
        self._is_plain = style.shows_output and not always_usage
        self._texts: dict[int, tuple[bytes, bytes]] = {}
        self._prompts: dict[int, PromptAnswers] = {}
        self._num_tokens: dict[int, int] = {}

    def feed(self, number: int, events: Sequence[ChatEvent], num_output_tokens: int) -> bytes:
        """The chunks of these events."""
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

    # -- inside -----------------------------------------------------------------------------------

    def _start(self, number: int, event: Started) -> Iterator[bytes]:
        """The prompt, before each of its answers."""
        self._usage.add_prompt(len(event.prompt_token_ids), event.num_cached_tokens)
        prompt = PromptAnswers(self._style, number, event)
        self._prompts[number] = prompt
        echo = self._style.echo(number)
        if echo is None:
            return
        logprobs = prompt.echoed_logprobs()
        if echo.text or logprobs is not None:
            for index in range(self._style.num_samples):
                yield self._data(number, index, text=echo.text, logprobs=logprobs)

    def _chunk(self, number: int, events: list[SampleEvent]) -> bytes:
        """All that is new of a sample."""
        style = self._style
        index = events[0].index
        text = ""
        logprobs: TextLogprobs | None = None
        more: dict[str, Any] = {}
        for event in events:
            if isinstance(event, Finished):
                more = ending(event, style, self._prompts[number])
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
        return self._data(number, index, text=text, logprobs=logprobs, **more)

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


class CompletionAnswerEncoder(WholeEncoder):
    """Implements `delivery.Encoder`: the whole answer at its end."""

    def __init__(self, style: CompletionStyle) -> None:
        self._style = style
        self._usage = UsageSum()
        self._prompts: dict[int, PromptAnswers] = {}
        self._choices: dict[int, _Choice] = {}

    def feed(self, number: int, events: Sequence[ChatEvent], num_output_tokens: int) -> bytes:
        """Keep them."""
        if events and isinstance(events[0], Started):
            self._start(number, events[0])
        for of_one in by_sample(events):
            for event in of_one:
                self._add(number, event)
        return b""

    def finish(self) -> bytes:
        """The answer."""
        choices = [self._choices[index].as_object(index) for index in sorted(self._choices)]
        whole = {**self._style.head(), "choices": choices, "usage": self._usage.as_object()}
        return msgspec.json.encode(whole)

    # -- inside -----------------------------------------------------------------------------------

    def _start(self, number: int, event: Started) -> None:
        style = self._style
        self._usage.add_prompt(len(event.prompt_token_ids), event.num_cached_tokens)
        prompt = self._prompts[number] = PromptAnswers(style, number, event)
        echo = style.echo(number)
        more: dict[str, Any] = {}
        if style.shows_prompt and event.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_logprobs(event.prompt_logprobs)
        for index in range(style.num_samples):
            choice = _Choice(more=dict(more))
            if echo is not None:
                choice.parts.append(echo.text)
            if style.logprobs is not None:
                choice.logprobs = prompt.echoed_logprobs() or TextLogprobs()
            self._choices[number * style.num_samples + index] = choice

    def _add(self, number: int, event: SampleEvent) -> None:
        style = self._style
        choice = self._choices[number * style.num_samples + event.index]
        if isinstance(event, Finished):
            choice.more |= ending(event, style, self._prompts[number])
            if style.shows_output:
                self._usage.add_sample(event.usage)
        elif not style.shows_output:
            return
        elif isinstance(event, Text):
            choice.parts.append(event.delta)
        elif choice.logprobs is not None:
            self._prompts[number].add_logprobs(choice.logprobs, event)


class _Choice(msgspec.Struct):
    """One sample so far. more: fields beside its text."""

    parts: list[str] = []
    logprobs: TextLogprobs | None = None
    more: dict[str, Any] = {}

    def as_object(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(self.parts),
            "logprobs": self.logprobs,
            **self.more,
        }


def by_sample(events: Sequence[ChatEvent]) -> Iterator[list[SampleEvent]]:
    """What a sample says at a time; a completion has nothing but text."""
    of_samples = [event for event in events if isinstance(event, SampleEvent)]
    for _, of_one in groupby(of_samples, key=lambda event: event.index):
        yield list(of_one)


def ending(event: Finished, style: CompletionStyle, prompt: PromptAnswers) -> dict[str, Any]:
    """What a choice says at its end. seed: the same one brings the same answer, alone as well."""
    is_shown = style.shows_output or event.finish_reason not in ("stop", "length")
    return {
        "finish_reason": event.finish_reason if is_shown else "length",
        "stop_reason": event.stop_reason if is_shown else None,
        "seed": prompt.seed(event.index),
    }
