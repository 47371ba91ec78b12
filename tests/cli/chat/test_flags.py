"""Flags of nanocore chat, and the commands typed in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanocore.cli import command
from nanocore.cli.chat.command import ChatSettings, parse
from nanocore.cli.chat.commands import COMMANDS, SlashCommand, help_text, parse_command
from nanocore.cli.main import main
from nanocore.protocol.endpoint import default_endpoint
from nanocore.protocol.errors import ConfigError, InvalidRequestError


def test_the_demo_model_is_launched_unless_a_model_comes_first() -> None:
    options = parse([], {})
    assert (options.engine.flags, options.engine.endpoints) == ((), ())
    assert (options.url, options.quick, options.sampling, options.system) == (None, None, {}, "")

    options = parse(
        ["path/to", "--dtype", "float32", "-q", "hi", "--set", "seed=3", "--set", "stop=a=b"], {}
    )
    assert options.engine.flags == ("--model=path/to", "--dtype", "float32")
    assert (options.quick, options.sampling) == ("hi", {"seed": 3, "stop": "a=b"})


def test_a_bare_endpoint_is_the_users_own(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    own = default_endpoint()
    assert parse(["--endpoint"], {}).engine.endpoints == (own,)
    assert parse(["--endpoint", "--set", "top_k=1"], {}).engine.endpoints == (own,)
    assert parse(["--endpoint", "ipc:///x/y"], {}).engine.endpoints == ("ipc:///x/y",)


def test_a_chat_template_is_a_name_a_text_or_a_file(tmp_path: Path) -> None:
    text = "{{ bos_token + messages[0].content }}"
    (tmp_path / "own.jinja").write_text(text)
    for given, used in (("chatml", "chatml"), (text, text), (str(tmp_path / "own.jinja"), text)):
        assert parse(["--chat-template", given], {}).chat_template == used
    assert parse([], {}).chat_template is None


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:8000", "http://h:8000/v1"),
        ("http://h:8000/", "http://h:8000/v1"),
        ("https://h/api/v1/", "https://h/api/v1"),
    ],
)
def test_a_url_without_a_path_gets_v1(url: str, expected: str) -> None:
    assert parse(["--url", url], {}).url == expected


def test_a_key_is_the_flags_or_the_environments_without_line_ends() -> None:
    environment = {"OPENAI_API_KEY": "theirs"}
    assert parse(["--url", "http://h"], {}).api_key is None
    assert parse(["--url", "http://h"], environment).api_key == "theirs"
    assert parse(["--url", "http://h", "--api-key", "mine"], environment).api_key == "mine"
    assert parse(["--url", "http://u@h"], environment).api_key is None

    assert parse(["--url", "http://h"], {"OPENAI_API_KEY": "key\r\n"}).api_key == "key"
    wrong = {"OPENAI_API_KEY": "a\nb"}
    assert parse([], wrong).api_key is None
    with pytest.raises(ConfigError, match="OPENAI_API_KEY: a key is printable ASCII"):
        parse(["--url", "http://h"], wrong)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--url", "h:8000"], "not a URL such as http://HOST:8000/v1"),
        (["--url", "http://h/v1?x=1"], "not a URL such as"),
        (["--url", "http://amy:p@ss@h:99999/v1"], r"'http://\*{3}@h:99999/v1' is not a URL"),
        (["m", "--url", "http://h"], "leave m out"),
        (["--url", "http://h", "--dtype", "float32"], "leave --dtype out"),
        (["--url", "http://h", "--endpoint"], "leave --endpoint out"),
        (["--url", "http://h", "--chat-template", "chatml"], "leave --chat-template out"),
        (["--chat-template", "chatlm"], "no such file; built-in templates: chatml; without"),
        (["--url", "http://h", "--system", "x"], "did you mean --system-prompt?"),
        (["--model-name", "m"], "--model-name is for a server, with --url"),
        (["--api-key", "k"], "--api-key is for a server"),
        (["m", "--endpoint", "ipc:///x/y"], "leave m out"),
        (["m", "--model", "n"], "two models, m and --model n"),
        (["-q", " "], "--quick: a message is needed"),
        (["-q", "a\udcffb"], "--quick: it is not UTF-8"),
        (["--system-prompt", "\udcff"], "--system-prompt: it is not UTF-8"),
        (["--url", "http://h", "--api-key", "a\nb"], "--api-key: a key is printable ASCII"),
        (["--url", "http://u:p@h", "--api-key", "k"], "give one of them"),
        (["--set", "temperature"], "NAME=VALUE is needed"),
        (["--set", "temprature=0"], "did you mean temperature"),
        (["--set", "top_p=2"], "top_p"),
    ],
)
def test_what_cannot_be_is_said(arguments: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        parse(arguments, {})


@pytest.mark.parametrize(
    ("arguments", "package"),
    [([], "prompt_toolkit"), (["--url", "http://h", "-q", "x"], "aiohttp")],
)
def test_missing_packages_are_named(
    arguments: list[str],
    package: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == package else name)
    monkeypatch.setattr(ChatSettings, "is_prompted", package == "prompt_toolkit")
    with pytest.raises(SystemExit) as ended:
        main(["chat", *arguments])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"{package}: in the repository, pip install '.[chat]'\n" in error


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("/new", SlashCommand("new", "")),
        ("/NEW ", SlashCommand("new", "")),
        ("/clear", SlashCommand("new", "")),
        ("/bye", SlashCommand("exit", "")),
        ("/?", SlashCommand("help", "")),
        ("/set temperature 0.5", SlashCommand("set", "temperature 0.5")),
        ("/set", SlashCommand("set", "")),
        ("/system Two\nlines.", SlashCommand("system", "Two\nlines.")),
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
    ],
)
def test_what_is_wrong_with_a_command_is_said(text: str, error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        parse_command(text)


def test_help_has_a_line_for_each_command() -> None:
    assert [line.split()[0] for line in help_text().splitlines()][: len(COMMANDS)] == [
        f"/{name}" for name in COMMANDS
    ]
