"""Text to token ids and back, and chat messages to a prompt, from a model's own files.

Uses the `tokenizers` library and a sandboxed jinja2: no code of the model runs, and nothing of
torch or transformers is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self, TypedDict

import jinja2
import jinja2.sandbox
import tokenizers
from tokenizers import decoders

from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.messages import ModelFileName

TOKENIZER_FILES: Final[tuple[ModelFileName, ...]] = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
"""What a Tokenizer is made of; only the first is needed."""
MAX_TEMPLATE_CHARS = 1 << 16
REPLACEMENT: Final = "\ufffd"
"""What bytes that are no UTF-8 decode to."""


class ChatMessage(TypedDict):
    """One turn of a conversation. role: "system", "user" or "assistant"."""

    role: str
    content: str


class TokenTexts(dict[int, str | None]):
    """The text of each token that has the same text wherever it stands, filled on first use.

    None marks a token that needs its neighbours: its bytes are not whole characters.
    """

    def __init__(self, backend: tokenizers.Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens

    def __missing__(self, token_id: int) -> str | None:
        text: str = self._backend.decode([token_id], skip_special_tokens=self._skip_special_tokens)
        self[token_id] = whole = None if REPLACEMENT in text else text
        return whole


class Tokenizer:
    """The tokenizer of one model.

    Args:
        files: contents by name, of those of `TOKENIZER_FILES` that the model has. The chat template
            is chat_template.jinja, or else a part of tokenizer_config.json.
        source: where they come from, for error messages.

    Raises:
        InvalidRequestError: tokenizer.json is missing, or one of the files is damaged.
    """

    def __init__(self, files: Mapping[str, bytes], source: str) -> None:
        if "tokenizer.json" not in files:
            raise InvalidRequestError(
                f"{source} has no tokenizer.json: pass token ids instead of text, with "
                "detokenize=False, or tokenizer=FOLDER with the folder that holds the model's "
                "tokenizer.json"
            )
        try:
            self.backend = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
        except Exception as error:  # the library raises bare Exception
            raise InvalidRequestError(f"tokenizer.json of {source}: {error}") from None
        self._source = source
        self._token_texts: dict[bool, TokenTexts] = {}
        config = _parse_config(files, source)
        self._template = _template_source(files, config, source)
        self._special_tokens = {
            name: _token_text(config.get(name)) for name in ("bos_token", "eos_token")
        }

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """The tokenizer whose files are in this folder.

        Raises:
            InvalidRequestError: as the constructor, or a file cannot be read.
        """
        paths = [folder / name for name in TOKENIZER_FILES]
        try:
            files = {path.name: path.read_bytes() for path in paths if path.is_file()}
        except OSError as error:
            raise InvalidRequestError(f"{error.filename}: {error.strerror}") from None
        return cls(files, str(folder))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; the model's own special tokens are added as it specifies.

        Raises:
            InvalidRequestError: the text is no Unicode (a lone surrogate).
        """
        try:
            ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise InvalidRequestError(f"this text cannot be tokenized: {error}") from None
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_texts(self, skip_special_tokens: bool) -> TokenTexts | None:
        """Texts of single tokens; None if this model's tokens have none of their own.

        A byte-level decoder (GPT-2's, Llama 3's, Qwen's) joins the bytes of all tokens and decodes
        them: between whole characters, a token's text depends on nothing else. Other decoders add
        or strip spaces, according to the neighbours.
        """
        if not isinstance(self.backend.decoder, decoders.ByteLevel):
            return None
        texts = self._token_texts.get(skip_special_tokens)
        if texts is None:
            texts = TokenTexts(self.backend, skip_special_tokens)
            self._token_texts[skip_special_tokens] = texts
        return texts

    def render_chat(
        self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True
    ) -> str:
        """The prompt of a conversation, by the model's chat template.

        Raises:
            InvalidRequestError: the model has no template, or it rejects these messages.
        """
        if self._template is None:
            raise InvalidRequestError(
                f"{self._source} has no chat template: use generate() with a prompt"
            )
        try:
            return self._compiled_template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # it is its author's code: whatever it raises is its error
            raise InvalidRequestError(
                f"the chat template of {self._source} failed: {type(error).__name__}: {error}"
            ) from None

    @cached_property
    def _compiled_template(self) -> jinja2.Template:
        """Compiled on first use: a template that is wrong harms only those who chat."""
        assert self._template is not None
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        return environment.from_string(self._template)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of a conversation, ready for the model's answer."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)


def _parse_config(files: Mapping[str, bytes], source: str) -> dict[str, Any]:
    try:
        config = json.loads(files.get("tokenizer_config.json", b"{}").decode())
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"tokenizer_config.json of {source}: {error}") from None
    if not isinstance(config, dict):
        raise InvalidRequestError(f"tokenizer_config.json of {source} holds no JSON object")
    return config


def _template_source(files: Mapping[str, bytes], config: dict[str, Any], source: str) -> str | None:
    content = files.get("chat_template.jinja")
    try:
        template = config.get("chat_template") if content is None else content.decode()
    except ValueError as error:
        raise InvalidRequestError(f"chat_template.jinja of {source}: {error}") from None
    if not isinstance(template, str):
        return None
    if len(template) > MAX_TEMPLATE_CHARS:
        raise InvalidRequestError(
            f"the chat template of {source} has {len(template)} characters: at most "
            f"{MAX_TEMPLATE_CHARS}"
        )
    return template


def _token_text(token: object) -> str:
    """tokenizer_config.json gives a special token as its text, or as an object around it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
