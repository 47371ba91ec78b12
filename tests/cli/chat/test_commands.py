"""What is a command, what is a message, and what is neither."""

from __future__ import annotations

import pytest

from nanocore.cli.chat.commands import COMMANDS, Given, help_text, parse
from nanocore.protocol.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("/new", Given("new", "")),
        ("/NEW ", Given("new", "")),
        ("/set temperature 0.5", Given("set", "temperature 0.5")),
        ("/set", Given("set", "")),
        ("/system Two\nlines.", Given("system", "Two\nlines.")),
        ("/save  a file.json ", Given("save", "a file.json")),
        ("hello", None),
        (" /new", None),
        ("/usr/bin/env is what?", None),
        ("1/2", None),
        ("two\n/new", None),
    ],
)
def test_a_command_begins_with_a_slash_and_a_word(text: str, given: Given | None) -> None:
    assert parse(text) == given


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("/nwe", "there is no command /nwe; did you mean /new"),
        ("/xyzzy", "/help lists them"),
        ("/", "there is no command /;"),
        ("/new all", "/new takes nothing, and was given 'all'"),
        ("/save", "/save needs a FILE"),
    ],
)
def test_what_is_wrong_with_a_command_is_said(text: str, error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        parse(text)


def test_help_has_a_line_for_each_command() -> None:
    assert [line.split()[0] for line in help_text().splitlines()][: len(COMMANDS)] == [
        f"/{name}" for name in COMMANDS
    ]
