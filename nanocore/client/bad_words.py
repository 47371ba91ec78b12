"""Bad words as token ids: at the beginning of a text, and after a space, as vLLM has them."""

from __future__ import annotations

import asyncio

from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import InvalidRequestError


async def bad_words_token_ids(tokenizer: Tokenizer, words: list[str]) -> list[list[int]]:
    """Sequences of tokens that say these words: of each one or two.

    The second one is the word after a space, if it begins with a token of its own and is as long:
    else it holds the first one, or cannot be told from other words.

    Raises:
        InvalidRequestError: a word has no tokens.
    """
    sequences = []
    for word in words:
        bare = word.lstrip()
        first, second = (
            tokenizer.encode(space + bare, add_special_tokens=False) for space in ("", " ")
        )
        if not first:
            raise InvalidRequestError(f"bad_words has {word!r}, which has no tokens: leave it out")
        sequences.append(first)
        if len(second) == len(first) and second[0] != first[0]:
            sequences.append(second)
        await asyncio.sleep(0)  # the event loop's others go on between words
    return sequences
