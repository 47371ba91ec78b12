"""What conversations ask for beside their messages."""

from __future__ import annotations

from typing import Any

import pytest

from nanocore.http.dialects.chat_completions import ChatCompletionRequest
from nanocore.http.dialects.response_tools import read_response_tools
from nanocore.http.endpoints.tokenize import TokenizeRequest
from nanocore.http.errors import HttpError
from nanocore.http.settings import AppSettings

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "sub", "mul")]
TURNS = [{"role": "user", "content": "1 + 2"}]


def allowed(mode: str | None, *names: str) -> dict[str, Any]:
    """As OpenAI's chat completions have it."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("kind", [ChatCompletionRequest, TokenizeRequest])
def test_allowed_tools_are_those_that_the_model_sees(mode: str, kind: Any) -> None:
    choice = allowed(mode, "mul", "add")
    options = kind(messages=TURNS, tools=TOOLS, tool_choice=choice).options(AppSettings())
    assert (options["tools"], options["tool_choice"]) == ([TOOLS[0], TOOLS[2]], mode)


@pytest.mark.parametrize(
    "choice", [{"type": "allowed_tools", "allowed_tools": 1}, allowed("none", "add"), allowed(None)]
)
def test_allowed_tools_of_another_form_are_refused(choice: Any) -> None:
    request = ChatCompletionRequest(messages=TURNS, tools=TOOLS, tool_choice=choice)
    with pytest.raises(HttpError, match="allowed_tools has tools, a list, and mode") as refused:
        request.options(AppSettings())
    assert (refused.value.status, refused.value.param) == (400, "tool_choice")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_an_allowed_tool_that_is_not_there_is_refused_by_its_place(mode: str) -> None:
    request = ChatCompletionRequest(
        messages=TURNS, tools=TOOLS, tool_choice=allowed(mode, "add", "div")
    )
    place = "tool_choice.allowed_tools.tools[1]"
    with pytest.raises(HttpError, match="which is none of the tools") as refused:
        request.options(AppSettings())
    assert (refused.value.status, refused.value.param) == (400, place)
    entries = [{"type": "web_search"}, {"type": "function", "name": "div"}]
    choice = {"type": "allowed_tools", "mode": mode, "tools": entries}
    with pytest.raises(HttpError) as refused:
        read_response_tools([{"type": "function", "name": "add"}], choice)
    assert refused.value.param == "tool_choice.tools[1]"


def test_auto_without_tools_is_none() -> None:
    options = ChatCompletionRequest(messages=TURNS, tool_choice="auto").options(AppSettings())
    assert (options["tools"], options["tool_choice"]) == (None, None)
