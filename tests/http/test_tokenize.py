"""/tokenize, /detokenize and /tokenizer_info with the demo model."""

from __future__ import annotations

from typing import Any

import pytest

from nanocore.http.endpoints.tokenize import MAX_CHARS, MAX_TOKENS
from tests.http.in_process import ask

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
