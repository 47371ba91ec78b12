"""Slash commands, and the sampling parameters that `/set` and `--set` change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final, NamedTuple

import msgspec

from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.sampling import SamplingParams


class CommandHelp(NamedTuple):
    """argument: in brackets if it is optional, '' if the command takes none."""

    argument: str
    meaning: str


class SlashCommand(NamedTuple):
    """A command as the user typed it."""

    name: str
    argument: str


COMMANDS: Final = {
    "help": CommandHelp("", "list commands and keys (also /?)"),
    "show": CommandHelp("", "show the model, its context and the sampling parameters"),
    "system": CommandHelp("[TEXT]", "show or set the system prompt; - removes it"),
    "model": CommandHelp("[NAME]", "list models, or select one of a server's"),
    "new": CommandHelp("", "forget the conversation (also /clear)"),
    "retry": CommandHelp("", "ask the last question again"),
    "undo": CommandHelp("", "remove the last question and its response"),
    "set": CommandHelp("[NAME[=VALUE]]", "show or set sampling parameters; no VALUE: the default"),
    "exit": CommandHelp("", "end the chat, as Ctrl-D does (also /bye, /quit)"),
}
ALIASES: Final = {"?": "help", "clear": "new", "bye": "exit", "quit": "exit"}
"""Other names of commands, as in Ollama."""
_KEYS: Final = {
    "Alt-Enter": "start a new line",
    '"""': "begin and end a text of several lines",
    "Ctrl-C": "stop the response, or empty the prompt",
    "Ctrl-R": "search what was typed before",
}
SAMPLING_NAMES: Final = (
    "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos",
)  # fmt: skip
CHAT_SAMPLING: Final[Mapping[str, Any]] = {
    "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "max_tokens": 2048,
}  # fmt: skip
"""Defaults where a model recommends nothing: llama.cpp's, and a limit of length. The web page has
the same."""
_FORM: Final = re.compile(r"/(\?|[A-Za-z]*)(?:\s+(.*))?", re.DOTALL)


def parse_command(text: str) -> SlashCommand | None:
    """Return the command in a text, or None: with a leading blank or a path it is a message.

    Raises:
        InvalidRequestError: an unknown command, or a wrong argument.
    """
    found = _FORM.fullmatch(text)
    if found is None:
        return None
    name, argument = found[1].lower(), (found[2] or "").strip()
    name = ALIASES.get(name, name)
    if name not in COMMANDS:
        near = get_close_matches(name, [*COMMANDS, *ALIASES], n=1)
        hint = f"did you mean /{near[0]}?" if near else "see /help."
        raise InvalidRequestError(
            f'unknown command /{name}; {hint} To send text that starts with "/", put a space '
            "before it."
        )
    if argument and not COMMANDS[name].argument:
        raise InvalidRequestError(f"/{name} takes no argument, got {argument!r}")
    return SlashCommand(name, argument)


def is_command(text: str) -> bool:
    """Whether a text has the form of a command, known or not."""
    return _FORM.fullmatch(text) is not None


def help_text() -> str:
    rows = {f"/{name} {one.argument}".strip(): one.meaning for name, one in COMMANDS.items()}
    rows |= _KEYS
    width = max(map(len, rows))
    return "\n".join([f"{head:<{width}}  {meaning}" for head, meaning in rows.items()])


def parse_setting(argument: str) -> tuple[str, str]:
    """Return name and value of `NAME=VALUE`, `NAME VALUE` or Ollama's `parameter NAME VALUE`."""
    name, value = re.split(r"\s*=\s*|\s+|$", argument.removeprefix("parameter "), maxsplit=1)
    return name, value.strip()


def with_value(sampling: Mapping[str, Any], name: str, text: str) -> dict[str, Any]:
    """Return sampling parameters with one changed. text: JSON or plain text; '' removes it.

    Raises:
        InvalidRequestError: an unknown name, or a value out of range.
    """
    if name not in SAMPLING_NAMES:
        near = get_close_matches(name, SAMPLING_NAMES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(SAMPLING_NAMES)}"
        raise InvalidRequestError(f"unknown parameter {name!r}; {hint}")
    changed = {known: value for known, value in sampling.items() if known != name}
    if text:
        changed[name] = _read(name, text)
    SamplingParams(**changed)  # raises for a value out of range
    return changed


def with_defaults(
    given: Mapping[str, Any], recommended: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the parameters to send. recommended: see `EngineChatTarget.default_sampling`."""
    return {**(CHAT_SAMPLING if recommended == {} else {}), **given}


def sampling_in_force(given: Mapping[str, Any], recommended: Mapping[str, Any] | None) -> str:
    """Return a line for each source of sampling parameters, with their values."""
    lines = [f"set here: {sampling_line(given)}"] if given else []
    if recommended is None:
        return "\n".join([*lines, "everything else: the server's defaults"])
    source = "recommended by the model" if recommended else "defaults, as the model recommends none"
    others = {
        name: value for name, value in (recommended or CHAT_SAMPLING).items() if name not in given
    }
    if others:
        lines.append(f"{source}: {sampling_line(others)}")
    return "\n".join(lines)


def sampling_line(sampling: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name}={value if _is_plain(value) else msgspec.json.encode(value).decode()}"
        for name, value in sampling.items()
    )


def _is_plain(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _read(name: str, text: str) -> Any:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return text if name == "stop" and not isinstance(value, (str, list)) else value
