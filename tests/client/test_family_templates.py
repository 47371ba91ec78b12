"""Chat templates of many kinds: the same prompt as transformers makes, or refused by both."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from nanocore.client.chat import template as chat_template
from nanocore.client.tokenizer import ChatMessage, Tokenizer
from tests.campaign import some_of
from tests.client.family_templates import FAMILIES
from tests.tiny_models import write_byte_tokenizer

NOW = datetime(2025, 3, 9, 8, 7, 6, 54321)
CALL = {
    "id": "call12345",
    "type": "function",
    "function": {
        "name": "wetter",
        "arguments": {"zeit": "<jetzt> & 'später'", "ort": "Köln 中", "tage": [1, 2.5, None, True]},
    },
}
TEXT_ARGUMENTS = {"name": "f", "arguments": '{"a":1}'}
USER = {"role": "user", "content": "  Hi,\n {{ 7 * 7 }} <b>&amp; 'é' 中 👍! "}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n Well \n"}
CALLING = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": '{"grad": 21}', "tool_call_id": "call12345", "name": "wetter"}
SYSTEM = {"role": "system", "content": " Be brief. /no_think"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "system": [SYSTEM, USER],
    "three turns": [USER, ANSWER, {"role": "user", "content": ""}],
    "the answer last": [SYSTEM, USER, ANSWER],
    "tool calls": [USER, CALLING, RESULT, ANSWER, USER],
    "two results": [SYSTEM, USER, CALLING, RESULT, RESULT],
    "values of None": [
        {**USER, "name": None, "tool_calls": None},
        {**CALLING, "content": None, "reasoning_content": None},
        {"role": "tool", "content": None, "tool_call_id": "x"},
    ],
    "no content": [{"role": "user"}],
    "reasoning": [USER, {**ANSWER, "reasoning_content": "r1", "thinking": "r2"}],
    "reasoning, another name": [USER, {**CALLING, "reasoning": "because"}, RESULT],
    "thinking": [USER, {**ANSWER, "content": "so", "thinking": "because"}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "image"}]}],
    "a result that is no text": [USER, CALLING, {**RESULT, "content": {"content": [1, "<b>"]}}],
    "arguments as text": [USER, {**CALLING, "tool_calls": [{**CALL, "function": TEXT_ARGUMENTS}]}],
    "two calls": [USER, {**CALLING, "tool_calls": [CALL, {**CALL, "id": "no"}]}],
    "more keys": [{"role": "user", "content": "x", "extra": [{"b": [1, 2]}, 1e300]}],
    "a developer": [{"role": "developer", "content": "Be kind."}, USER, CALLING, RESULT],
    "a prefix": [USER, {**ANSWER, "content": "Sure", "prefix": True}],
    "an unknown role": [{"role": "wizard", "content": "abra"}, USER],
    "the wrong order": [ANSWER, ANSWER],
}  # fmt: skip


class _Clock(datetime):
    """A datetime that stands still."""

    @classmethod
    def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
        return NOW


@pytest.fixture(autouse=True)
def _the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", _Clock)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("family")
    write_byte_tokenizer(folder)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<filler300>",
        "eos_token": "<|end|>", "pad_token": None, "image_token": "<filler301>",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(FAMILIES[request.param])
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    real = chat_template.ChatTemplate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanocore.client.chat.template.ChatTemplate", partial(real, now=lambda: NOW))
        return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)


_ARGUMENTS = ("add_generation_prompt", "tools", "continue_final_message")


def _rendered(render: Callable[..., str], *args: Any, **kwargs: Any) -> tuple[str, str]:
    try:
        return "prompt", render(*args, **kwargs)
    except Exception as error:  # transformers raises whatever the template does
        return "refused", str(error)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "wetter",
            "description": "Wie's wird <'&\">",
            "parameters": {
                "type": "object",
                "properties": {
                    "ort": {"type": "string", "description": "Köln?", "default": "Köln"},
                    "tage": {"type": "array", "items": {"type": ["integer", "null"]}},
                    "art": {"enum": ["a", "b"], "type": "string", "nullable": True},
                    "was": {"anyOf": [{"type": "number", "default": 1}, {"type": "object"}]},
                },
                "required": ["ort"],
            },
        },
    },
    {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}},
]
WAYS: dict[str, dict[str, Any]] = {
    "with a prompt": {"add_generation_prompt": True},
    "without": {"add_generation_prompt": False},
    "tools": {"add_generation_prompt": True, "tools": TOOLS},
    "no tools": {"add_generation_prompt": False, "tools": []},
    "thinking off": {"add_generation_prompt": True, "enable_thinking": False, "tools": TOOLS},
    "thinking": {"add_generation_prompt": True, "thinking": True, "preserve_thinking": True},
    "more names": {
        "add_generation_prompt": True, "reasoning_effort": "high", "date_string": "1 Jan",
        "model_identity": "I", "builtin_tools": ["wetter", "x"], "documents": [{"title": "t"}],
        "tools_in_user_message": False, "tools": TOOLS[:1], "controls": {"length": "long"},
        "xml_tools": [1], "python_tools": ["p"],
    },
    "continued": {"continue_final_message": True},
    "continued with tools": {"continue_final_message": True, "tools": TOOLS},
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_the_prompts_are_those_of_transformers(
    tokenizer: Tokenizer, reference: PreTrainedTokenizerFast, way: str
) -> None:
    num_prompts = 0
    for name, messages in some_of(CONVERSATIONS.items(), 2, [*WAYS].index(way)):
        before = json.dumps(messages)
        how = WAYS[way]
        kind, expected = _rendered(reference.apply_chat_template, messages, tokenize=False, **how)
        own = {k: how[k] for k in how if k in _ARGUMENTS}
        own["chat_template_kwargs"] = {k: how[k] for k in how if k not in _ARGUMENTS}
        got = _rendered(tokenizer.render_chat, messages, **own)
        assert got[0] == kind, (name, expected, got)
        if kind == "prompt":
            assert got[1] == expected, name
            ids = reference.apply_chat_template(messages, return_dict=False, **how)
            assert tokenizer.encode_chat(cast("list[ChatMessage]", messages), **own) == ids, name
            num_prompts += 1
        elif "continue_final_message" not in how:
            assert expected in got[1], name
        assert json.dumps(messages) == before, name
    assert num_prompts >= (0 if "thoughts" in way else 2), "a comparison of prompts"
