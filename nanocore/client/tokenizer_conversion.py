"""A tokenizer.json for models that have none, made by transformers of the files that they have.

transformers is optional: it is imported here alone, and only for such a model. It is given a
private folder with nothing but the vocabulary and those settings that say how text is cut, and the
tokenizer class is one of its own, never looked up through its "auto" classes: a model's files can
name no code and no other file. Called in a thread: it takes a second.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.messages import ModelFileName

VOCABULARY_FILES: Final[tuple[ModelFileName, ...]] = (
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
"""What models without a tokenizer.json have in its place: one of them, or two."""
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
"""What of a configuration is passed on, besides the names of tokens: above all, no paths."""


def make_tokenizer_json(
    files: Mapping[str, bytes], config: Mapping[str, Any], older: Mapping[str, Any], source: str
) -> bytes:
    """The content of the tokenizer.json that this model would have.

    Args:
        files: contents by name. config: tokenizer_config.json's. older: special_tokens_map.json's.
        source: where they come from, for error messages.

    Raises:
        InvalidRequestError: the files are not enough, or damaged, or what reads them is missing.
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

            # It says what is wrong; transformers would take the file for one of tiktoken's.
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
    """transformers' own class of this name, if it has one that makes a tokenizer.json."""
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
