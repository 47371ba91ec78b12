"""Text of output tokens: incremental detokenization and stop strings.

The joined pieces equal the text that decoding prompt and output at once would add to the prompt's,
independently of how tokens are split into calls. There are two exceptions. A character that is
incomplete when the request ends is left out (decoded at once, it would be U+FFFD). Complete
characters made of byte tokens (<0x80>) are kept even next to invalid UTF-8 (decoded at once, the
whole run would be U+FFFD).

A stop string ends the text before it, also when it spans tokens. Text that may begin one is held
back. The engine knows no text, so the client finds stop strings and aborts the request.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from os.path import commonprefix
from typing import Final

from nanocore.client.token_texts import REPLACEMENT, TokenTexts
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.messages import Event
from nanocore.protocol.sampling import SamplingParams

MAX_CONTEXT_TOKENS: Final = 8
MAX_WINDOW_TOKENS: Final = 24
"""Above this, all but MAX_CONTEXT_TOKENS are dropped; rarely, because it costs a decode."""
MAX_CHARACTER_BYTES: Final = 4
MAX_HELD_TOKENS: Final = 16
"""Limit of held tokens: a character has at most four bytes, so more will never complete one."""


class IncrementalDetokenizer:
    """Turns one request's output tokens into text.

    Args:
        tokenizer: the model's.
        prompt_token_ids: the prompt, on which a leading space may depend.
        skip_special_tokens: leave special tokens out of the text.

    tokens_per_slice: number of tokens that take one or two milliseconds.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._source: _SingleTokens | _Window
        texts = tokenizer.token_texts(skip_special_tokens)
        if texts.are_exact:
            self._source = _SingleTokens(texts, prompt_token_ids)
        else:
            self._source = _Window(tokenizer, prompt_token_ids, skip_special_tokens)
        self.tokens_per_slice = self._source.tokens_per_slice
        self.push = self._source.push  # fast path for one token

    def append(self, token_ids: list[int]) -> str:
        """Return the text that these tokens complete."""
        if len(token_ids) == 1:
            return self.push(token_ids[0])
        return "".join(map(self.push, token_ids))

    def flush(self) -> str:
        """Return the text held back, when no more tokens will come."""
        return self._source.flush()


class _SingleTokens:
    """Source for tokens with context-free texts; only bytes of an incomplete character are kept."""

    tokens_per_slice: Final = 200  # 0.7 us each; 8 us when seen for the first time

    def __init__(self, texts: TokenTexts, prompt_token_ids: Sequence[int]) -> None:
        self._texts = texts
        self._bytes = b""
        self._is_first = not texts.joins_bytes and not any(
            texts[token_id] for token_id in reversed(prompt_token_ids)
        )

    def push(self, token_id: int) -> str:
        text = self._texts[token_id]
        if self._is_first and text:
            text = self._texts.first(token_id)
            self._is_first = False
        if type(text) is str:
            if not self._bytes or not text:
                return text
            text = text.encode()
        assert isinstance(text, bytes)
        data = self._bytes + text
        characters, num_bytes = codecs.utf_8_decode(data, "replace", False)
        self._bytes = data[num_bytes:]
        return characters

    def flush(self) -> str:
        # Incomplete bytes are dropped. Python holds back others, too (of surrogates): emit those.
        text = self._bytes.decode("utf-8", "replace")
        return "" if text == REPLACEMENT else text


class _Window:
    """Source for tokens with context-dependent texts: decodes the last few tokens together.

    Tokens without text are left out; they would push others out of the window.
    """

    tokens_per_slice: Final = 100  # 10 us each; 20 us if all are incomplete characters

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._is_decoded = partial(tokenizer.is_decoded, skip_special_tokens=skip_special_tokens)
        self._decode: Callable[[list[int]], str] = partial(
            tokenizer.backend.decode, skip_special_tokens=skip_special_tokens
        )
        last = islice(filter(self._is_decoded, reversed(prompt_token_ids)), MAX_CONTEXT_TOKENS)
        self._context = [*last][::-1]
        self._shown = self._decode(self._context)
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        if not self._is_decoded(token_id):
            return ""
        self._held.append(token_id)
        text = self._decode(self._context + self._held)
        if text.endswith(REPLACEMENT) and len(self._held) < MAX_HELD_TOKENS:
            return ""
        return self._take(text)

    def flush(self) -> str:
        return self._take(self._decode(self._context + self._held).removesuffix(REPLACEMENT))

    def _take(self, text: str) -> str:
        added = text[len(commonprefix([self._shown, text])) :]  # noqa: RUF071  these are no paths
        self._context += self._held
        self._shown = text
        self._held = []
        if len(self._context) > MAX_WINDOW_TOKENS:
            self._forget()
        return added

    def _forget(self) -> None:
        # Keep more tokens if the window would begin inside a character.
        for num_tokens in range(MAX_CONTEXT_TOKENS, MAX_CONTEXT_TOKENS + MAX_CHARACTER_BYTES):
            context = self._context[-num_tokens:]
            shown = self._decode(context)
            if REPLACEMENT not in shown:
                break
        self._context, self._shown = context, shown


class StopStringMatcher:
    """Finds stop strings in one request's text.

    Args:
        stops: non-empty strings. include: keep the stop string at the end of the text.
    """

    def __init__(self, stops: list[str], include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self._min_chars = min(map(len, stops))

    def push(self, text: str, is_sought: bool = True) -> tuple[str, str | None]:
        """Return (text that may be emitted, the stop string found or None).

        is_sought: whether stop strings that end in this text count. Of several matches the one that
        ends first wins, then the first in the list, so that the result does not depend on how the
        text was cut into pieces.
        """
        num_seen = len(self._held)
        if num_seen:
            text = self._held + text
            self._held = ""
        if is_sought and len(text) >= self._min_chars:
            found = [(end, stop) for stop in self._stops if (end := _end(text, stop, num_seen))]
            if found:
                end, stop = min(found, key=lambda match: match[0])
                return text[: end if self._include else end - len(stop)], stop
        num_held = 0
        for stop in self._stops:
            num_held = max(num_held, _overlap(text, stop))
        if num_held:
            text, self._held = text[:-num_held], text[-num_held:]
        return text, None

    def flush(self) -> str:
        """Return the text held back, when no more will come."""
        text, self._held = self._held, ""
        return text


def _end(text: str, stop: str, num_seen: int) -> int:
    """Return where `stop` first ends in `text`, beyond num_seen characters; 0 if nowhere."""
    start = text.find(stop, max(0, num_seen + 1 - len(stop)))
    return start + len(stop) if start >= 0 else 0


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    if not text:
        return 0
    last = text[-1]
    length = 1 + stop.rfind(last, 0, min(len(text), len(stop) - 1))
    while length and not text.endswith(stop[:length]):
        length = 1 + stop.rfind(last, 0, length - 1)
    return length


class SampleText:
    """Text of one sample: detokenization and stop strings.

    tokens_per_slice: limit for tokens that one read decodes, so that the event loop is not blocked.
    push: fast path of `read` for one token; None if stop strings must be found.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_token_ids, params.skip_special_tokens
        )
        self._keeps_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        stops = params.stop_strings
        self._stops = StopStringMatcher(stops, self._keeps_stop) if stops else None
        self.tokens_per_slice = self._detokenizer.tokens_per_slice
        self.push = self._detokenizer.push if self._stops is None else None

    def read(
        self, token_ids: list[int], num_read: int, end: Event | None
    ) -> tuple[str, str | None, int]:
        """Return (text to emit, stop string found or None, number of tokens used).

        num_read: tokens before these. end: of the sample, after these.
        """
        shown = token_ids
        if end is not None and end.finish_reason == "stop" and not self._keeps_stop:
            shown = token_ids[:-1]  # the EOS or stop token itself is not text
        if self._stops is not None:
            return self._read_to_stop(self._stops, shown, num_read, end, len(token_ids))
        text = self._detokenizer.append(shown)
        if end is not None:
            text += self._detokenizer.flush()
        return text, None, len(token_ids)

    def _read_to_stop(
        self,
        stops: StopStringMatcher,
        shown: list[int],
        num_read: int,
        end: Event | None,
        num_tokens: int,
    ) -> tuple[str, str | None, int]:
        pieces = []
        # As in vLLM V1: a stop string that ends within the first min_tokens is never found.
        num_exempt = self._min_tokens - num_read
        for i, token_id in enumerate(shown):  # one by one, whatever was merged
            text, stop = stops.push(self._detokenizer.append([token_id]), i >= num_exempt)
            pieces.append(text)
            if stop is not None:
                return "".join(pieces), stop, i + 1
        stop = None
        if end is not None:
            text, stop = stops.push(self._detokenizer.flush(), num_tokens > num_exempt)
            pieces.append(text if stop is not None else text + stops.flush())
        return "".join(pieces), stop, num_tokens
