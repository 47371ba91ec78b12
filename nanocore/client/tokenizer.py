"""Text to token ids and back, and chat messages to a prompt, from a model's own files.

Uses the `tokenizers` library, and a separate process for the chat template: no other code of the
model runs. torch and transformers are not imported.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from codecs import BOM_UTF8
from collections.abc import Container, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self, Unpack

import tokenizers

from nanocore.client.chat.chat_messages import LONG_CHARS
from nanocore.client.chat.chat_messages import ChatMessage as ChatMessage
from nanocore.client.chat.template import (
    BUILT_IN_TEMPLATES,
    ChatTemplate,
    ChatTemplates,
    TemplateOptions,
)
from nanocore.client.special_tokens import SpecialTokens
from nanocore.client.token_texts import MAX_TOKEN_IDS, TokenText, TokenTexts
from nanocore.protocol.errors import ContextLengthError, InvalidRequestError, quoted
from nanocore.protocol.messages import ModelFileName

logger = logging.getLogger(__name__)

MAX_QUICK_CHARS: Final = 1 << 12
"""Longer texts are tokenized in a thread: one of 16384 characters takes up to 15 ms."""
MAX_QUICK_TOKENS: Final = 1 << 12
"""Limit of tokens decoded while holding the interpreter's lock: up to 4 ms."""
_MAX_OTHER_TEMPLATES: Final = 4
"""Templates of callers whose processes are kept."""
TOKENIZER_FILES: Final[tuple[ModelFileName, ...]] = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)
"""Files of a Tokenizer; only the first is required."""

TEMPLATE_FILES: Final[dict[str, ModelFileName]] = {
    "default": "chat_template.jinja",
    "tool_use": "additional_chat_templates/tool_use.jinja",
}
"""Chat templates by name, as transformers 4.51 and later save them."""


def needed_files(available: Container[str]) -> list[ModelFileName]:
    """Select the files that a Tokenizer uses."""
    return [name for name in TOKENIZER_FILES if name in available]


class Tokenizer:
    """The tokenizer of one model.

    Args:
        files: contents of the model's `needed_files` by name. The chat template is
            chat_template.jinja, perhaps with another one for tools, or a part of
            tokenizer_config.json.
        source: of the files, for error messages.

    config: content of tokenizer_config.json. named_tokens: texts of special tokens by name
    ("eos_token"), from all files.

    Raises:
        InvalidRequestError: tokenizer.json is missing, or a file is damaged.
    """

    def __init__(self, files: Mapping[str, bytes], source: str) -> None:
        files = {
            name: content.removeprefix(BOM_UTF8) if name.endswith(".json") else content
            for name, content in files.items()
        }
        config = _parse_object(files, "tokenizer_config.json", source)
        older = _parse_object(files, "special_tokens_map.json", source)
        if "tokenizer.json" not in files:
            raise InvalidRequestError(
                f"{source} has no tokenizer.json: make one with transformers (AutoTokenizer."
                "from_pretrained(FOLDER).save_pretrained(FOLDER)), pass token ids instead of text, "
                "with detokenize=False, or tokenizer=FOLDER with a folder that has one"
            )
        try:
            self.backend = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
        except Exception as error:  # the library raises bare Exception
            raise InvalidRequestError(f"tokenizer.json of {source}: {error}") from None
        # Truncation, padding and dropout of training are not for prompts.
        self.backend.no_truncation()
        self.backend.no_padding()
        if getattr(self.backend.model, "dropout", None) is not None:
            self.backend.model.dropout = None
        self.config: Mapping[str, Any] = config
        self._source = source
        self._token_texts: dict[bool, TokenTexts] = {}
        self._shown_tokens: dict[int, TokenText] = {}
        added = _parse_object(files, "added_tokens.json", source)
        try:
            special_tokens = SpecialTokens(config, older, added)
            special_tokens.add_to(self.backend)
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidRequestError(f"the special tokens of {source}: {error}") from None
        self.named_tokens: Mapping[str, str] = special_tokens.texts
        texts = _template_texts(files, config, source)
        self._templates = ChatTemplates(texts, self.named_tokens, source, self.backend)
        self._other_templates: dict[str, ChatTemplates] = {}  # the one used last is the last
        self._lock = threading.Lock()

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Load the tokenizer of a folder.

        Raises:
            InvalidRequestError: as the constructor, or a file cannot be read.
        """
        paths: dict[str, Path] = {name: folder / name for name in TOKENIZER_FILES}
        try:
            files = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
        except OSError as error:
            raise InvalidRequestError(f"{error.filename}: {error.strerror}") from None
        return cls(files, str(folder))

    def encode(
        self, text: str, add_special_tokens: bool = True, max_tokens: float = math.inf
    ) -> list[int]:
        """Return token ids of a text, with the special tokens that the model's files specify.

        max_tokens: a long text of more than twice as many tokens is refused before it takes much
        time and memory. Other texts are never cut.

        Raises:
            InvalidRequestError: the text has a lone surrogate.
            ContextLengthError: it is far too long.
        """
        if max_tokens < math.inf and len(text) > LONG_CHARS:
            num_tokens, start = self._count_last(text, 2 * max_tokens)
            if start:
                raise _far_too_long(num_tokens, max_tokens)
        ids = self._encoding(text, add_special_tokens).ids
        if add_special_tokens and ids[:2] == self._doubled_bos:
            logger.warning("a prompt begins with BOS, and the tokenizer adds another one")
            self._doubled_bos = None  # logged once
        return ids

    def cut_beginning(self, text: str, num_tokens: int) -> str:
        """A part of the text that ends with the same tokens, and has not far more of them."""
        if len(text) <= LONG_CHARS:
            return text
        return text[self._count_last(text, 2 * num_tokens)[1] :]

    def _count_last(self, text: str, max_tokens: float) -> tuple[int, int]:
        """Count tokens from the text's end, at most these; also return where they start.

        Pieces have slightly more tokens than the whole text.
        """
        num_tokens, start = 0, len(text)
        while start > 0 and num_tokens <= max_tokens:
            piece = text[max(start - LONG_CHARS, 0) : start]
            num_tokens += len(self._encoding(piece, False))
            start -= len(piece)
        return num_tokens, start

    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        # A long text is encoded as a batch of one, because batches release the interpreter's lock.
        backend = self.backend
        try:
            if len(text) <= MAX_QUICK_CHARS:
                return backend.encode(text, add_special_tokens=add_special_tokens)
            (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return encoding
        except TypeError as error:
            raise InvalidRequestError(
                f"this text cannot be tokenized ({error}): does it contain half a surrogate pair?"
            ) from None

    @cached_property
    def _doubled_bos(self) -> list[int] | None:
        text = self.named_tokens.get("bos_token")
        token_id = None if text is None else self.backend.token_to_id(text)
        return None if token_id is None else [token_id, token_id]

    @cached_property
    def num_added_tokens(self) -> tuple[int, int]:
        """Number of special tokens that `encode` adds before a text, and after it."""
        whole, own = self.encode("x"), self.encode("x", add_special_tokens=False)
        starts = range(len(whole) - len(own) + 1)
        start = next((i for i in starts if whole[i : i + len(own)] == own), len(starts) - 1)
        return start, len(whole) - start - len(own)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; unknown ids add nothing."""
        known = [token_id for token_id in token_ids if 0 <= token_id < MAX_TOKEN_IDS]
        text: str
        if len(known) <= MAX_QUICK_TOKENS:
            text = self.backend.decode(known, skip_special_tokens=skip_special_tokens)
        else:  # in a batch, likewise
            (text,) = self.backend.decode_batch([known], skip_special_tokens=skip_special_tokens)
        return text

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Return tokens in the vocabulary's spelling; "" for unknown ids."""
        token = self.backend.id_to_token
        return [token(i) or "" if 0 <= i < MAX_TOKEN_IDS else "" for i in token_ids]

    def is_decoded(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether `decode` uses this token at all."""
        if skip_special_tokens and token_id in self._special_texts:
            return False
        return 0 <= token_id < MAX_TOKEN_IDS and self.backend.id_to_token(token_id) is not None

    def token_text(self, token_id: int) -> TokenText:
        """Return the text that a token adds after other tokens, for logprobs.

        Special tokens are included. For models with context-dependent texts
        (`token_texts(False).are_exact` is false) see `TokenTexts`.
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

    @property
    def prefix_token_id(self) -> int | None:
        """BOS, else EOS, for texts that must not be empty; None if neither has a
        name."""
        names = self.named_tokens
        text = names.get("bos_token", names.get("eos_token"))
        token_id: int | None = None if text is None else self.backend.token_to_id(text)
        return token_id

    def token_texts(self, skip_special_tokens: bool) -> TokenTexts:
        """Return the texts of single tokens; see `TokenTexts.are_exact`."""
        if skip_special_tokens not in self._token_texts:
            texts = TokenTexts(self.backend, skip_special_tokens)
            self._token_texts[skip_special_tokens] = texts
        return self._token_texts[skip_special_tokens]

    def templates(self, chat_template: str | None = None) -> ChatTemplates:
        """Return the model's chat templates, or the one of this text or built-in name. Thread-safe.

        Raises:
            InvalidRequestError: it is neither, or too long.
        """
        if chat_template is None:
            return self._templates
        others = self._other_templates
        with self._lock:
            templates = others.pop(chat_template, None) or self._new_templates(chat_template)
            others[chat_template] = templates
            if len(others) > _MAX_OTHER_TEMPLATES:
                del others[next(iter(others))]
        return templates

    def _new_templates(self, chat_template: str) -> ChatTemplates:
        text, tokens = chat_template, self.named_tokens
        if text in BUILT_IN_TEMPLATES:
            text = BUILT_IN_TEMPLATES[chat_template]
            prefix = self.encode("x")[: self.num_added_tokens[0]]
            tokens = {"bos_token": self.decode(prefix, skip_special_tokens=False)}
        elif "{" not in text:
            raise InvalidRequestError(
                f"chat_template={quoted(text)}: a template in jinja2's language, or "
                f"{', '.join(BUILT_IN_TEMPLATES)}",
                "chat_template",
            )
        source = "the option chat_template"
        return ChatTemplates({"default": text}, tokens, source, self.backend)

    def close(self) -> None:
        """End the processes of the chat templates; rendering again starts new ones."""
        for templates in (self._templates, *self._other_templates.values()):
            templates.close()

    @cached_property
    def special_texts(self) -> frozenset[str]:
        """The texts of special tokens."""
        added = self.backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool | None = None,
        chat_template: str | None = None,
        **options: Unpack[TemplateOptions],
    ) -> str:
        """Render the prompt of a conversation with a chat template.

        Args:
            add_generation_prompt: open the assistant's turn; None means yes, unless the last
                message is continued.
            chat_template: replaces the model's; see `templates`.
            options: see `TemplateOptions`.

        Raises:
            InvalidRequestError: there is no template, or it rejects the conversation or exceeds a
                limit.
            RenderProcessError: the template's process does not start.
        """
        template = self._template(chat_template, options)
        return "".join(template.render(messages, add_generation_prompt, **options))

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool | None = None,
        max_tokens: float = math.inf,
        chat_template: str | None = None,
        **options: Unpack[TemplateOptions],
    ) -> list[int]:
        """Return token ids of a conversation, ready for the model's response.

        Only the template produces special tokens, whatever the messages contain. Arguments: see
        `render_chat` and `encode`.

        Raises:
            InvalidRequestError, ContextLengthError, RenderProcessError: as render_chat and
                `encode`.
        """
        template = self._template(chat_template, options)
        parts = template.render(messages, add_generation_prompt, **options)
        ids = self.templates(chat_template).guard.encode(
            parts, lambda text: self.encode(text, False, max_tokens), 2 * max_tokens
        )
        if len(ids) > 2 * max_tokens:
            raise _far_too_long(len(ids), max_tokens)
        return ids

    def _template(self, chat_template: str | None, options: TemplateOptions) -> ChatTemplate:
        has_tools = options.get("tools") is not None
        return self.templates(chat_template).template(has_tools)


def _far_too_long(num_tokens: int, max_tokens: float) -> ContextLengthError:
    return ContextLengthError(
        f"the prompt has {num_tokens} tokens or more, and max_model_len={max_tokens}: shorten the "
        "prompt, or start the engine with a larger --max-model-len"
    )


def _parse_object(files: Mapping[str, bytes], name: str, source: str) -> dict[str, Any]:
    try:
        content = json.loads(files.get(name, b"{}").decode())
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} of {source}: {error}") from None
    if not isinstance(content, dict):
        raise InvalidRequestError(f"{name} of {source} is not a JSON object")
    return content


def _template_texts(
    files: Mapping[str, bytes], config: dict[str, Any], source: str
) -> dict[str, str]:
    """Return the templates by name, from their own files or from the configuration."""
    template = config.get("chat_template")
    if isinstance(template, list):
        entries = [e for e in template if isinstance(e, dict) and isinstance(e.get("name"), str)]
        template = {entry["name"]: entry.get("template") for entry in entries}
    elif not isinstance(template, dict):
        template = {"default": template}
    if TEMPLATE_FILES["default"] in files:
        template = {}
    for name, file in TEMPLATE_FILES.items():
        try:
            if (content := files.get(file)) is not None:
                template[name] = content.decode()
        except ValueError as error:
            raise InvalidRequestError(f"{file} of {source}: {error}") from None
    wanted = {name: template.get(name) for name in TEMPLATE_FILES}
    return {name: text for name, text in wanted.items() if isinstance(text, str)}
