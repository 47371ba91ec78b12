"""/tokenize, /detokenize and /tokenizer_info with the demo model."""

from __future__ import annotations

from typing import Any

import pytest

from nanocore.http.endpoints.tokenize import MAX_CHARS, MAX_TOKENS
from tests.client.running import run
from tests.http.in_process import app_of

QUESTION = [{"role": "user", "content": "What is 1 + 2?"}]


def post(endpoint: str, path: str, body: Any) -> Any:
    async def send() -> Any:
        async with app_of(endpoint) as (_, http):
            return await http.post(path, json=body)

    return run(send())


@pytest.mark.parametrize("text", ["What is 1 + 2?", "<|im_end|> h\u00e9", "", "12 + 13 " * 2000])
def test_a_text_comes_back(demo_endpoint: str, text: str) -> None:
    asked = {"prompt": text, "add_special_tokens": False, "return_token_strs": True}
    there = post(demo_endpoint, "/tokenize", asked).json()
    assert there["count"] == len(there["tokens"]) == len(there["token_strs"])
    assert there["max_model_len"] == 2048
    back = post(demo_endpoint, "/detokenize", {"tokens": there["tokens"]})
    assert back.json() == {"prompt": text}


def test_a_conversation_has_the_tokens_that_its_chat_has(demo_endpoint: str) -> None:
    async def send() -> Any:
        async with app_of(demo_endpoint) as (_, http):
            tokenized = await http.post("/tokenize", json={"messages": QUESTION})
            text = await http.post("/detokenize", json={"tokens": tokenized.json()["tokens"]})
            chat = await http.post("/v1/chat/completions", json={"messages": QUESTION})
            ended = await http.post(
                "/tokenize", json={"messages": QUESTION, "add_generation_prompt": False}
            )
            return [one.json() for one in (tokenized, text, chat, ended)]

    tokenized, text, chat, ended = run(send())
    assert text["prompt"].endswith("<|im_start|>assistant\n")
    assert tokenized["count"] == chat["usage"]["prompt_tokens"]
    assert tokenized["tokens"][: ended["count"]] == ended["tokens"]
    assert tokenized["token_strs"] is None


def test_the_tokenizers_configuration_is_told(demo_endpoint: str) -> None:
    async def get() -> Any:
        async with app_of(demo_endpoint) as (_, http):
            return (await http.get("/tokenizer_info")).json()

    info = run(get())
    assert info["eos_token"] == "<|im_end|>"
    assert info["bos_token"] is None
    assert "<|im_start|>" in info["chat_template"]
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"


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
    answer = post(demo_endpoint, path, body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
