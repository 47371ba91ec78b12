"""`nanocore chat` as a user has it: in a terminal and in pipes, with engines and a server."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanocore.cli.chat.command import DEMO_SKILLS
from nanocore.cli.chat.target import FALLBACK_NOTE
from tests.bench import fake_server
from tests.cli.chat.terminal import CTRL_C, CTRL_D, ENTER, Terminal, chatting
from tests.cli.paused_engine import paused
from tests.cli.served import DEMO, EXIT_TIMEOUT_S, Descendants, serving
from tests.end_to_end import forked

pytestmark = pytest.mark.campaign
DOCUMENT = (Path(__file__).parents[3] / "docs" / "chat.md").read_text()
GREEDY = ("--set", "temperature=0")
SUM, ANSWER = f"What is 123 + 456?{ENTER}", "123 + 456 = 579"
READY = "demo_model"


@pytest.fixture(autouse=True)
def _state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture(scope="module")
def engine() -> Iterator[forked.Engine]:
    with forked.engine(DEMO, "--dtype", "float32") as running:
        yield running


def engine_pid(terminal: Terminal) -> int:
    """Of the engine that it has launched."""
    (pid,) = [
        pid for pid in Descendants(terminal.pid).pids
        if b"--parent-fd" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]  # fmt: skip
    return pid


def engine_endpoint(pid: int) -> str:
    """Where an engine listens that a chat has launched."""
    command = Path(f"/proc/{pid}/cmdline").read_text()
    (endpoint,) = re.findall(r"\0--listen=([^\0]+)", command)
    return str(endpoint)


def test_an_engine_of_ones_own_answers_and_comes_back_and_ends_with_the_chat(
    tmp_path: Path,
) -> None:
    with chatting(*GREEDY, "--dtype", "float32") as terminal:
        terminal.expect("(nanocore_demo_model; /help lists commands, Ctrl-D ends)")
        terminal.expect(READY)
        terminal.press(SUM)
        terminal.expect(ANSWER)
        terminal.expect("demo_model | context 34/2,048 | ")
        os.kill(engine_pid(terminal), signal.SIGKILL)
        terminal.expect("(the engine process exited with code -9: restarting it")
        terminal.press(f"What is 3 + 4?{ENTER}")
        terminal.expect("3 + 4 = 7")
        terminal.expect("context ")
        last = Descendants(terminal.pid)
        terminal.press(CTRL_D)
        assert terminal.exit() == 0
        last.wait_until_all_end()
    state = tmp_path / "state" / "nanocore"
    assert "+What is 123 + 456?" in (state / "chat-history").read_text()
    assert "engine" in (state / "chat-engine.log").read_text()


def test_an_engine_that_is_not_to_be_restarted_is_by_the_next_question_alone() -> None:
    with chatting(*GREEDY, "--dtype", "float32", "--max-restarts", "0") as terminal:
        terminal.expect(READY)
        terminal.press(SUM)
        terminal.expect(ANSWER)
        pid = engine_pid(terminal)
        # A question that came after the chat had seen the death would start the next engine.
        with paused(engine_endpoint(pid)) as held:
            terminal.press(f"/retry{ENTER}")
            held.wait_for(1)
            os.kill(pid, signal.SIGKILL)
        terminal.expect("the engine process exited with code -9;")
        terminal.expect("/retry asks again")  # on the next line
        terminal.press(f"/retry{ENTER}")
        terminal.expect(ANSWER)
        terminal.press(CTRL_D)
        assert terminal.exit() == 0


def test_ctrl_c_aborts_the_request_and_the_next_question_is_answered(
    engine: forked.Engine,
) -> None:
    with chatting(*GREEDY, "--endpoint", engine.endpoint) as terminal:
        terminal.expect(READY)
        with paused(engine.endpoint) as held:
            terminal.press(f"Count from 1 to 900.{ENTER}")
            held.wait_for(1)
            terminal.press(f"What is 123 + 456?{CTRL_C}")  # typed ahead, and dropped by the kernel
            terminal.expect("(stopped)")
            held.wait_for(0)
            held.resume()
        terminal.press(f"wrong{CTRL_C}{SUM}")
        terminal.expect(ANSWER)
        terminal.expect("context 34/2,048")
        terminal.press(f"/exit{ENTER}")
        assert terminal.exit() == 0


def test_what_is_typed_during_an_answer_is_the_next_question_and_is_not_mixed_with_it(
    engine: forked.Engine,
) -> None:
    with chatting(*GREEDY, "--endpoint", engine.endpoint, num_columns=40) as terminal:
        terminal.expect(READY)
        with paused(engine.endpoint) as held:
            terminal.press(f"Count from 7 to 12.{ENTER}")
            held.wait_for(1)
            terminal.press(SUM)
            terminal.resize(20, 30)
            held.resume()
        assert "123" not in terminal.expect("7 8 9 10 11 12\n")
        terminal.expect(ANSWER)
        terminal.press(CTRL_D)
        assert terminal.exit() == 0


def test_a_server_is_asked_by_its_url_and_may_go(tmp_path: Path) -> None:
    with serving("--served-model-name", "demo", "--api-key", "secret") as served:
        served.line("ready:")
        url = f"http://{served.host}:{served.port}"
        asked = ("--url", url, *GREEDY)
        wrong = run(*asked, "-q", "x")
        assert (wrong.returncode, wrong.stdout) == (2, "")
        assert "HTTP 401: " in wrong.stderr
        with chatting(*asked, "--api-key", "secret") as terminal:
            terminal.expect("(demo; /help")
            terminal.press(SUM)
            terminal.expect(ANSWER)
            terminal.expect("demo | context 34/2,048")
            terminal.press(f"/model{ENTER}")
            terminal.expect("* demo\n")
            terminal.press("x" * 5000 + ENTER)
            terminal.expect("the conversation is longer than the context of 2,048 tokens: ")
            served.signal(signal.SIGKILL)
            served.exit()
            terminal.press(SUM)
            terminal.expect(f"cannot reach a server at {url}/v1: ")
            terminal.press(CTRL_D)
            assert terminal.exit() == 0


def test_the_transcript_of_the_page_is_what_is_shown(engine: forked.Engine) -> None:
    ((arguments, transcript),) = re.findall(
        r"With `nanocore chat (.*?)`:\n\n<!--.*?-->\n```text\n(.*?)```", DOCUMENT, flags=re.DOTALL
    )
    lines = [line[2:] for line in transcript.splitlines() if line.startswith("> ")]
    with chatting(*arguments.split(), "--endpoint", engine.endpoint, TERM="dumb") as terminal:
        terminal.expect("NAME=VALUE changes them)\n")
        shown = []
        for line in lines:
            shown.append(terminal.expect("> "))
            terminal.press(f"{line}\n")
            shown.append("> " + terminal.expect(f"{line}\n") + f"{line}\n")
        assert terminal.exit() == 0
    stats = re.compile(r"^\(\w*demo_model \|.*\n", flags=re.MULTILINE)
    assert stats.sub("", "".join(shown)) == transcript


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_end_the_chat_at_its_prompt(number: int, engine: forked.Engine) -> None:
    with chatting("--endpoint", engine.endpoint) as terminal:
        terminal.expect("Ctrl-D ends)")
        terminal.expect(READY)
        terminal.process.send_signal(number)
        assert terminal.exit() == 128 + number


def test_ctrl_c_ends_the_chat_while_its_engine_starts_and_the_engine_with_it() -> None:
    with chatting("--dtype", "float32") as terminal:
        terminal.expect("starting an engine for the demo model")
        below = Descendants(terminal.pid)
        terminal.press(CTRL_C)
        assert terminal.exit() == 130
        below.wait_until_all_end()


def test_a_bad_byte_of_a_server_ends_no_chat_and_its_errors_do_no_harm_in_a_pipe() -> None:
    bad = b'data: {"choices": [{"delta": {"content": "a\xff"}, "finish_reason": "stop"}]}\n\n'
    error = b'data: {"error": {"message": "boom\\u001b[31m\\u202e"}}\n\n'

    def script(body: dict[str, Any]) -> tuple[int, list[bytes]]:
        return 200, [error if body["messages"][-1]["content"] == "fail" else bad]

    with fake_server.serving(script) as server:
        with chatting("--url", server.url) as terminal:
            terminal.press(f"x{ENTER}")
            terminal.expect("a\ufffd\n")
            terminal.press(f"fail{ENTER}")
            terminal.expect(r"boom\x1b[31m\u202e; /retry asks again")
            terminal.press(CTRL_D)
            assert terminal.exit() == 0
        done = run("--url", server.url, "-q", "fail")
        assert (done.returncode, done.stdout) == (70, "")
        assert done.stderr.endswith("boom\\x1b[31m\\u202e\n")


@pytest.mark.parametrize(
    ("closed", "exit_code", "words"),
    [
        ("<&-", 2, "standard input is empty"),
        ("-q hi >&-", 2, "standard output is closed"),
        ("-q hi >/dev/full", 70, "standard output cannot be written: No space left on device"),
    ],
)
def test_streams_that_are_not_there_or_full_are_a_line(
    closed: str, exit_code: int, words: str
) -> None:
    with fake_server.serving(lambda body: (200, fake_server.chat(["a"]))) as server:
        command = f'"$0" -m nanocore chat --url "$1" {closed}'
        done = subprocess.run(
            ["bash", "-c", command, sys.executable, server.url],
            stderr=subprocess.PIPE, text=True, timeout=EXIT_TIMEOUT_S, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (exit_code, 1)
    assert words in done.stderr


# -- one question -----------------------------------------------------------------------------


def run(*arguments: str, question: str | bytes = b"") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nanocore", "chat", *arguments],
        input=question.decode() if isinstance(question, bytes) else question,
        capture_output=True,
        text=True,
        timeout=EXIT_TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("model", "name", "notices"),
    [
        ((), "the demo model", [f"no model named: the demo model answers ({DEMO_SKILLS})"]),
        ((str(DEMO),), str(DEMO), []),
    ],
)
def test_a_question_in_a_pipe_is_answered_and_what_is_launched_is_said(
    model: tuple[str, ...], name: str, notices: list[str]
) -> None:
    done = run(*model, *GREEDY, "--dtype", "float32", question="What is 123 + 456?\n")
    assert (done.returncode, done.stdout) == (0, "123 + 456 = 579\n")
    started = f"starting an engine for {name}: a few seconds to a minute"
    assert done.stderr.splitlines() == [*notices, started]


@pytest.mark.parametrize("flags", [(), ("--chat-template", "chatml")])
def test_a_model_without_template_is_asked_in_chatml_which_is_said(
    engine: forked.Engine, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    joined = ("--endpoint", engine.endpoint, "--tokenizer", str(tmp_path))
    done = run(*GREEDY, *joined, *flags, question="What is 123 + 456?\n")
    assert (done.returncode, done.stdout) == (0, "123 + 456 = 579\n")
    assert done.stderr == ("" if flags else f"{FALLBACK_NOTE}\n")


@pytest.mark.parametrize(
    ("arguments", "question", "exit_code", "words"),
    [
        ((), "", 2, "standard input is empty"),
        ((), "x " * 5000, 2, "max_model_len"),
        (("-q", "x", "--max-num-seqs", "0"), "", 2, "max-num-seqs"),
        (("-q", "x", "--endpoint", "ipc:///tmp/nobody/e.sock", "--start-timeout", "0.1"), "", 70,
         "nobody"),
        (("nowhere/at/all", "-q", "x"), "", 3, "nowhere/at/all"),
    ],
)  # fmt: skip
def test_errors_are_a_line_and_an_exit_code(
    engine: forked.Engine,
    arguments: tuple[str, ...],
    question: str,
    exit_code: int,
    words: str,
) -> None:
    joined = () if arguments else ("--endpoint", engine.endpoint)
    done = run(*arguments, *joined, question=question)
    assert (done.returncode, done.stdout) == (exit_code, "")
    assert done.stderr.startswith("nanocore chat: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_closed_pipe_ends_quietly_and_leaves_no_request(engine: forked.Engine) -> None:
    with paused(engine.endpoint) as held:
        asking = subprocess.Popen(
            [sys.executable, "-m", "nanocore", "chat", "-q", "Count from 1 to 900.",
             "--set", "ignore_eos=true", "--endpoint", engine.endpoint],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert asking.stdout is not None
        assert asking.stderr is not None
        held.wait_for(1)
        asking.stdout.close()
        held.resume()
        held.wait_for(0)
        assert asking.stderr.read() == b""
        assert asking.wait(EXIT_TIMEOUT_S) == 141
        asking.stderr.close()


def test_ctrl_c_ends_one_question_and_its_request(engine: forked.Engine) -> None:
    with paused(engine.endpoint) as held:
        asking = subprocess.Popen(
            [sys.executable, "-m", "nanocore", "chat", "-q", "x", "--endpoint",
             engine.endpoint],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        held.wait_for(1)
        asking.send_signal(signal.SIGINT)
        assert asking.communicate(timeout=EXIT_TIMEOUT_S)[0] == b""
        assert asking.returncode == 130
        held.wait_for(0)
