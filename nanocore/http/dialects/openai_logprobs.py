"""Log probabilities in the shapes of OpenAI's chat completions and completions."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from nanocore.client.detokenizer import IncrementalDetokenizer
from nanocore.client.requests.request_outputs import Logprob
from nanocore.client.tokenizer import Tokenizer

MAX_TOP_LOGPROBS: Final = 20
LEAST: Final = -9999.0
"""Replaces minus infinity, which JSON lacks, as in OpenAI's API."""


def finite(logprob: float) -> float:
    return max(logprob, LEAST)


def chat_logprobs(
    tokens: Sequence[Mapping[int, Logprob]], num_top: int, as_token_ids: bool = False
) -> list[dict[str, Any]]:
    """Return OpenAI's logprobs of chat tokens.

    Args:
        tokens: candidates at each position by token id, the sampled token first.
        num_top: candidates to list.
        as_token_ids: name tokens "token_id:ID", because different tokens may have equal texts.
    """
    entries = []
    for candidates in tokens:
        own = next(iter(candidates.items()))
        top = sorted(candidates.items(), key=lambda item: item[1].rank)[:num_top]
        entry = _entry(*own, as_token_ids)
        entry["top_logprobs"] = [_entry(*item, as_token_ids) for item in top]
        entries.append(entry)
    return entries


def _entry(token_id: int, found: Logprob, as_token_ids: bool) -> dict[str, Any]:
    return {
        "token": f"token_id:{token_id}" if as_token_ids else found.decoded_token or "",
        "logprob": finite(found.logprob),
        "bytes": [*(found.bytes or b"")],
    }


def prompt_logprobs(tokens: Sequence[Mapping[int, Logprob] | None]) -> list[dict[str, Any] | None]:
    """Return vLLM's logprobs of prompt tokens: by token id; null for the first token."""
    return [
        None
        if candidates is None
        else {
            str(token_id): {
                "logprob": finite(one.logprob),
                "rank": one.rank,
                "decoded_token": one.decoded_token,
            }
            for token_id, one in candidates.items()
        }
        for candidates in tokens
    ]


class TextOffsets:
    """Offsets at which successive tokens begin in a text, in characters.

    An offset counts the characters that earlier tokens have completed. So the tokens of one
    character share an offset, and tokens outside the text have no width.

    Args:
        before: tokens before these.
        start: offset of the first one.
    """

    def __init__(
        self, tokenizer: Tokenizer, before: Sequence[int], skip_special_tokens: bool, start: int
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, before, skip_special_tokens)
        self._offset = start

    def next(self, token_id: int) -> int:
        offset = self._offset
        self._offset += len(self._detokenizer.append([token_id]))
        return offset


class Echo(msgspec.Struct, frozen=True):
    """A prompt that is repeated before its samples. offsets: of its tokens, if requested."""

    text: str
    offsets: Sequence[int] = ()

    @classmethod
    def of_tokens(
        cls,
        tokenizer: Tokenizer,
        token_ids: Sequence[int],
        text: str | None,
        num_added: tuple[int, int] = (0, 0),
    ) -> Echo:
        """Make the echo of a tokenized prompt, with offsets.

        Args:
            tokenizer: the model's.
            token_ids: the prompt.
            text: its source; None: the tokens' text, special tokens included.
            num_added: tokens at its beginning and its end that are not in the text.
        """
        if text is None:
            text = tokenizer.decode(token_ids, skip_special_tokens=False)
        begin, end = num_added[0], len(token_ids) - num_added[1]
        offsets = TextOffsets(tokenizer, (), False, 0)
        inside = [min(offsets.next(token_id), len(text)) for token_id in token_ids[begin:end]]
        return cls(text, [0] * begin + inside + [len(text)] * num_added[1])


class TextLogprobs(msgspec.Struct):
    """OpenAI's object: a column per property of a text's tokens.

    top_logprobs: by text of the token; the likelier one of equal texts.
    """

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []

    def extend(self, more: TextLogprobs) -> None:
        for name in self.__struct_fields__:
            getattr(self, name).extend(getattr(more, name))


class LogprobsShown(msgspec.Struct, frozen=True):
    """Options of a completion's logprobs.

    num_top: likeliest tokens to list in addition to the sampled one; -1: all.
    as_token_ids: name tokens "token_id:ID".
    """

    tokenizer: Tokenizer
    num_top: int
    as_token_ids: bool

    def name(self, token_id: int) -> str:
        if self.as_token_ids:
            return f"token_id:{token_id}"
        return self.tokenizer.token_text(token_id).text

    def add(
        self, columns: TextLogprobs, tokens: Iterable[tuple[int, Mapping[int, Logprob] | None, int]]
    ) -> None:
        """Append tokens, given as (id, candidates, offset); a prompt's first has no candidates."""
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
