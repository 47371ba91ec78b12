"""Special tokens, as a model's tokenizer files name them.

tokenizer_config.json names them, and the older special_tokens_map.json. The older file wins, as in
transformers, unless the newer one lists all added tokens ("added_tokens_decoder"). If it does not,
added_tokens.json may list them.
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
    """Special tokens as three files name them.

    Args:
        config: tokenizer_config.json. older: special_tokens_map.json.
        added: added_tokens.json, which has ids by text.

    texts: by name ("bos_token"), for chat templates; models may add names. Absent and null tokens
    have no entry.
    """

    def __init__(
        self, config: Mapping[str, Any], older: Mapping[str, Any], added: Mapping[str, Any]
    ) -> None:
        self._lists_all = "added_tokens_decoder" in config
        sources = [config] if self._lists_all else [config, older]
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
        self._added = config.get("added_tokens_decoder") or {}
        if not self._lists_all:
            special = {_text(entry) for entry in self._all}
            self._added = {
                token_id: {"content": t, "special": t in special, "normalized": t not in special}
                for t, token_id in added.items()
            }

    def add_to(self, backend: tokenizers.Tokenizer) -> None:
        """Add the tokens that only the configuration marks as special to a tokenizer.

        Otherwise a template's "<|end|>" would become many tokens. A token is only added if its id
        is certain: the vocabulary has it, or the configuration gives the id that the tokenizer
        would assign.

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
            if not self._lists_all and token.content in texts:
                continue  # the tokenizer knows more about it than the older list
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
    # A token is its text, or an object with it.
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
