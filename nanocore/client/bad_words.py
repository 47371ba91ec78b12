"""Bad words as token ids: at the beginning of a text, and after a space.

vLLM forbids what follows a space only where it has as many tokens, so that " apple" of one token
comes although "apple", of three, is bad. Here both are forbidden.
"""

from __future__ import annotations

import asyncio

from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import InvalidRequestError


async def bad_words_token_ids(tokenizer: Tokenizer, words: list[str]) -> list[list[int]]:
    """Sequences of tokens that say these words: of each one or two.

    The second one is the word after a space, unless it ends with the first one: then that forbids
    it already.

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
        if second[-len(first) :] != first:
            sequences.append(second)
        await asyncio.sleep(0)  # the event loop's others go on between words
    return sequences
