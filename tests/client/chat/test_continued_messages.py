"""The last message continued: where the prompt ends, and what cannot be continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import InvalidRequestError

TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
TRIMMED = TURNS.replace("m.content", "m.content | trim")
PROMPTED = TURNS + "{% if add_generation_prompt %}[assistant]{% endif %}"
PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }}|{% endfor %}{% endfor %}"
THOUGHTS = "{% for m in messages %}({{ m.thinking }}){{ m.content }}{% endfor %}"
USER = {"role": "user", "content": "Q"}


def _answer(content: Any, **more: Any) -> list[Any]:
    return [USER, {"role": "assistant", "content": content, **more}]


@pytest.mark.parametrize(
    ("template", "messages", "key"),
    [
        (TURNS, _answer("so far"), True),
        (TURNS, _answer("so far "), True),
        (TURNS, _answer("so far \n"), "content"),
        (TRIMMED, _answer(" so far \n"), True),
        (PROMPTED, _answer("so"), True),
        (TURNS, _answer(""), True),
        (TURNS, _answer("CONTINUE_FINAL_MESSAGE_TAG a"), True),
        (TURNS, [USER], True),
        (PARTS, [{"role": "user", "content": [{"text": "a"}, {"text": "b "}, {"x": 1}]}], True),
        (THOUGHTS, _answer("x", reasoning_content="hm, "), "reasoning_content"),
        (THOUGHTS, _answer("x", thinking="hm"), "thinking"),
        (THOUGHTS, _answer("x", reasoning="hm"), "reasoning_content"),
    ],
)
def test_the_prompt_ends_where_that_of_transformers_does(
    folder: Path, template: str, messages: Any, key: bool | str
) -> None:
    (folder / "chat_template.jinja").write_text(template)
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = reference.apply_chat_template(messages, tokenize=False, continue_final_message=key)
    tokenizer = Tokenizer.from_folder(folder)
    before = json.dumps(messages)
    assert tokenizer.render_chat(messages, continue_final_message=key) == expected
    ids = reference.apply_chat_template(messages, continue_final_message=key, return_dict=False)
    assert tokenizer.encode_chat(messages, continue_final_message=key) == ids
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    ("template", "messages", "key", "reason"),
    [
        (TURNS, _answer(None), True, "has no 'content'"),
        (TURNS, _answer("x"), "reasoning_content", "has no 'reasoning_content'"),
        (TURNS, _answer("x", note="y"), "note", "the chat template has no 'note'"),
        (TURNS, _answer({"a": 1}), True, "is no text"),
        (PARTS, _answer([{"x": 1}]), True, "has no text"),
        ("{{ messages[0].content }}", _answer("x"), True, "leaves out the last message"),
        ("{{ messages[-1].content[1:] }}", _answer("xyz"), True, "leaves out the last message"),
    ],
)
def test_what_cannot_be_continued_is_refused_by_both(
    folder: Path, template: str, messages: Any, key: bool | str, reason: str
) -> None:
    (folder / "chat_template.jinja").write_text(template)
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    with pytest.raises((ValueError, TypeError)):
        reference.apply_chat_template(messages, tokenize=False, continue_final_message=key)
    with pytest.raises(InvalidRequestError, match=reason):
        Tokenizer.from_folder(folder).render_chat(messages, continue_final_message=key)


def test_a_prompt_cannot_begin_an_answer_and_continue_one(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    with pytest.raises(InvalidRequestError, match="leave out either"):
        tokenizer.render_chat([USER], True, continue_final_message=True)
    rendered = tokenizer.render_chat([USER], False, continue_final_message=True)
    assert rendered == tokenizer.render_chat([USER], continue_final_message=True) == "user: Q"


def test_of_several_templates_the_one_for_tools_is_used_with_tools(folder: Path) -> None:
    templates = [
        {"name": "default", "template": "usual"},
        {"name": "tool_use", "template": "{{ tools | tojson }}"},
    ]
    config = {"chat_template": templates}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(folder)
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    for tools in (None, [], [{"type": "function", "function": {"name": "f"}}]):
        expected = reference.apply_chat_template([USER], tools=tools, tokenize=False)
        assert tokenizer.render_chat([USER], tools=tools) == expected
    assert tokenizer.chat_template_text == "{{ tools | tojson }}"
