"""What is a command, what is a message, and what is neither."""

from __future__ import annotations

import pytest

from nanocore.cli.chat.commands import COMMANDS, SlashCommand, help_text, parse_command
from nanocore.protocol.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("/new", SlashCommand("new", "")),
        ("/NEW ", SlashCommand("new", "")),
        ("/set temperature 0.5", SlashCommand("set", "temperature 0.5")),
        ("/set", SlashCommand("set", "")),
        ("/system Two\nlines.", SlashCommand("system", "Two\nlines.")),
        ("/save  a file.json ", SlashCommand("save", "a file.json")),
        ("hello", None),
        (" /new", None),
        ("/usr/bin/env is what?", None),
        ("1/2", None),
        ("two\n/new", None),
    ],
)
def test_a_command_begins_with_a_slash_and_a_word(text: str, given: SlashCommand | None) -> None:
    assert parse_command(text) == given


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("/nwe", "unknown command /nwe; did you mean /new"),
        ("/xyzzy", "see /help. To send text"),
        ("/", "unknown command /;"),
        ("/new all", "/new takes no argument, got 'all'"),
        ("/save", "/save needs a FILE"),
    ],
)
def test_what_is_wrong_with_a_command_is_said(text: str, error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        parse_command(text)


def test_help_has_a_line_for_each_command() -> None:
    assert [line.split()[0] for line in help_text().splitlines()][: len(COMMANDS)] == [
        f"/{name}" for name in COMMANDS
    ]
