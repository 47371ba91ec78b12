"""The special tokens that a model's configuration names, as transformers reads them.

Two files name them: tokenizer_config.json, and special_tokens_map.json, which is older. The older
one wins, as in transformers, unless the newer lists all added tokens ("added_tokens_decoder").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import tokenizers

STANDARD_NAMES: Final = frozenset(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized")


class SpecialTokens:
    """What tokenizer_config.json (`config`) and special_tokens_map.json (`older`) say together.

    texts: by name ("bos_token"), for chat templates; models may name tokens of their own. What is
    absent or null has no name.
    """

    def __init__(self, config: Mapping[str, Any], older: Mapping[str, Any]) -> None:
        self._added = config.get("added_tokens_decoder") or {}
        sources = [config] if "added_tokens_decoder" in config else [config, older]
        named: dict[str, Any] = {}
        unnamed: list[Any] = []
        for source in sources:
            for name, value in source.items():
                if name in STANDARD_NAMES:
                    named[name] = value
                elif name.endswith("_token") and _text(value) is not None:
                    named.setdefault(name, value)
                elif name in ("extra_special_tokens", "additional_special_tokens"):
                    if isinstance(value, dict):
                        named |= value
                    elif isinstance(value, list):
                        unnamed += value
        self._all = [*named.values(), *unnamed]
        texts = {name: _text(value) for name, value in named.items()}
        self.texts = {name: text for name, text in texts.items() if text is not None}

    def add_to(self, backend: tokenizers.Tokenizer) -> None:
        """Let a tokenizer know the tokens that only the configuration tells it are special.

        Without, a template's "<|end|>" would be many tokens. Only where the id is certain: the
        configuration gives the one that the tokenizer would, or the vocabulary has the token.

        Raises:
            TypeError, ValueError, AttributeError: the configuration is damaged.
        """
        known = backend.get_added_tokens_decoder()
        next_id = max([backend.get_vocab_size(with_added_tokens=False), *(i + 1 for i in known)])
        texts = {token.content for token in known.values()}
        exact = set(map(repr, known.values()))
        missing = []
        for token_id, entry in sorted((int(key), entry) for key, entry in self._added.items()):
            token = tokenizers.AddedToken(**entry)
            if repr(token) in exact or not token.content:
                continue
            own_id = backend.token_to_id(token.content)
            if token_id == (next_id if own_id is None else own_id):
                next_id = max(next_id, token_id + 1)
                missing.append(token)
                texts.add(token.content)
        for entry in self._all:
            text = _text(entry)
            if text and text not in texts and backend.token_to_id(text) is not None:
                flags = {k: entry[k] for k in _FLAGS if k in entry} if text is not entry else {}
                missing.append(tokenizers.AddedToken(text, special=True, **flags))
                texts.add(text)
        if missing:
            backend.add_tokens(missing)


def _text(token: object) -> str | None:
    """A token is given as its text, or as an object around it; None if it is neither."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
