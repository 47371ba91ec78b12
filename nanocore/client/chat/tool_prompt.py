"""Tools, calls and results as text, for models whose chat templates know of none.

The form of calls is Hermes's, which many models have seen in training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from nanocore.client.chat.messages import plain
from nanocore.client.chat.tools import Tool
from nanocore.protocol.errors import InvalidRequestError

ToolPrompt: TypeAlias = Literal["generic", "none"]
"""How tools are shown that the template does not show: by the text below, or not at all."""
GENERIC_FORMAT: Final = "hermes"
"""The parser of calls that are written as described here."""
_TOOLS: Final = """\
# Tools

You may call these functions. Each line describes one:
<tools>
{tools}
</tools>"""
_CALLS: Final = """

To call one, write its name and its arguments as JSON between these tags, and nothing else:
<tool_call>
{"name": "the function's name", "arguments": {"name of an argument": "its value"}}
</tool_call>"""


def describe_tools(tools: Sequence[Tool], tool_format: str | None) -> str:
    """Text for the system's turn. tool_format: how calls will be read; only Hermes's is described.

    Raises:
        InvalidRequestError: a tool holds what JSON cannot.
    """
    try:
        lines = [json.dumps(plain(tool.source), ensure_ascii=False) for tool in tools]
    except (TypeError, RecursionError) as error:
        raise InvalidRequestError(f"the tools of a chat: {error}") from None
    text = _TOOLS.format(tools="\n".join(lines))
    return text + _CALLS if tool_format == GENERIC_FORMAT else text


def call_text(call: Mapping[str, Any]) -> str:
    """A call of the past, as the model was asked to write it.

    Raises:
        InvalidRequestError: it holds what JSON cannot.
    """
    function = call["function"]
    arguments = function["arguments"]
    try:
        if not isinstance(arguments, str):
            arguments = json.dumps(plain(arguments), ensure_ascii=False)
        name = json.dumps(function["name"], ensure_ascii=False)
    except (TypeError, RecursionError) as error:
        raise InvalidRequestError(f"the messages of a chat: {error}") from None
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments or "{}"}}}\n</tool_call>'


def result_text(content: str) -> str:
    """What a call returned, for the user's turn."""
    return f"<tool_response>\n{content}\n</tool_response>"
