"""What begins with a slash: names, what they take, and what they are for."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Final, NamedTuple

from nanocore.protocol.errors import InvalidRequestError


class Command(NamedTuple):
    """argument: as help has it, in brackets if it may be left out, or ''."""

    argument: str
    meaning: str


class Given(NamedTuple):
    """A command as it was typed."""

    name: str
    argument: str


COMMANDS: Final = {
    "help": Command("", "what there is"),
    "system": Command("[TEXT]", "what the model is told first; - for nothing"),
    "model": Command("[NAME]", "which model answers, or let another one answer"),
    "new": Command("", "forget the conversation"),
    "retry": Command("", "ask the last question again"),
    "undo": Command("", "take back the last question and its answer"),
    "set": Command(
        "[NAME [VALUE]]",
        "how tokens are sampled, JSON or text; no VALUE: as the model has it",
    ),
    "save": Command("FILE", "write the conversation to a file"),
    "load": Command("FILE", "go on with the conversation of a file"),
    "exit": Command("", "end, as Ctrl-D does"),
}
_FORM: Final = re.compile(r"/([A-Za-z]*)(?:\s+(.*))?", re.DOTALL)


def parse(text: str) -> Given | None:
    """The command that a text is; None: it is a message, as is what begins with a blank or a path.

    Raises:
        InvalidRequestError: there is no such command, or it takes something else.
    """
    found = _FORM.fullmatch(text)
    if found is None:
        return None
    name, argument = found[1].lower(), (found[2] or "").strip()
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean /{near[0]}?" if near else "/help lists them"
        raise InvalidRequestError(
            f"there is no command /{name}; {hint} (a message begins with a blank to begin with /)"
        )
    takes = COMMANDS[name].argument
    if argument and not takes:
        raise InvalidRequestError(f"/{name} takes nothing, and was given {argument!r}")
    if takes and not takes.startswith("[") and not argument:
        raise InvalidRequestError(f"/{name} needs a {takes}")
    return Given(name, argument)


def is_command(text: str) -> bool:
    """Whether it has the form of one."""
    return _FORM.fullmatch(text) is not None


def help_text() -> str:
    """Of all commands and keys."""
    rows = [(f"/{name} {one.argument}".strip(), one.meaning) for name, one in COMMANDS.items()]
    rows += [
        ("Alt-Enter", "begin a line"),
        ("Ctrl-C", "stop the answer, or empty the prompt"),
        ("Ctrl-R", "look for what was typed before"),
    ]
    width = max(len(head) for head, _ in rows)
    return "\n".join([f"{head:<{width}}  {meaning}" for head, meaning in rows])
