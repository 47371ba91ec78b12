"""A client needs nothing but the endpoint: the model's files come over the wire."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanocore.client import AsyncEngineClient, SamplingParams
from nanocore.client.tokenizer import Tokenizer
from nanocore.demo_model import demo_model_folder
from tests.end_to_end.forked import Engine, engine

DEMO_FOLDER = demo_model_folder()
QUESTION = "What is 123 + 456?"
CHAT = """
import asyncio, sys
from nanocore.client import AsyncEngineClient, SamplingParams
from nanocore.client.chat import events

async def main(endpoint, question):
    async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
        messages = [{"role": "user", "content": question}]
        params = SamplingParams(temperature=0, max_tokens=32)
        async for event in client.chat(messages, params):
            if isinstance(event, events.Text):
                print(event.delta, end="")

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine of the demo model whose folder has been moved away since it started."""
    folder = tmp_path_factory.mktemp("elsewhere") / "model"
    shutil.copytree(DEMO_FOLDER, folder)

    async def until_it_serves(endpoint: str) -> None:
        async with AsyncEngineClient.connect(endpoint, timeout_s=60):
            folder.rename(folder.with_name("moved"))

    with engine(folder) as running:
        asyncio.run(until_it_serves(running.endpoint))
        yield running


def test_a_process_without_the_model_chats(elsewhere: Engine, tmp_path: Path) -> None:
    cache_home, work = tmp_path / "cache", tmp_path / "work"
    work.mkdir()
    result = subprocess.run(
        [sys.executable, "-c", CHAT, elsewhere.endpoint, QUESTION],
        cwd=work,
        env={**os.environ, "XDG_CACHE_HOME": str(cache_home)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "579" in result.stdout
    kept = [path.read_bytes() for path in (cache_home / "nanocore" / "files").iterdir()]
    assert (DEMO_FOLDER / "tokenizer.json").read_bytes() in kept


def test_the_tokenizer_and_every_offered_file_are_those_of_the_folder(elsewhere: Engine) -> None:
    async def read() -> None:
        async with AsyncEngineClient.connect(elsewhere.endpoint) as client:
            files = client.model_card.files
            assert {file.name for file in files} >= {"tokenizer.json", "tokenizer_config.json"}
            for file in files:
                assert await client.read_file(file.name) == (DEMO_FOLDER / file.name).read_bytes()
            await client.pause()  # files are served all the same
            tokenizer = await client.get_tokenizer()
            expected = Tokenizer.from_folder(DEMO_FOLDER)
            messages = [{"role": "user", "content": QUESTION}]
            assert tokenizer.encode_chat(messages) == expected.encode_chat(messages)
            await client.resume()

    asyncio.run(asyncio.wait_for(read(), 60))


def test_a_large_file_arrives_while_requests_are_served(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    config = json.dumps({"padding": os.urandom(6 * 2**20).hex()})
    (folder / "tokenizer_config.json").write_text(config)

    async def read(endpoint: str) -> None:
        params = SamplingParams(max_tokens=200, ignore_eos=True, detokenize=False)
        async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
            output, content = await asyncio.gather(
                client.complete([1, 2], params), client.read_file("tokenizer_config.json")
            )
            assert len(output.outputs[0].token_ids) == 200
            assert content.decode() == config

    with engine(folder) as running:
        asyncio.run(asyncio.wait_for(read(running.endpoint), 60))
