"""What is kept of a conversation, in memory, and in what is set."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from nanocore.cli.chat.commands import with_value
from nanocore.cli.chat.conversation import Conversation
from nanocore.cli.chat.files import EngineLog, open_engine_log, state_directory
from nanocore.cli.chat.interactive import BoundedHistory, input_history
from nanocore.protocol.errors import ConfigError, InvalidRequestError

HELLO = {"role": "user", "content": "hello"}
HI = {"role": "assistant", "content": "hi"}


def spoken() -> Conversation:
    conversation = Conversation("Be kind.")
    conversation.say("hello")
    conversation.answer(HI)
    return conversation


def test_a_question_enters_with_its_answer_and_the_system_prompt_stays() -> None:
    conversation = spoken()
    conversation.say("lost")
    conversation.say("found")
    system = {"role": "system", "content": "Be kind."}
    assert conversation.messages == [system, HELLO, HI, {"role": "user", "content": "found"}]

    conversation = spoken()
    conversation.clear()
    assert conversation.messages == [{"role": "system", "content": "Be kind."}]


def test_taking_back_removes_the_last_question_and_what_followed() -> None:
    conversation = spoken()
    conversation.turns.append({"role": "tool", "content": "3"})
    conversation.say("never answered")
    assert conversation.take_back()["content"] == "never answered"
    assert conversation.take_back() == HELLO
    assert conversation.turns == []
    with pytest.raises(InvalidRequestError, match="the conversation is empty"):
        conversation.take_back()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0", 0),
        ("top_p", "0.5", 0.5),
        ("stop", "END", "END"),
        ("stop", "11", "11"),
        ("stop", '["a", "b"]', ["a", "b"]),
        ("ignore_eos", "true", True),
        ("seed", "", None),
    ],
)
def test_a_value_is_json_or_a_text(name: str, text: str, value: Any) -> None:
    changed = with_value({"seed": 3}, name, text)
    assert changed.get(name) == value
    assert changed.get("seed") == (3 if name != "seed" else None)


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("temprature", "0", "did you mean temperature"),
        ("zzz", "0", "known: temperature, top_p"),
        ("temperature", "-1", "temperature"),
        ("temperature", "hot", "temperature must be a number, not 'hot'"),
        ("min_tokens", "9", "at most max_tokens"),
    ],
)
def test_what_cannot_be_is_not_set(name: str, text: str, error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        with_value({"max_tokens": 3}, name, text)


def test_what_was_typed_is_kept_for_its_user_alone_and_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanocore.cli.chat.interactive.MAX_ENTRIES", 3)
    path = tmp_path / "history"
    history = BoundedHistory(path)
    for number in range(7):
        history.store_string(f"{number}\n# ü")
    history.store_string("x" * 20_000)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = BoundedHistory(path)
    assert list(again.load_history_strings()) == ["6\n# ü", "5\n# ü", "4\n# ü"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["directory", "link", "pipe", "no directory"])
def test_a_history_that_cannot_be_used_is_reported_and_kept_in_memory(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = state_directory({"XDG_STATE_HOME": str(tmp_path)}) / "chat-history"
    match kind:
        case "directory":
            path.mkdir()
        case "link":
            path.symlink_to("/dev/zero")
        case "pipe":
            os.mkfifo(path)
        case "no directory":
            path.parent.chmod(0o755)
    notes: list[str] = []
    history = input_history(notes.append)
    assert not isinstance(history, BoundedHistory)
    assert len(notes) == 1
    assert notes[0].endswith(": history is not saved")


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """One that has both its ends: to open it waits for nobody, to read it for ever."""
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize("has_writer", [False, True])
def test_nothing_waits_for_a_pipe(pipe: Path, has_writer: bool) -> None:
    fd = os.open(pipe, os.O_RDWR) if has_writer else -1
    with pytest.raises(ConfigError, match="cannot write the log"):
        EngineLog(pipe)
    if has_writer:
        os.close(fd)


def test_files_lie_in_a_directory_that_is_the_users_alone(tmp_path: Path) -> None:
    directory = state_directory({"XDG_STATE_HOME": str(tmp_path)})
    assert directory == tmp_path / "nanocore"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    directory.chmod(0o755)
    with pytest.raises(ConfigError, match="the directory for history and logs"):
        state_directory({"XDG_STATE_HOME": str(tmp_path)})


def test_without_a_directory_an_engines_log_goes_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    told: list[str] = []
    log = open_engine_log(told.append)
    os.write(log.fd, b"a line")
    assert len(told) == 1
    assert told[0].endswith(": the engine's log is not kept")
    log.close()
    log.close()
