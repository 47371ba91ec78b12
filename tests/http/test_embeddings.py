"""/v1/embeddings, /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from nanocore.client import AsyncEngineClient
from nanocore.http.endpoints.tokenize import MAX_CHARS, MAX_TOKENS
from nanocore.http.exchange import Disconnected, Exchange
from tests.client.running import run
from tests.http.asgi import app_of, ask, openai_client

TEXTS = ["What is 1 + 2?", "backwards"]


async def direct(endpoint: str, **asked: Any) -> list[list[float]]:
    async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
        return [[*(await client.embed(text, **asked)).embedding] for text in TEXTS]


def test_openais_client_gets_the_engines_numbers(demo_endpoint: str) -> None:
    async def calls() -> Any:
        async with app_of(demo_endpoint, served_model_names=("demo",)) as (_, http):
            client = openai_client(http)
            in_base64 = await client.embeddings.create(model="demo", input=TEXTS)
            as_numbers = await client.embeddings.create(
                model="demo", input=TEXTS, encoding_format="float", dimensions=192
            )
            ids = [await http.post("/tokenize", json={"prompt": text}) for text in TEXTS]
            by_ids = await client.embeddings.create(
                model="demo", input=[one.json()["tokens"] for one in ids]
            )
            return in_base64, as_numbers, by_ids

    expected = run(direct(demo_endpoint))
    for answer in run(calls()):
        assert [one.embedding for one in answer.data] == expected
        assert [one.index for one in answer.data] == [0, 1]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 2
    assert math.hypot(*expected[0]) == pytest.approx(1)


def test_an_input_may_fill_the_models_length(demo_endpoint: str) -> None:
    async def send() -> Any:
        async with app_of(demo_endpoint) as (app, http):
            assert app.state.client is not None
            length = app.state.client.model_card.max_model_len
            inputs = ([1] * length, [2] + [1] * length, [1] * (length + 1))
            cut = {"truncate_prompt_tokens": -1}
            bodies = [{"input": inputs[0]}, {"input": inputs[1]} | cut, {"input": inputs[2]}]
            return [await http.post("/v1/embeddings", json=body) for body in bodies]

    whole, cut, more = run(send())
    assert whole.json()["data"] == cut.json()["data"]
    assert more.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("pooling", ["mean", None])
def test_pooling_and_length_can_be_chosen(demo_endpoint: str, pooling: Any) -> None:
    body = {"input": TEXTS, "pooling": pooling, "normalize": False}
    found = ask(demo_endpoint, "/v1/embeddings", body).json()["data"]
    expected = run(direct(demo_endpoint, pooling=pooling or "last", normalize=False))
    assert [one["embedding"] for one in found] == expected


@pytest.mark.parametrize(
    "body",
    [
        {"input": "a", "dimensions": 64},
        {"input": "a", "encoding_format": "int8"},
        {"input": "a", "pooling": "max"},
        {"input": []},
        {"input": ""},
        {"input": ["a", [10**6]]},
        {"input": [[1], [10**6]]},
        {"input": [[1] * 3000]},
        {},
    ],
)
def test_what_cannot_be_embedded_is_refused(demo_endpoint: str, body: dict[str, Any]) -> None:
    answer = ask(demo_endpoint, "/v1/embeddings", body)
    assert answer.status_code == 400, answer.text
    assert json.loads(answer.text)["error"]["type"] == "invalid_request_error"


def test_work_ends_when_its_client_leaves() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def receive() -> Any:
        return next(messages)

    messages = iter([{"type": "http.request"}, {"type": "http.disconnect"}])
    exchange = Exchange.__new__(Exchange)
    exchange.receive = receive
    with pytest.raises(Disconnected):
        run(exchange.attended(work()))
    assert ended.is_set()


QUESTION = [{"role": "user", "content": "What is 1 + 2?"}]


@pytest.mark.parametrize("text", ["What is 1 + 2?", "<|im_end|> h\u00e9", "", "12 + 13 " * 2000])
def test_a_text_comes_back(demo_endpoint: str, text: str) -> None:
    asked = {"prompt": text, "add_special_tokens": False, "return_token_strs": True}
    there = ask(demo_endpoint, "/tokenize", asked).json()
    assert there["count"] == len(there["tokens"]) == len(there["token_strs"])
    assert there["max_model_len"] == 2048
    back = ask(demo_endpoint, "/detokenize", {"tokens": there["tokens"]})
    assert back.json() == {"prompt": text}


def test_a_conversation_has_the_tokens_that_its_chat_has(demo_endpoint: str) -> None:
    tokenized = ask(demo_endpoint, "/tokenize", {"messages": QUESTION}).json()
    text = ask(demo_endpoint, "/detokenize", {"tokens": tokenized["tokens"]}).json()
    chat = ask(demo_endpoint, "/v1/chat/completions", {"messages": QUESTION}).json()
    open_ended = {"messages": QUESTION, "add_generation_prompt": False}
    ended = ask(demo_endpoint, "/tokenize", open_ended).json()
    assert text["prompt"].endswith("<|im_start|>assistant\n")
    assert tokenized["count"] == chat["usage"]["prompt_tokens"]
    assert tokenized["tokens"][: ended["count"]] == ended["tokens"]
    assert tokenized["token_strs"] is None


def test_the_tokenizers_configuration_is_told(demo_endpoint: str) -> None:
    info = ask(demo_endpoint, "/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>"
    assert info["bos_token"] is None
    assert "<|im_start|>" in info["chat_template"]
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_a_template_of_the_servers_replaces_the_models(demo_endpoint: str) -> None:
    own = "{{ messages[-1].content }}!"
    info = ask(demo_endpoint, "/tokenizer_info", chat_template=own).json()
    assert info["chat_template"] == own
    for fields, end in (({}, "1 + 2?!"), ({"chat_template": "chatml"}, "assistant\n")):
        body = {"messages": QUESTION, **fields}
        tokens = ask(demo_endpoint, "/tokenize", body, chat_template=own).json()["tokens"]
        text = ask(demo_endpoint, "/detokenize", {"tokens": tokens}).json()["prompt"]
        assert text.endswith(end)


def test_what_the_model_recommends_is_listed(demo_endpoint: str) -> None:
    (model,) = ask(demo_endpoint, "/v1/models").json()["data"]
    assert model["default_sampling"] == {}  # the demo model's generation_config has only ids


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": QUESTION}),
        ("/tokenize", {"prompt": "a" * (MAX_CHARS + 1)}),
        ("/tokenize", {"messages": QUESTION, "add_special_tokens": True}),
        ("/tokenize", {"messages": QUESTION, "chat_template": "{{ 1 }}"}),
        ("/tokenize", {"messages": [{"role": "user", "content": 1}]}),
        ("/tokenize", {"messages": QUESTION, "chat_template_kwargs": {"no_such": 1}}),
        ("/detokenize", {"tokens": [1030]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [1] * (MAX_TOKENS + 1)}),
        ("/detokenize", {"tokens": ["a"]}),
    ],
)
def test_what_cannot_be_served_is_refused(demo_endpoint: str, path: str, body: Any) -> None:
    answer = ask(demo_endpoint, path, body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
