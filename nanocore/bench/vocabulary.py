"""What prompts are made of: a model's ordinary token ids, and texts of so many tokens.

Special tokens are never drawn: some end an answer, others change what a prompt means.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from nanocore.bench.outcome import Prompt
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import ConfigError

TokenIds = npt.NDArray[np.int32]
_MAX_ATTEMPTS: Final = 10


class Vocabulary:
    """Token ids to draw from.

    Args:
        token_ids: ascending.
        tokenizer: None if prompts need no text.
        as_text: whether `prompt` makes texts, or leaves token ids as they are.
    """

    def __init__(self, token_ids: TokenIds, tokenizer: Tokenizer | None, as_text: bool) -> None:
        if not len(token_ids):
            raise ConfigError("the vocabulary has no tokens but special ones: no prompt is made")
        self._token_ids = token_ids
        self._tokenizer = tokenizer
        self._as_text = as_text

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer, as_text: bool, below: int | None = None) -> Self:
        """All of its tokens but the added ones, which the special ones are among.

        below: how many the model has, if that is known.
        """
        backend = tokenizer.backend
        added = backend.get_added_tokens_decoder()
        known = backend.get_vocab(with_added_tokens=True).values()
        ids = sorted(
            token_id
            for token_id in set(known)
            if token_id not in added and (below is None or token_id < below)
        )
        return cls(np.array(ids, dtype=np.int32), tokenizer, as_text)

    @classmethod
    def of_size(cls, size: int, without: Collection[int]) -> Self:
        """Of a model without a tokenizer: all ids but these."""
        ids = np.setdiff1d(np.arange(size, dtype=np.int32), np.array([*without], dtype=np.int32))
        return cls(ids, None, as_text=False)

    @property
    def num_added_tokens(self) -> int:
        """Tokens that a server's tokenizer will add to a text; token ids stay as they are."""
        if self._tokenizer is None or not self._as_text:
            return 0
        return sum(self._tokenizer.num_added_tokens)

    def draw(self, rng: np.random.Generator, num_tokens: int) -> TokenIds:
        """So many, each as likely as any other."""
        return self._token_ids[rng.integers(0, len(self._token_ids), num_tokens)]

    def prompt(self, token_ids: TokenIds, rng: np.random.Generator) -> tuple[Prompt, int]:
        """A prompt of these tokens, and how many a server will find in it.

        A text is tokenized again, cut or filled, until it has as many tokens; of texts for which
        that does not succeed the number is the one that it came to.
        """
        if not self._as_text:
            return array("i", token_ids.tobytes()), len(token_ids)
        assert self._tokenizer is not None, "texts are made by a tokenizer"
        wanted, text, found = len(token_ids), "", token_ids
        for _ in range(_MAX_ATTEMPTS):
            text = self._tokenizer.decode(found.tolist(), skip_special_tokens=False)
            found = np.array(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
            if len(found) == wanted:
                break
            if len(found) > wanted:
                found = found[:wanted]
            else:
                found = np.concatenate([found, self.draw(rng, wanted - len(found))])
        else:
            text = self._tokenizer.decode(found.tolist(), skip_special_tokens=False)
            found = np.array(self._tokenizer.encode(text, add_special_tokens=False))
        return text, len(found) + self.num_added_tokens
