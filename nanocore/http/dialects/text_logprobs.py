"""Log probabilities as OpenAI's completions have them: columns of a text's tokens.

What stands at a text's offset is the token that begins there: offsets count the characters that the
tokens before have completed, so tokens of one character have one offset, and one that is no part of
the text takes no room.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from nanocore.client.detokenizer import IncrementalDetokenizer
from nanocore.client.requests.logprob_views import Logprob
from nanocore.client.tokenizer import Tokenizer
from nanocore.http.dialects.logprobs import LEAST, finite


class TextOffsets:
    """Where tokens begin in a text, one after the other.

    Args:
        before: tokens that these follow. start: of the first one, in characters.
    """

    def __init__(
        self, tokenizer: Tokenizer, before: Sequence[int], skip_special_tokens: bool, start: int
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, before, skip_special_tokens)
        self._offset = start

    def next(self, token_id: int) -> int:
        """Of the next token."""
        offset = self._offset
        self._offset += len(self._detokenizer.append([token_id]))
        return offset


class Echo(msgspec.Struct, frozen=True):
    """A prompt that goes before its answers. offsets: of its tokens; none if nobody asks."""

    text: str
    offsets: Sequence[int] = ()

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        token_ids: Sequence[int],
        text: str | None,
        num_added: tuple[int, int] = (0, 0),
    ) -> Echo:
        """Of a prompt of token ids, with its offsets.

        text: what it was made from; None: what they are in text, special tokens included.
        num_added: so many at its beginning and end stand for nothing in its text.
        """
        if text is None:
            text = tokenizer.decode(token_ids, skip_special_tokens=False)
        begin, end = num_added[0], len(token_ids) - num_added[1]
        offsets = TextOffsets(tokenizer, (), False, 0)
        inside = [min(offsets.next(token_id), len(text)) for token_id in token_ids[begin:end]]
        return cls(text, [0] * begin + inside + [len(text)] * num_added[1])


class TextLogprobs(msgspec.Struct):
    """OpenAI's object. top_logprobs: by the texts of tokens; of equal texts the likelier one."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []


class LogprobsShown(msgspec.Struct, frozen=True):
    """How much of log probabilities is shown.

    num_top: so many of the likeliest tokens beside each token itself; -1: all that there are.
    as_token_ids: tokens are called "token_id:ID", for texts of single tokens may be alike.
    """

    tokenizer: Tokenizer
    num_top: int
    as_token_ids: bool

    def name(self, token_id: int) -> str:
        """What a token is called."""
        if self.as_token_ids:
            return f"token_id:{token_id}"
        return self.tokenizer.token_text(token_id).text

    def add(
        self,
        columns: TextLogprobs,
        tokens: Iterable[tuple[int, Mapping[int, Logprob] | None, int]],
    ) -> None:
        """Append to the columns. tokens: (id, candidates, offset); the first of all has none."""
        name_of = self.name
        max_rank = self.num_top if self.num_top >= 0 else sys.maxsize
        for token_id, candidates, offset in tokens:
            columns.text_offset.append(offset)
            columns.tokens.append(name_of(token_id))
            if candidates is None:
                columns.token_logprobs.append(None)
                columns.top_logprobs.append(None)
                continue
            columns.token_logprobs.append(finite(candidates[token_id].logprob))
            top: dict[str, float] = {}
            for one_id, found in candidates.items():
                if found.rank <= max_rank or one_id == token_id:
                    name, logprob = name_of(one_id), finite(found.logprob)
                    if logprob >= top.get(name, LEAST):
                        top[name] = logprob
            columns.top_logprobs.append(top)
