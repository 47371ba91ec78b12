"""Text to token ids and back, and chat messages to a prompt, from a model's own files.

Uses the `tokenizers` library and a sandboxed jinja2: no code of the model runs, and nothing of
torch or transformers is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NotRequired, Self, TypedDict

import tokenizers

from nanocore.client.chat_template import ChatTemplate
from nanocore.client.special_tokens import SpecialTokens
from nanocore.client.token_texts import MAX_TOKEN_IDS, TokenText, TokenTexts
from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.messages import ModelFileName

MAX_QUICK_CHARS: Final = 1 << 14
"""Texts above this are tokenized in a thread, where that takes milliseconds and more."""
TOKENIZER_FILES: Final[tuple[ModelFileName, ...]] = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""What a Tokenizer is made of; only the first is needed."""


class ChatMessage(TypedDict):
    """One turn of a conversation.

    role: "system", "user", "assistant" or whatever else the model's template knows. content: text,
    or parts if the template takes them. Further keys are for templates that ask for them.
    """

    role: str
    content: NotRequired[str | list[dict[str, Any]] | None]
    name: NotRequired[str]
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[list[dict[str, Any]] | None]
    tool_call_id: NotRequired[str]


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
        # How training cut, filled and varied its texts: none of it is for prompts.
        self.backend.no_truncation()
        self.backend.no_padding()
        if getattr(self.backend.model, "dropout", None) is not None:
            self.backend.model.dropout = None
        self._source = source
        self._token_texts: dict[bool, TokenTexts] = {}
        self._shown_tokens: dict[int, TokenText] = {}
        config = _parse_object(files, "tokenizer_config.json", source)
        special_tokens = SpecialTokens(
            config, _parse_object(files, "special_tokens_map.json", source)
        )
        try:
            special_tokens.add_to(self.backend)
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidRequestError(f"the special tokens of {source}: {error}") from None
        template = _template_text(files, config, source)
        self._template: ChatTemplate | None = None
        if template is not None:
            self._template = ChatTemplate(template, special_tokens.texts, source)

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
        encode = self.backend.encode if len(text) <= MAX_QUICK_CHARS else self._encode_long
        try:
            ids: list[int] = encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise InvalidRequestError(f"this text cannot be tokenized: {error}") from None
        return ids

    def _encode_long(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        """A batch of one: for batches the library lets other threads run meanwhile."""
        return self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Ids that no token has add nothing."""
        known = [token_id for token_id in token_ids if 0 <= token_id < MAX_TOKEN_IDS]
        text: str = self.backend.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> TokenText:
        """What a token adds to a text that other tokens begin, for logprobs.

        Special tokens are shown as they are written. Models whose tokens have no text of their own
        (`token_texts(False).are_exact` is false) give what this one adds to one certain other
        token, or if it changes that one, what it is alone.
        """
        shown = self._shown_tokens.get(token_id)
        if shown is None:
            text = self._special_texts.get(token_id)
            if text is None:
                text = self.token_texts(skip_special_tokens=False)[token_id]
            data = text if isinstance(text, bytes) else text.encode()
            shown = TokenText(data.decode("utf-8", "replace"), data)
            self._shown_tokens[token_id] = shown
        return shown

    @cached_property
    def _special_texts(self) -> dict[int, str | bytes]:
        added = self.backend.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items() if token.special}

    def token_texts(self, skip_special_tokens: bool) -> TokenTexts:
        """Texts of single tokens; see there what they are worth."""
        if skip_special_tokens not in self._token_texts:
            texts = TokenTexts(self.backend, skip_special_tokens)
            self._token_texts[skip_special_tokens] = texts
        return self._token_texts[skip_special_tokens]

    def render_chat(
        self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True
    ) -> str:
        """The prompt of a conversation, by the model's chat template.

        Raises:
            InvalidRequestError: the model has no template, or it rejects these messages.
        """
        if self._template is None:
            raise InvalidRequestError(
                f"{self._source} has no chat template (or has several, and none of them is named "
                "default): use generate() with a prompt"
            )
        return self._template.render(messages, add_generation_prompt)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of a conversation, ready for the model's answer."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)


def _parse_object(files: Mapping[str, bytes], name: str, source: str) -> dict[str, Any]:
    try:
        content = json.loads(files.get(name, b"{}").decode())
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} of {source}: {error}") from None
    if not isinstance(content, dict):
        raise InvalidRequestError(f"{name} of {source} holds no JSON object")
    return content


def _template_text(files: Mapping[str, bytes], config: dict[str, Any], source: str) -> str | None:
    """The template's own file, or else the configuration's; of several, the one named default."""
    content = files.get("chat_template.jinja")
    try:
        template = config.get("chat_template") if content is None else content.decode()
    except ValueError as error:
        raise InvalidRequestError(f"chat_template.jinja of {source}: {error}") from None
    if isinstance(template, list):
        entries = [e for e in template if isinstance(e, dict) and e.get("name") == "default"]
        template = entries[-1].get("template") if entries else None
    elif isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None
