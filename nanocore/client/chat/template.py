"""A model's chat template: messages to a prompt, as transformers' apply_chat_template makes it.

Models are trained on that function's output, so templates get the same filters, globals, defined
names and messages (without values of None). Further names (`chat_template_kwargs`) must be allowed.
A template is foreign code: it runs in its own process (`renderer`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, Final, TypedDict

import tokenizers

from nanocore.client.chat.chat_messages import is_long, plain, template_message
from nanocore.client.chat.renderer import Renderer
from nanocore.client.chat.special_token_guard import SpecialTokenGuard
from nanocore.client.chat.template_dialect import TemplateDialect
from nanocore.protocol.errors import InvalidRequestError, quoted

CHATML_END: Final = "<|im_end|>"
BUILT_IN_TEMPLATES: Final = {
    "chatml": (
        "{{- bos_token -}}{%- for message in messages -%}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
    )
}
"""Templates that can be named instead of the model's own. bos_token: what the tokenizer adds before
a text, or ""."""

DEFAULT_TEMPLATE_KWARGS: Final = frozenset(
    {
        "builtin_tools", "controls", "custom_tools", "date_string", "documents", "enable_thinking",
        "keep_past_thinking", "model_identity", "preserve_thinking", "python_tools",
        "reasoning_effort", "thinking", "thinking_budget", "thinking_mode",
        "tools_in_user_message", "xml_tools",
    }
)  # fmt: skip
"""Names that known models' templates use, all harmless: switches, the date, more tools."""
_RESERVED: Final = frozenset(
    {
        "messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize",
        "chat_template", "raise_exception", "strftime_now", "namespace", "dict", "range", "lipsum",
        "cycler", "joiner", "loop", "self", "caller", "varargs", "kwargs",
    }
)  # fmt: skip


class TemplateOptions(TypedDict, total=False):
    """Options of a template, besides the messages.

    tools: OpenAI's, as dicts. chat_template_kwargs: further names for the template, such as
    enable_thinking. allowed_template_kwargs: names that are allowed (default:
    DEFAULT_TEMPLATE_KWARGS). continue_final_message: the prompt ends with the last message's
    content, which the model continues.
    """

    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    allowed_template_kwargs: Collection[str]
    continue_final_message: bool


def read_template_kwargs(
    given: Mapping[str, object] | None, allowed: Collection[str], special_tokens: Collection[str]
) -> dict[str, Any]:
    """Return plain copies of `chat_template_kwargs`.

    allowed: names that are allowed. special_tokens: names of special tokens in templates.

    Raises:
        InvalidRequestError: a name is not allowed or is in use, or a value is not JSON.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidRequestError(
            f"chat_template_kwargs is a dict of names and values, not {type(given).__name__}"
        )
    if isinstance(allowed, (str, bytes)) or not isinstance(allowed, Collection):
        raise InvalidRequestError(
            f"allowed_template_kwargs={quoted(allowed)}: a collection of names"
        )
    for name in given:
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            reason = "a name is an identifier that begins with a letter"
        elif name in _RESERVED or name in special_tokens or name.endswith("_token"):
            reason = "it has a meaning in every template: choose another name"
        elif name not in allowed:
            names = ", ".join(sorted(map(str, allowed))) or "none"
            reason = (
                f"allowed are {names}: leave it out, or have it allowed in allowed_template_kwargs"
            )
        else:
            continue
        raise InvalidRequestError(f"chat_template_kwargs[{quoted(name)}]: {reason}")
    try:
        return {name: plain(value) for name, value in given.items()}
    except (TypeError, RecursionError) as error:
        raise InvalidRequestError(f"chat_template_kwargs: {error}") from None


MAX_TEMPLATE_CHARS: Final = 1 << 16
_CONTINUED: Final = "CONTINUE_FINAL_MESSAGE_TAG "
"""Mark of the prompt's end: the same as in transformers, because templates might use its length."""


class ChatTemplate:
    """One template.

    Args:
        text: in jinja2's language.
        special_tokens: the special tokens' texts by name, as templates know them ("bos_token").
        source: where the template comes from, for error messages.
        guard: keeps special tokens out of callers' texts; None lets them pass.
        now: the clock that templates read the date from.

    Raises:
        InvalidRequestError: it is longer than MAX_TEMPLATE_CHARS.
    """

    def __init__(
        self,
        text: str,
        special_tokens: Mapping[str, str],
        source: str,
        guard: SpecialTokenGuard | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        if len(text) > MAX_TEMPLATE_CHARS:
            raise InvalidRequestError(
                f"the chat template of {source} has {len(text)} characters: at most "
                f"{MAX_TEMPLATE_CHARS}"
            )
        self.text = text
        self._special_tokens = special_tokens
        self._guard = guard
        self._now = now
        self._renderer = Renderer(text, source)
        self._long_renderer = Renderer(text, source)  # the rest does not wait for these

    def close(self) -> None:
        """End the template's processes, if there are any."""
        self._renderer.end()
        self._long_renderer.end()

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        allowed_template_kwargs: Collection[str] = DEFAULT_TEMPLATE_KWARGS,
        continue_final_message: bool = False,
    ) -> list[str]:
        """Return the prompt of a conversation, in parts that no token may span. Thread-safe.

        tools: as the template gets them. continue_final_message: see `TemplateOptions`.
        add_generation_prompt: open the assistant's turn; None means yes, unless the last message is
        continued.

        Raises:
            InvalidRequestError: there are no messages, they are invalid, or the template rejects
                them or exceeds a limit of the renderer.
            RenderProcessError: the template's process does not start.
        """
        if not messages:
            raise InvalidRequestError("the conversation is empty: pass at least one message")
        _check_end(add_generation_prompt, continue_final_message)
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        given = read_template_kwargs(
            chat_template_kwargs, allowed_template_kwargs, self._special_tokens
        )
        try:
            given["tools"] = None if tools is None else [plain(tool) for tool in tools]
        except (TypeError, RecursionError) as error:
            raise InvalidRequestError(f"the tools of a chat: {error}") from None
        try:
            turns = [template_message(message) for message in messages]
            # Templates also test for documents, and treat None as missing.
            conversation: dict[str, Any] = {"documents": None, **given, "messages": turns}
            sentinel = None
            if self._guard is not None:
                conversation, sentinel = self._guard.mark(conversation)
        except (TypeError, RecursionError) as error:
            raise InvalidRequestError(f"the messages of a chat: {error}") from None
        end = _mark_end(conversation["messages"][-1]) if continue_final_message else ""
        renderer = self._long_renderer if is_long(messages, tools) else self._renderer
        text = renderer.render(
            {
                **self._special_tokens,
                **conversation,
                "add_generation_prompt": add_generation_prompt,
            },
            self._now(),
        )
        if continue_final_message:
            text = _cut_end(text, end)
        return [text] if self._guard is None else self._guard.parts(text, sentinel)


def _check_end(add_generation_prompt: object, continue_final_message: object) -> None:
    if not isinstance(add_generation_prompt, bool | None):
        raise InvalidRequestError(
            f"add_generation_prompt={quoted(add_generation_prompt)}: True, False or None"
        )
    if not isinstance(continue_final_message, bool):
        raise InvalidRequestError(
            f"continue_final_message={quoted(continue_final_message)}: True or False"
        )
    if continue_final_message and add_generation_prompt:
        raise InvalidRequestError(
            "add_generation_prompt begins another message, continue_final_message continues the "
            "last one: leave out either"
        )


def _mark_end(message: dict[str, Any]) -> str:
    """Put the mark at the end of the final message; return the message's text without it."""
    final, key = message.get("content"), "content"
    if isinstance(final, list):
        texts = [part for part in final if isinstance(part, dict) and "text" in part]
        message, key = texts[-1] if texts else {}, "text"
        final = message.get(key)
    if not isinstance(final, str):
        raise InvalidRequestError("continue_final_message: the last message has no text")
    message[key] = final + _CONTINUED
    return final


def _cut_end(text: str, final: str) -> str:
    end = text.rfind(_CONTINUED.strip())
    if end < 0 or final.strip() not in text:
        raise InvalidRequestError(
            "continue_final_message: the chat template leaves out the last message, or parts of it"
        )
    is_whole = text.startswith(_CONTINUED, end)
    return text[:end] if is_whole else text[:end].rstrip()  # otherwise the template has trimmed it


class ChatTemplates:
    """The templates of a model: one for all conversations, or another one for those with tools.

    Args:
        texts: by name, "default" and "tool_use".
        special_tokens, source: see `ChatTemplate`.
        backend: the tokenizer, whose special tokens are guarded.
    """

    def __init__(
        self,
        texts: Mapping[str, str],
        special_tokens: Mapping[str, str],
        source: str,
        backend: tokenizers.Tokenizer,
    ) -> None:
        self.guard = SpecialTokenGuard(backend, "\0".join(texts.values()))
        self._source = source
        self._templates = {
            name: ChatTemplate(text, special_tokens, source, self.guard)
            for name, text in texts.items()
        }

    @property
    def text(self) -> str | None:
        """The source, the one for tools if there are two; None if there is none."""
        template = self._templates.get("tool_use") or self._templates.get("default")
        return None if template is None else template.text

    @property
    def has_default(self) -> bool:
        """Whether there is one for conversations without tools."""
        return "default" in self._templates

    def template(self, has_tools: bool) -> ChatTemplate:
        """Return the template of a conversation.

        Raises:
            InvalidRequestError: there is none; its param is chat_template.
        """
        template = self._templates.get("default")
        if has_tools:
            template = self._templates.get("tool_use", template)
        if template is None:
            names = ", ".join(BUILT_IN_TEMPLATES)
            raise InvalidRequestError(
                f"{self._source} has no chat template (or has several, and none of them is named "
                f"default): start with --chat-template FILE (or {names}), or send a prompt, as to "
                "/v1/completions",
                "chat_template",
            )
        return template

    @cached_property
    def dialect(self) -> TemplateDialect:
        """Dialect of the template, detected when a conversation needs it."""
        template = self.template(has_tools=True)
        return TemplateDialect(
            lambda messages, **more: "".join(template.render(messages, **more)), template.text
        )

    def close(self) -> None:
        """End the templates' processes; rendering again starts new ones."""
        for template in self._templates.values():
            template.close()
