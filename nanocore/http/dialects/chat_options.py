"""What the dialects of conversations ask for alike, in the words of `ChatOptions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanocore.client.chat.request import ChatOptions
from nanocore.client.chat.template_kwargs import DEFAULT_TEMPLATE_KWARGS
from nanocore.http.settings import AppSettings


def is_function(tool: Mapping[str, Any]) -> bool:
    """Whether it is a tool that the client runs; of other types are those of a vendor's servers."""
    return bool(tool.get("type", "function") == "function")


def template_options(settings: AppSettings, given: Mapping[str, Any]) -> ChatOptions:
    """What all dialects say to the template and the parsers. given: names that it gets."""
    return ChatOptions(
        chat_template_kwargs={**settings.default_chat_template_kwargs, **given},
        allowed_template_kwargs=(
            DEFAULT_TEMPLATE_KWARGS
            | set(settings.allowed_template_kwargs)
            | set(settings.default_chat_template_kwargs)
        ),
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
    )


def effort_kwargs(effort: str | None) -> dict[str, Any]:
    """What a template gets of OpenAI's effort of reasoning; "none" turns thinking off."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}
