"""The text of one sample: its tokens one after the other, until one of its stop strings appears.

Of V1's rules: before min_tokens no stop string is looked for, and none that ended by then is found
later; the token at which the engine stopped is no text, unless the user wants it. However tokens
are merged into calls, the text is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nanocore.client.detokenizer import IncrementalDetokenizer
from nanocore.client.stop_strings import StopStringMatcher
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.messages import Event
from nanocore.protocol.sampling import SamplingParams


class SampleText:
    """Args: the model's tokenizer, and the request."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt_token_ids = prompt_token_ids
        self._skip_special_tokens = params.skip_special_tokens
        self._keeps_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        stops = params.stop_strings
        self._stops = StopStringMatcher(stops, self._keeps_stop) if stops else None
        self._detokenizer: IncrementalDetokenizer | None = None

    @property
    def tokens_per_slice(self) -> int:
        """So many tokens may be read at once without holding up the event loop."""
        return self._opened().tokens_per_slice

    @property
    def push(self) -> Callable[[int], str] | None:
        """What `read` does with one token that does not end it, if nothing else is to be done."""
        return None if self._stops is not None else self._opened().push

    def read(
        self, token_ids: list[int], num_read: int, end: Event | None
    ) -> tuple[str, str | None, int]:
        """(text to show, stop string found or None, how many of the tokens were used).

        num_read: tokens before these. end: of the sample, after these.
        """
        detokenizer = self._detokenizer or self._opened()
        shown = token_ids
        if end is not None and end.finish_reason == "stop" and not self._keeps_stop:
            shown = token_ids[:-1]  # the EOS or stop token itself is not text
        if self._stops is not None:
            return self._read_to_stop(detokenizer, shown, num_read, end, len(token_ids))
        text = detokenizer.append(shown)
        if end is not None:
            text += detokenizer.flush()
        return text, None, len(token_ids)

    def _read_to_stop(
        self,
        detokenizer: IncrementalDetokenizer,
        shown: list[int],
        num_read: int,
        end: Event | None,
        num_tokens: int,
    ) -> tuple[str, str | None, int]:
        assert self._stops is not None
        pieces = []
        num_exempt = self._min_tokens - num_read
        for i, token_id in enumerate(shown):  # one by one: the result must not depend on merging
            text, stop = self._stops.push(detokenizer.append([token_id]), i >= num_exempt)
            pieces.append(text)
            if stop is not None:
                return "".join(pieces), stop, i + 1
        stop = None
        if end is not None:
            text, stop = self._stops.push(detokenizer.flush(), num_tokens > num_exempt)
            pieces.append(text if stop is not None else text + self._stops.flush())
        return "".join(pieces), stop, num_tokens

    def _opened(self) -> IncrementalDetokenizer:
        """The detokenizer; made late, because only now has the engine checked the prompt's ids."""
        if self._detokenizer is None:
            self._detokenizer = IncrementalDetokenizer(
                self._tokenizer, self._prompt_token_ids, self._skip_special_tokens
            )
        return self._detokenizer
