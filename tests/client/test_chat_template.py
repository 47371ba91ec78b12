"""Chat templates: rendered as the model means them, in a sandbox, with typed errors only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanocore.client.chat_template import MAX_TEMPLATE_CHARS
from nanocore.client.tokenizer import ChatMessage, Tokenizer
from nanocore.protocol.errors import InvalidRequestError
from tests.client.byte_tokens import ids_of

CONVERSATION: list[ChatMessage] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi, {{ 7 * 7 }}!"},
]


def _render(folder: Path, template: str, messages: list[ChatMessage] = CONVERSATION) -> str:
    """Read the folder with this template and render the messages."""
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.from_folder(folder).render_chat(messages)


def _write_config(folder: Path, **config: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_a_conversation_is_rendered_with_every_turn_in_order(tokenizer: Tokenizer) -> None:
    rendered = tokenizer.render_chat(CONVERSATION)
    assert rendered == "system: Be brief.\nuser: Hi, {{ 7 * 7 }}!\nassistant: "


def test_the_generation_prompt_can_be_left_out(tokenizer: Tokenizer) -> None:
    rendered = tokenizer.render_chat(CONVERSATION, add_generation_prompt=False)
    assert rendered == "system: Be brief.\nuser: Hi, {{ 7 * 7 }}!\n"


def test_a_conversation_is_encoded_as_it_is_rendered(tokenizer: Tokenizer) -> None:
    expected = ids_of(tokenizer, tokenizer.render_chat(CONVERSATION))
    assert tokenizer.encode_chat(CONVERSATION) == expected


def test_a_template_file_is_preferred_to_the_config(folder: Path) -> None:
    assert _render(folder, "{{ messages|length }} turns") == "2 turns"


def test_blocks_leave_no_blank_lines_as_in_transformers(folder: Path) -> None:
    template = (
        "{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}"
    )
    assert _render(folder, template) == "system\nuser\n"


@pytest.mark.parametrize("token", ["<s>", {"content": "<s>", "special": True}])
def test_special_tokens_are_known_to_the_template_in_either_form(
    folder: Path, token: object
) -> None:
    _write_config(folder, bos_token=token, eos_token=None)
    assert _render(folder, "[{{ bos_token }}][{{ eos_token }}]") == "[<s>][]"


@pytest.mark.parametrize("template", [None, 5, ["x"]])
def test_a_model_without_a_template_says_so(folder: Path, template: object) -> None:
    _write_config(folder, chat_template=template)
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        Tokenizer.from_folder(folder).render_chat(CONVERSATION)
    assert str(folder) in str(caught.value)


def test_a_template_may_reject_the_messages_in_its_own_words(folder: Path) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system!') }}{% endif %}"
    with pytest.raises(InvalidRequestError, match="no system!"):
        _render(folder, template)
    assert _render(folder, template, CONVERSATION[1:]) == ""


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ raise_exception.__code__.co_filename }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='root') }}",
        "{{ messages[0].__setitem__('role', 'root') }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(folder: Path, template: str) -> None:
    messages = [ChatMessage(role="user", content="hi")]
    with pytest.raises(InvalidRequestError, match="is unsafe"):
        _render(folder, template, messages)
    assert messages == [{"role": "user", "content": "hi"}]


def test_formatting_reveals_no_internals(folder: Path) -> None:
    assert "class" not in _render(folder, "{{ '{0.__class__}'.format(1) }}")


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{% for m in messages %}",
        "{% unheard_of %}",
        "{% include 'other' %}",
        "{{ messages[7].role }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ messages[0].content.encode('no such codec') }}",
    ],
)
def test_whatever_goes_wrong_in_a_template_is_an_invalid_request(
    folder: Path, template: str
) -> None:
    with pytest.raises(InvalidRequestError):
        _render(folder, template)


def test_a_broken_template_does_not_keep_plain_text_from_working(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% if %}")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("a") == ids_of(tokenizer, "a")


def test_a_very_long_template_is_refused_with_both_lengths(folder: Path) -> None:
    assert len(_render(folder, "x" * MAX_TEMPLATE_CHARS)) == MAX_TEMPLATE_CHARS
    with pytest.raises(InvalidRequestError, match="65537 characters: at most 65536"):
        _render(folder, "x" * (MAX_TEMPLATE_CHARS + 1))
