"""The loop of nanocore chat: questions, commands, keys, and one question alone."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from nanocore.cli.chat.commands import CHAT_SAMPLING
from nanocore.cli.chat.conversation import Conversation
from nanocore.cli.chat.interactive import ChatLoop, CommandCompleter, Prompt
from nanocore.cli.chat.session import ask_once, with_input
from nanocore.cli.interrupts import Interrupts
from nanocore.client.chat.events import Failed, Finished, Started, Text, ToolBegin, Usage
from nanocore.protocol.errors import (
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    EngineOverloadedError,
    NanocoreError,
)
from tests.bench.fake_server import chat as chat_chunk
from tests.bench.fake_server import serving
from tests.cli.chat.fake_target import FakeTarget, Shown, answer

SYSTEM = {"role": "system", "content": "Be kind."}


class Typed:
    """Reads these, one after another, and then the end."""

    def __init__(self, *texts: str) -> None:
        self._texts = list(texts)

    async def read(self) -> str:
        if not self._texts:
            raise EOFError
        return self._texts.pop(0)


def chat(target: FakeTarget, *texts: str, system: str = "") -> str:
    """What is shown when these are typed."""
    shown, interrupts = Shown(), Interrupts()
    loop = ChatLoop(target, Conversation(system), {}, shown.view, interrupts)
    assert asyncio.run(interrupts.run(loop.run(Typed(*texts)))) == 0
    return shown.text


def contents(messages: list[dict[str, Any]]) -> list[Any]:
    return [message["content"] for message in messages]


def test_a_conversation_goes_on_with_its_answers() -> None:
    target = FakeTarget(answer("hi there"), answer("still here"))
    assert chat(target, "hello", "", "  ", "you?", system="Be kind.") == "hi there\nstill here\n"
    assert target.asked[0][0] == [SYSTEM, {"role": "user", "content": "hello"}]
    assert contents(target.asked[1][0]) == ["Be kind.", "hello", "hi there", "you?"]


def test_what_is_typed_after_exit_is_not_read() -> None:
    target = FakeTarget()
    for end in ("/exit", "/bye", "/quit"):
        assert chat(target, end, "hello") == ""
    assert target.asked == []


def test_sampling_is_what_was_set_last() -> None:
    target = FakeTarget(answer("a"), answer("b"))
    shown = chat(
        target, "/set seed 3", "/set temperature 0", "x", "/set seed", "/set top_p 7", "/set", "y"
    )
    assert [sampling for _, sampling in target.asked] == [
        {"seed": 3, "temperature": 0}, {"temperature": 0},
    ]  # fmt: skip
    assert "top_p" in shown


SOURCES = {
    "recommended by the model": {"temperature": 0.6},
    "defaults, as the model recommends none": {},
    "everything else: the server's defaults": None,
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_model_that_recommends_nothing_gets_defaults_and_the_source_is_shown(source: str) -> None:
    target = FakeTarget(answer("a"), answer("b"), answer("c"))
    target.default_sampling = SOURCES[source]
    shown = chat(
        target, "x", "/set", "/set temperature = 0", "y", "/set", "/set parameter max_tokens null",
        "z",
    )  # fmt: skip
    defaults = {} if SOURCES[source] != {} else dict(CHAT_SAMPLING)
    assert [sampling for _, sampling in target.asked] == [
        defaults, {**defaults, "temperature": 0},
        {**defaults, "temperature": 0, "max_tokens": None},
    ]  # fmt: skip
    before, after = (" ".join(part.split()) for part in shown.split("b\n"))
    assert source in before
    assert after.startswith("set here: temperature=0 ")
    assert after.endswith("temperature=0, max_tokens=null c")
    assert ("temperature=0.6" in before) == (SOURCES[source] == {"temperature": 0.6})
    if SOURCES[source] == {}:
        assert "temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, max_tokens=2048" in before
        assert "none: top_k=40, top_p=0.95, min_p=0.05, max_tokens=2048" in after


def test_a_question_is_asked_again_without_its_answer() -> None:
    target = FakeTarget(answer("a"), answer("b"), answer("c"))
    assert chat(target, "x", "y", "/retry") == "a\nb\nc\n"
    assert target.asked[1] == target.asked[2]


def test_what_was_taken_back_or_forgotten_is_not_sent() -> None:
    target = FakeTarget(*map(answer, "abcd"))
    chat(target, "one", "two", "/undo", "three", "/clear", "/system Be kind.", "four")
    assert contents(target.asked[2][0]) == ["one", "a", "three"]
    assert contents(target.asked[3][0]) == ["Be kind.", "four"]


def test_the_systems_words_are_shown_and_removed() -> None:
    target = FakeTarget(answer("a"))
    shown = chat(target, "/system", "/system -", "/system", "x", system="Be kind.")
    assert shown == "Be kind.\n(no system prompt)\na\n"
    assert contents(target.asked[0][0]) == ["x"]


def test_a_model_is_shown_and_changed_and_the_conversation_stays() -> None:
    target = FakeTarget(answer("a"), answer("b"))
    shown = chat(target, "x", "/model", "/model none", "/model other", "y")
    assert shown.splitlines() == [
        "a", "* fake", "  other", "there is no model 'none'", "(model: other)", "b",
    ]  # fmt: skip
    assert contents(target.asked[1][0]) == ["x", "a", "y"]


@pytest.mark.parametrize(
    "error",
    [
        EngineDeadError("the engine is gone"),
        EngineOverloadedError("too busy"),
        ConfigError("HTTP 401: wrong key"),
    ],
)
def test_an_error_is_a_line_and_the_question_can_be_asked_again(error: NanocoreError) -> None:
    target = FakeTarget([error], answer("a"))
    shown = chat(target, "x", "/retry")
    assert shown == f"{error}; /retry asks again\na\n"
    assert target.asked[0] == target.asked[1]


def test_a_conversation_that_is_too_long_can_be_shortened() -> None:
    too_long = ContextLengthError("the prompt has 101 tokens: max_model_len=100")
    target = FakeTarget(answer("a"), [too_long], answer("b"))
    shown = chat(target, "x", "y", "/undo", "/undo", "z")
    error = (
        "the conversation is longer than the context of 100 tokens: /undo takes back the last "
        "turn, /new starts afresh"
    )
    assert " ".join(shown.split()) == f"a {error} (removed: y) (removed: x) b"
    assert contents(target.asked[2][0]) == ["z"]


def test_the_model_is_shown_and_a_system_prompt_is_set_as_in_ollama() -> None:
    target = FakeTarget(answer("a"))
    shown = chat(target, "/show", "/?", "/set system Be kind.", "x")
    assert shown.startswith("model: fake\ncontext: 100 tokens\neverything else: the server's")
    assert "/help" in shown
    assert contents(target.asked[0][0]) == ["Be kind.", "x"]


def test_a_defect_of_ours_ends_no_chat_and_loses_nothing_of_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    defect: Any = RuntimeError("a\nbug")
    target = FakeTarget(answer("a"), [Text("half"), defect], [defect], answer("b"))

    async def models() -> list[str]:
        raise defect

    monkeypatch.setattr(target, "models", models)
    shown = chat(target, "w", "x", "y", "/model", "/retry")
    assert shown == "a\nhalf\nb\n"
    assert contents(target.asked[3][0]) == ["w", "a", "x", "half", "y"]
    expected = "internal error, the chat continues: RuntimeError: a bug"
    assert [record.getMessage() for record in caplog.records] == [expected] * 4
    assert all(record.exc_info for record in caplog.records)


def test_what_failed_is_left_behind_but_for_what_came_before() -> None:
    target = FakeTarget([EngineDeadError("gone")], answer("a"))
    chat(target, "x", "y")
    assert contents(target.asked[1][0]) == ["y"]

    gone = EngineDeadError("gone")
    target = FakeTarget([Started("r", (), 0), Text("half"), Failed(gone), gone], answer("b"))
    assert chat(target, "x", "y") == "half\ngone; /retry asks again\nb\n"
    assert contents(target.asked[1][0]) == ["x", "half", "y"]


def test_ctrl_c_stops_the_answer_and_not_the_chat() -> None:
    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    target = FakeTarget([Started("r", (), 0), Text("half"), interrupt], answer("b"))
    assert chat(target, "x", "y") == "half\n(stopped)\nb\n"
    assert target.num_left == 1
    assert contents(target.asked[1][0]) == ["x", "half", "y"]


def test_ctrl_c_between_answers_does_nothing_and_stops_a_look_for_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = FakeTarget(answer("a"))

    async def models() -> list[str]:
        signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    monkeypatch.setattr(target, "models", models)
    assert chat(target, "/model", "x") == "a\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_that_end_the_chat_leave_the_answer(number: signal.Signals) -> None:
    target = FakeTarget([Text("half"), lambda: signal.raise_signal(number)])
    shown, interrupts = Shown(), Interrupts()
    loop = ChatLoop(target, Conversation(), {}, shown.view, interrupts)
    assert asyncio.run(interrupts.run(loop.run(Typed("x", "y")))) == 128 + number
    assert (len(target.asked), target.num_left) == (1, 1)


def test_an_answer_that_waits_for_an_engine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanocore.cli.chat.interactive._LOST_POLL_S", 0.001)
    target = FakeTarget()
    waits = asyncio.Event()

    async def ask(*_: object) -> Any:
        target.is_connected = False
        await waits.wait()
        yield Text("a")

    shown, interrupts = Shown(), Interrupts()
    note = shown.view.note

    def noted(text: str) -> None:
        note(text)
        waits.set()

    monkeypatch.setattr(target, "ask", ask)
    monkeypatch.setattr(shown.view, "note", noted)
    loop = ChatLoop(target, Conversation(), {}, shown.view, interrupts)
    asyncio.run(interrupts.run(loop.run(Typed("x"))))
    assert shown.text == "(no engine is running; waiting for one, Ctrl-C stops)\na\n"


def test_a_full_context_is_reported() -> None:
    shown = chat(FakeTarget(answer("a b c", "length", 97)), "x")
    assert shown.splitlines()[1:] == [
        "(truncated: the context of 100 tokens is full; /new starts afresh)"
    ]


# -- with keys ---------------------------------------------------------------------------------


@contextmanager
def keyboard() -> Iterator[PipeInput]:
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        yield keys


def prompted(keys: PipeInput, interrupts: Interrupts, history: InMemoryHistory) -> Prompt:
    return Prompt(
        history, lambda columns: f"{columns}", lambda: (), interrupts, keys, DummyOutput()
    )


def typed(keys: str, num_texts: int, *entries: str) -> list[str]:
    """So many texts that are read of these keys, which come at once, with this history."""
    with keyboard() as pipe:
        interrupts, history, read = Interrupts(), InMemoryHistory(list(entries)), []

        async def run() -> None:
            prompt = prompted(pipe, interrupts, history)
            pipe.send_bytes(keys.encode(errors="surrogateescape"))
            read.extend([await prompt.read() for _ in range(num_texts)])
            pipe.send_text("\x04")  # Ctrl-D
            with pytest.raises(EOFError):
                await prompt.read()

        asyncio.run(interrupts.run(run()))
        return read


@pytest.mark.parametrize(
    ("keys", "texts"),
    [
        ("hello\r", ["hello"]),
        ("a\x1b\rb\r", ["a\nb"]),
        ("\x1b[200~a\r\nb\x1b[201~\r", ["a\nb"]),
        ("one\rtwo\rthree\r", ["one\ntwo\nthree"]),
        ("/new\r/set seed 3\rhello\r", ["/new", "/set seed 3", "hello"]),
        ('"""a\rb\r"""\r', ["a\nb"]),
        ('"""one "line""""\r', ['one "line"']),
        ("wrong\x03right\r", ["right"]),
        ("\udcffü\r", ["\ufffdü"]),
    ],
    ids=[
        "enter", "alt-enter", "bracketed paste", "paste", "commands ahead", "quotes",
        "quotes on a line", "ctrl-c", "no UTF-8",
    ],
)  # fmt: skip
def test_keys_make_texts(keys: str, texts: list[str]) -> None:
    assert typed(keys, len(texts)) == texts


def test_what_was_typed_before_is_found_again() -> None:
    assert typed("\x12one\r\r", 1, "line one", "line two") == ["line one"]  # Ctrl-R


def completed(text: str) -> list[str]:
    completer = CommandCompleter(lambda: ["qwen", "llama"])
    event = CompleteEvent(completion_requested=True)
    found = completer.get_completions(Document(text), event)
    return [text[: len(text) + one.start_position] + one.text for one in found]


def test_commands_and_what_they_take_are_completed() -> None:
    assert completed("/cl") == ["/clear"]
    assert completed("/s") == ["/show", "/system", "/set"]
    assert completed("/set top") == ["/set top_p", "/set top_k"]
    assert completed("/model q") == ["/model qwen"]
    assert completed("hello /s") == completed("/new x") == []


# -- one question -----------------------------------------------------------------------------


def once(target: FakeTarget) -> None:
    conversation = Conversation()
    conversation.say("x")
    asyncio.run(ask_once(target, conversation, {"seed": 3}))


def test_one_question_prints_its_answer_alone(capsys: pytest.CaptureFixture[str]) -> None:
    target = FakeTarget(answer("an\x1b answer"))
    once(target)
    assert capsys.readouterr() == ("an\x1b answer\n", "")  # to no terminal, as it is
    assert target.asked == [([{"role": "user", "content": "x"}], {"seed": 3})]
    target = FakeTarget(answer("an answer"))
    target.default_sampling = {}
    once(target)
    assert target.asked[0][1] == {**CHAT_SAMPLING, "seed": 3}


def test_to_a_terminal_words_do_no_harm(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    once(FakeTarget(answer("These words clear\x1b[2J no screen")))
    assert capsys.readouterr().out == "These words clear\\x1b[2J no screen\n"


@pytest.mark.parametrize(
    ("piped", "asked"),
    [
        ("one\ntwo\n", "Sum up:\n\none\ntwo"),
        ("", "Sum up:"),
        (" \n", "Sum up:"),
        (None, "Sum up:"),  # not open for reading
    ],
)
def test_piped_input_is_appended_to_the_question(
    piped: str | None, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "piped"
    path.write_text(piped or "")
    fd = os.open(path, os.O_WRONLY if piped is None else os.O_RDONLY)
    with open(fd) as file:
        monkeypatch.setattr("sys.stdin", file)
        assert with_input("Sum up:") == asked


def test_an_open_pipe_without_input_is_waited_for_which_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nanocore.cli.chat.session._INPUT_PATIENCE_S", 0.0)
    reading, writing = os.pipe()
    with open(reading) as file:
        monkeypatch.setattr("sys.stdin", file)
        monkeypatch.setattr(
            "nanocore.system.standard_streams.complain", lambda text: os.close(writing)
        )
        assert with_input("hi") == "hi"


def test_an_answer_that_is_cut_says_so_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    once(FakeTarget(answer("half", "length")))
    written = capsys.readouterr()
    assert written.out == "half\n"
    assert written.err == "truncated at max_tokens\n"


def test_an_answer_that_cannot_be_written_is_an_error_and_not_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sys.stdout", Full())
    with pytest.raises(NanocoreError, match="standard output cannot be written: No space left"):
        once(FakeTarget(answer("an answer")))


def test_what_the_model_calls_is_a_line_that_does_no_harm(
    capsys: pytest.CaptureFixture[str],
) -> None:
    usage = Usage(3, 0, 2, 0)
    once(FakeTarget([Started("r", (), 0), ToolBegin(0, "c", "f\x1b"), Finished("stop", usage)]))
    assert capsys.readouterr() == ("", "the model calls f\\x1b \n")


def test_one_question_that_cannot_be_answered_is_an_error_of_usage() -> None:
    with pytest.raises(ConfigError, match="too long"):
        once(FakeTarget([ContextLengthError("too long")]))
    with pytest.raises(EngineDeadError):
        once(FakeTarget([EngineDeadError("gone")]))
    with pytest.raises(NanocoreError, match="ended early: abort"):
        once(FakeTarget(answer("half", "abort")))


PROGRAM = """\
import sys
sys.modules["prompt_toolkit"] = sys.modules["rich"] = None
from nanocore.cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(("flags", "typed"), [(["-q", "hi"], ""), ([], "hi\n")])
def test_a_question_needs_nothing_to_prompt_with(flags: list[str], typed: str) -> None:
    with serving(lambda body: (200, chat_chunk(["a", "b"]))) as server:
        command = [sys.executable, "-c", PROGRAM, "chat", "--url", server.url, *flags]
        done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ab\n"), done.stderr
