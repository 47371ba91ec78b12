"""What every client in another language is tested against: a real engine with the demo model."""

from __future__ import annotations

import asyncio
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nanocore.client import AsyncEngineClient, SamplingParams
from nanocore.demo_model import demo_model_folder
from tests.cli.paused_engine import paused
from tests.conformance.fake_engine import fake_engine
from tests.conformance.fake_grammar import EOS_ID, PIECES
from tests.end_to_end.engine_process import engine

ROOT = Path(__file__).parents[2]
VECTORS = ROOT / "conformance" / "nanocore_conformance" / "vectors.jsonl"
QUESTION = "What is 123 + 456?"
MAX_TOKENS = 32
MANY_TOKENS = 1500
"""As many as take so long that an engine can be killed before it has given them."""
DEMO_MODEL = demo_model_folder()
_COMMENT = re.compile(r'(?P<text>"(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)


@dataclass(frozen=True)
class Chat:
    """A chat as token ids, and what the Python SDK was answered: greedy, so all must agree."""

    endpoint: str
    prompt_token_ids: list[int]
    answer_token_ids: list[int]
    answer: str


@pytest.fixture(scope="module")
def chat() -> Iterator[Chat]:
    """A demo engine that runs, and a chat with it."""

    async def ask(endpoint: str) -> Chat:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
            tokenizer = await client.get_tokenizer()
            prompt = tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
            output = await client.complete(prompt, params)
        answer = output.outputs[0]
        return Chat(endpoint, prompt, list(answer.token_ids), answer.text)

    with engine(DEMO_MODEL) as running:
        yield asyncio.run(ask(running.endpoint))


@pytest.fixture
def told_chat(short_path: Path) -> Iterator[Chat]:
    """A prompt for the fake engine, which knows samples and log probabilities."""
    endpoint = f"ipc://{short_path}/engine.sock"
    with fake_engine(endpoint):
        yield Chat(endpoint, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [], "")


WANTED: tuple[tuple[str, object, set[str]], ...] = (
    ("choice", ["yes", "no"], {"yes", "no"}),
    ("json", '{"properties": {"age": {"type": "integr"}}}', set()),
    ("regex", "[ab]{3}", {"".join(three) for three in itertools.product("ab", repeat=3)}),
    ("json", '{"enum": ["red", 5]}', {'"red"', "5"}),
)
"""Kinds of structured outputs, what is wanted, and the texts that are that: none, if it is none."""
NO_TYPE = "json: /properties/age: no type 'integr'"
"""What the fake engine says of the one that is none."""


def text_of(token_ids: Iterable[int]) -> str:
    """What the fake engine's tokens mean; an EOS must end them."""
    *text, last = token_ids
    assert last == EOS_ID
    return "".join(PIECES[token_id] for token_id in text)


def num_words(sources: Iterable[Path]) -> int:
    """Names, keywords and numbers of C++, Rust or TypeScript, without comments.

    How small a library is: unlike lines, they do not depend on the layout.
    """
    return sum(len(re.findall(r"\w+", _COMMENT.sub(_text, path.read_text()))) for path in sources)


def _text(found: re.Match[str]) -> str:
    return found["text"] or " "


def resumed(command: list[str]) -> tuple[list[str], list[str]]:
    """What a client's `resume` example prints, and what it does if its engine is killed meanwhile.

    command: without its arguments. Another engine serves the endpoint next.
    """
    with tempfile.TemporaryDirectory(prefix="nc-", dir="/tmp") as folder:
        endpoint = f"ipc://{folder}/e/engine.sock"
        command = [*command, endpoint, "1,387,317", str(MANY_TOKENS)]
        with engine(DEMO_MODEL, endpoint=endpoint) as first:
            asyncio.run(_num_tokens(endpoint))  # waits until it serves
            whole = subprocess.run(command, stdout=subprocess.PIPE, timeout=120, check=True)
            # Without a buffer, or `communicate` would lose what that holds.
            running = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)
            assert running.stdout is not None
            begun = [running.stdout.readline() for _ in range(5)]
            first.process.kill()
        with engine(DEMO_MODEL, endpoint=endpoint):
            rest, _ = running.communicate(timeout=120)
            assert running.returncode == 0
            assert 0 < asyncio.run(_num_tokens(endpoint)) < 2 * MANY_TOKENS
    disturbed = b"".join(begun) + rest
    # Of several samples, those of one come in their order.
    return sorted(whole.stdout.decode().splitlines(), key=_sample), sorted(
        disturbed.decode().splitlines(), key=_sample
    )


def last_words(command: list[str]) -> str:
    """What a client's `stream` example says on stderr if its engine is killed meanwhile, for good.

    command: without its arguments. The engine is paused, so that no answer can end before the kill.
    """
    with tempfile.TemporaryDirectory(prefix="nc-", dir="/tmp") as folder:
        endpoint = f"ipc://{folder}/e/engine.sock"
        with engine(DEMO_MODEL, endpoint=endpoint) as running:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            with paused(endpoint) as held:
                client = subprocess.Popen([*command, endpoint, "1,387,317"], **pipes)
                held.wait_for(1)
                assert client.poll() is None
                running.process.kill()
        _, said = client.communicate(timeout=120)
        assert client.returncode == 1
        return said.decode()


def _sample(line: str) -> str:
    return line.partition(" ")[0]


async def _num_tokens(endpoint: str) -> int:
    async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
        return (await client.stats()).generation_tokens


def assert_conforms(*command: str) -> None:
    """The program nanocore-conformance finds nothing wrong with a client's `stream` command."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "nanocore_conformance",
            "--client",
            "--patience-s",
            "30",
            "--",
            *command,
            "{endpoint}",
            "{prompt}",
            "{max_tokens}",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed, 0 skipped" in done.stdout
