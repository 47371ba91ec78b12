"""Names beyond the messages that callers may set for a chat template (`chat_template_kwargs`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, TypedDict

from nanocore.client.chat.messages import plain
from nanocore.protocol.errors import InvalidRequestError, quoted

DEFAULT_TEMPLATE_KWARGS: Final = frozenset(
    {
        "builtin_tools", "controls", "custom_tools", "date_string", "documents", "enable_thinking",
        "keep_past_thinking", "model_identity", "preserve_thinking", "python_tools",
        "reasoning_effort", "thinking", "thinking_budget", "thinking_mode",
        "tools_in_user_message", "xml_tools",
    }
)  # fmt: skip
"""What templates of known models ask for, all of it harmless: switches, the date, more tools."""
_RESERVED: Final = frozenset(
    {
        "messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize",
        "chat_template", "raise_exception", "strftime_now", "namespace", "dict", "range", "lipsum",
        "cycler", "joiner", "loop", "self", "caller", "varargs", "kwargs",
    }
)  # fmt: skip


class TemplateOptions(TypedDict, total=False):
    """What a template gets beside the messages.

    tools: OpenAI's, as dicts. chat_template_kwargs: further names for the template, such as
    enable_thinking. allowed_template_kwargs: which names these may be; DEFAULT_TEMPLATE_KWARGS.
    continue_final_message: the prompt ends with the last message's content (or with what the named
    key of it has), for the model to go on there.
    """

    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    allowed_template_kwargs: Collection[str]
    continue_final_message: bool | str


def read_template_kwargs(
    given: Mapping[str, object] | None, allowed: Collection[str], special_tokens: Collection[str]
) -> dict[str, Any]:
    """Plain copies of what is given.

    allowed: the names that may be. special_tokens: the names that templates know these by.

    Raises:
        InvalidRequestError: a name is not allowed, or has a meaning already, or a value is none
            that JSON can hold.
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
