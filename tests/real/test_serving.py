"""`nanocore serve` with the checkpoints: starts, chats, JSON, and an engine that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from nanocore.client import AsyncEngineClient
from tests.cli.served import Served, answered, serving
from tests.cli.test_serve_restarts import choices_of, whole
from tests.real.checkpoints import MARKS
from tests.reliability.bystanders import REQUESTS, answer_all

pytestmark = MARKS
BLOCK = 16
QUESTIONS = ("What is the capital of France?", "And of Italy?", "Name three rivers.")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="session")
def server(path: Path) -> Iterator[Served]:
    """A server as a user starts it, with the flags that it has by itself."""
    with serving(str(path), "--max-model-len", "2048") as running:
        running.line("ready: ")
        yield running


def complete(server: Served, prompt: str, max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """The answer of /v1/completions, greedy by default."""
    connection = server.connect()
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    status, answer = answered(connection)
    assert status == 200, answer
    return answer


def test_a_server_starts_and_answers_and_so_does_the_next_one(
    path: Path, record_property: Callable[[str, object], None]
) -> None:
    answers = []
    for start in ("first", "second"):
        begin_s = time.monotonic()
        with serving(str(path)) as server:
            server.line("ready: ")
            ready_s = time.monotonic() - begin_s
            answers.append(complete(server, "The capital of France is")["choices"][0]["text"])
            first_s = time.monotonic() - begin_s - ready_s
        record_property(f"{start} start", f"{ready_s:.1f} s, first answer {first_s:.2f} s")
    # A cache of starts, if there is one, has entries now: count them here.
    assert answers[0] == answers[1] != ""


def test_a_conversation_streams_what_it_answers_whole_and_finds_its_turns_cached(
    server: Served, model_name: str
) -> None:
    if model_name == "gemma3":
        pytest.skip("a base model has no chat template")
    messages: list[dict[str, str]] = []
    num_prompt = num_computed = 0
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    prompt = f"<|im_start|>system\n{system}<|im_end|>\n"
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        prompt += f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        options: dict[str, Any] = {"messages": messages, "temperature": 0, "ignore_eos": False}
        _, answer = answered(server.ask(40, **options))
        streamed, _, reason = whole(choices_of(server.ask(40, stream=True, **options)))
        (choice,) = answer["choices"]
        assert (streamed, reason) == (choice["message"]["content"], choice["finish_reason"])
        usage = answer["usage"]
        # An answer's tokens may be others when they are part of a prompt.
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert num_prompt // BLOCK * BLOCK <= cached <= num_computed // BLOCK * BLOCK
        plain = complete(server, prompt, 40)
        assert plain["choices"][0]["text"] == streamed, "the template is ChatML"
        assert plain["usage"]["prompt_tokens"] == usage["prompt_tokens"]
        num_prompt, num_computed = usage["prompt_tokens"], usage["total_tokens"] - 1
        messages.append({"role": "assistant", "content": streamed})
        prompt += f"{streamed}<|im_end|>\n"


def test_a_base_model_refuses_a_chat_and_says_why(server: Served, model_name: str) -> None:
    if model_name != "gemma3":
        pytest.skip("this model has a chat template")
    status, answer = answered(server.ask(4))
    assert status == 400
    assert "chat template" in answer["error"]["message"]


@pytest.mark.parametrize("seed", range(4))
def test_output_by_a_schema_is_valid_json_however_it_is_drawn(server: Served, seed: int) -> None:
    answer = complete(
        server,
        "A person as JSON: ",
        200,
        temperature=1.0,
        seed=seed,
        structured_outputs={"json": SCHEMA},
    )
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["text"]), SCHEMA)


def test_streams_of_every_kind_go_on_when_their_engine_is_killed(path: Path) -> None:
    async def kill_below_streams() -> None:
        async with AsyncEngineClient.launch(
            path, resume=True, max_restarts=2, max_model_len=2048, kv_cache_memory_bytes=2**28
        ) as client:
            undisturbed = await answer_all(client)
            begun = [asyncio.Event() for _ in REQUESTS]
            streams = asyncio.create_task(answer_all(client, *begun))
            for event in begun:
                await event.wait()
            assert client._supervisor is not None
            os.kill(client._supervisor.pid, signal.SIGKILL)
            assert await streams == undisturbed

    asyncio.run(kill_below_streams())
