"""Tokenizer files: special tokens, and creation of a missing tokenizer.json.

Special tokens are named by tokenizer_config.json and the older special_tokens_map.json. The older
file wins, as in transformers, unless the newer one lists all added tokens ("added_tokens_decoder").
If it does not, added_tokens.json may list them.

A missing tokenizer.json is created by transformers, which is optional and only imported here. It
gets a private folder with the vocabulary and the settings of tokenization. The tokenizer class is
one of transformers' own, never found through "auto" classes, so a model's files cannot name code or
other files. Conversion takes a second: call it in a thread."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import tokenizers

from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.messages import ModelFileName

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


VOCABULARY_FILES: Final[tuple[ModelFileName, ...]] = (
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
"""Files of models without a tokenizer.json: one of them, or two."""
_REMEDY: Final = (
    "pass token ids instead of text, with detokenize=False, or tokenizer=FOLDER with the folder "
    "that holds the model's tokenizer.json"
)
_CLASS_NAME: Final = re.compile(r"\w*Tokenizer(Fast)?|TokenizersBackend")
_SETTINGS: Final = frozenset(
    {
        "add_prefix_space",
        "added_tokens_decoder",
        "additional_special_tokens",
        "do_lower_case",
        "extra_special_tokens",
        "legacy",
        "strip_accents",
        "tokenize_chinese_chars",
        "trim_offsets",
    }
)
"""Settings passed to transformers in addition to names of tokens; none of them is a path."""


def make_tokenizer_json(
    files: Mapping[str, bytes], config: Mapping[str, Any], older: Mapping[str, Any], source: str
) -> bytes:
    """Return the content of a tokenizer.json for this model.

    Args:
        files: contents by name. config: tokenizer_config.json's. older: special_tokens_map.json's.
        source: of the files, for error messages.

    Raises:
        InvalidRequestError: files or packages are missing, or files are damaged.
    """
    given = [name for name in VOCABULARY_FILES if name in files]
    if not given:
        raise InvalidRequestError(f"{source} has no tokenizer.json: {_REMEDY}")
    wanted = ["transformers"]
    if "tokenizer.model" in given:
        wanted += ["sentencepiece", "protobuf"]
    missing = [name for name in wanted if not _is_installed(name)]
    what = f"{source} has no tokenizer.json, and one of its {' and '.join(given)}"
    if missing:
        raise InvalidRequestError(
            f"{what} needs more than is installed: pip install {' '.join(missing)}, or {_REMEDY}"
        )
    contents = {name: files[name] for name in given}
    if "added_tokens.json" in files:
        contents["added_tokens.json"] = files["added_tokens.json"]
    contents["tokenizer_config.json"] = _reduced(config)
    contents["special_tokens_map.json"] = _reduced(older)
    try:
        if "tokenizer.model" in given:
            import sentencepiece

            # Its error is useful; transformers would take the file for one of tiktoken's.
            sentencepiece.SentencePieceProcessor(model_proto=contents["tokenizer.model"])
        with tempfile.TemporaryDirectory(prefix="nanocore-tokenizer-") as folder:
            for name, content in contents.items():
                (Path(folder) / name).write_bytes(content)
            tokenizer = _tokenizer_class(config).from_pretrained(folder, local_files_only=True)
        text: str = tokenizer.backend_tokenizer.to_str()
    except Exception as error:  # whatever transformers and its libraries raise for damaged files
        raise InvalidRequestError(f"{what} cannot be made: {error}; {_REMEDY}") from None
    return text.encode()


def _tokenizer_class(config: Mapping[str, Any]) -> Any:
    # transformers' own class of this name, never one from the model's files.
    import transformers

    name = config.get("tokenizer_class")
    if not isinstance(name, str) or not _CLASS_NAME.fullmatch(name):
        raise ValueError(f"tokenizer_config.json names {name!r} as its tokenizer_class")
    for candidate in (name, name.removesuffix("Fast")):
        found = getattr(transformers, candidate, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedTokenizerFast):
            return found
    raise ValueError(
        f"transformers {transformers.__version__} (5 or later is wanted) has no fast {name}"
    )


def _reduced(config: Mapping[str, Any]) -> bytes:
    kept = {k: v for k, v in config.items() if k in _SETTINGS or k.endswith("_token")}
    return json.dumps(kept).encode()


def _is_installed(package: str) -> bool:
    module = "google.protobuf" if package == "protobuf" else package
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # no `google` at all; set to None in sys.modules
        return False
