"""Text to token ids and back, and chat messages to a prompt, from a model folder's own files.

Uses the `tokenizers` library and a sandboxed jinja2: no code of the model runs, and nothing of
torch or transformers is imported.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import jinja2
import jinja2.sandbox
import tokenizers

from nanocore.protocol.errors import InvalidRequestError

MAX_TEMPLATE_CHARS = 1 << 16


class ChatMessage(TypedDict):
    """One turn of a conversation. role: "system", "user" or "assistant"."""

    role: str
    content: str


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
        self._template, self._special_tokens = self._load_template(folder)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; the model's own special tokens are added as it specifies."""
        ids: list[int] = self.backend.encode(text).ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

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
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"chat template: {error}") from None

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of a conversation, ready for the model's answer."""
        text = self.render_chat(messages)
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    @staticmethod
    def _load_template(folder: Path) -> tuple[jinja2.Template | None, dict[str, str]]:
        config: dict[str, Any] = {}
        config_path, template_path = (
            folder / "tokenizer_config.json",
            folder / "chat_template.jinja",
        )
        if config_path.is_file():
            config = json.loads(config_path.read_text("utf-8"))
        source = config.get("chat_template")
        if template_path.is_file():
            source = template_path.read_text("utf-8")
        if not isinstance(source, str):
            return None, {}
        if len(source) > MAX_TEMPLATE_CHARS:
            raise InvalidRequestError(
                f"the chat template has {len(source)} characters: at most {MAX_TEMPLATE_CHARS}"
            )
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True
        )
        environment.globals["raise_exception"] = _raise_exception
        special = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token")}
        return environment.from_string(source), special


def _token_text(token: str | dict[str, str] | None) -> str:
    """tokenizer_config.json gives a special token as its text, or as an object around it."""
    if isinstance(token, dict):
        return token.get("content", "")
    return token or ""


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
