"""Text to token ids and back, and chat messages to a prompt, from a model folder's own files.

Uses the `tokenizers` library and a sandboxed jinja2: no code of the model runs, and nothing of
torch or transformers is imported.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypedDict

import jinja2
import jinja2.sandbox
import tokenizers
from tokenizers import decoders

from nanocore.protocol.errors import InvalidRequestError

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
        folder: holds tokenizer.json, and for chat also a template, in tokenizer_config.json or in
            chat_template.jinja.

    Raises:
        InvalidRequestError: no tokenizer.json there, or it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InvalidRequestError(
                f"{path} is missing: pass token ids instead of text, or tokenizer=FOLDER with the "
                "folder that holds the model's tokenizer.json"
            )
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise InvalidRequestError(f"{path}: {error}") from None
        self._folder = folder
        self._token_texts: dict[bool, TokenTexts] = {}
        config = _read_config(folder / "tokenizer_config.json")
        self._template = _template_source(folder, config)
        self._special_tokens = {
            name: _token_text(config.get(name)) for name in ("bos_token", "eos_token")
        }

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
                f"the model in {self._folder} has no chat template: use generate() with a prompt"
            )
        try:
            return self._compiled_template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # it is its author's code: whatever it raises is its error
            raise InvalidRequestError(
                f"the chat template of {self._folder} failed: {type(error).__name__}: {error}"
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


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise InvalidRequestError(f"{path}: {error}") from None
    if not isinstance(config, dict):
        raise InvalidRequestError(f"{path} holds no JSON object")
    return config


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    try:
        source = path.read_text("utf-8") if path.is_file() else config.get("chat_template")
    except ValueError as error:
        raise InvalidRequestError(f"{path}: {error}") from None
    if not isinstance(source, str):
        return None
    if len(source) > MAX_TEMPLATE_CHARS:
        raise InvalidRequestError(
            f"the chat template of {folder} has {len(source)} characters: at most "
            f"{MAX_TEMPLATE_CHARS}"
        )
    return source


def _token_text(token: object) -> str:
    """tokenizer_config.json gives a special token as its text, or as an object around it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
