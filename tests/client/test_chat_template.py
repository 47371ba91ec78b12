"""Chat templates: rendered as the model means them, in a sandbox, with typed errors only."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from nanocore.client.chat.template import MAX_TEMPLATE_CHARS, ChatTemplate
from nanocore.client.tokenizer import ChatMessage, Tokenizer
from nanocore.protocol.errors import InvalidRequestError
from tests.client.byte_tokens import ids_of

CONVERSATION: list[ChatMessage] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi, {{ 7 * 7 }}!"},
]


def _render(folder: Path, template: str, messages: list[ChatMessage] = CONVERSATION) -> str:
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.from_folder(folder).render_chat(messages)


def _write_config(folder: Path, **config: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_a_conversation_is_rendered_with_every_turn_in_order(tokenizer: Tokenizer) -> None:
    rendered = tokenizer.render_chat(CONVERSATION)
    assert rendered == "system: Be brief.\nuser: Hi, {{ 7 * 7 }}!\nassistant: "


def _both(folder: Path, messages: Any = CONVERSATION) -> str:
    rendered = Tokenizer.from_folder(folder).render_chat(messages)
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == expected
    return rendered


NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]


@pytest.mark.parametrize("templates", [NAMED, NAMED[::-1], [*NAMED[:1] * 2, *NAMED]])
def test_of_several_templates_the_default_is_used(folder: Path, templates: list[Any]) -> None:
    _write_config(folder, chat_template=templates)
    assert _both(folder) == "usual"
    _write_config(folder, chat_template={e["name"]: e["template"] for e in templates})
    assert _both(folder) == "usual"


def test_a_template_file_is_preferred_to_several_in_the_config(folder: Path) -> None:
    _write_config(folder, chat_template=NAMED)
    (folder / "chat_template.jinja").write_text("the file")
    assert _both(folder) == "the file"
    (folder / "chat_template.jinja").write_text("")
    assert _both(folder) == ""


def test_a_template_for_tools_may_have_a_file_of_its_own(folder: Path) -> None:
    _write_config(folder, chat_template=NAMED)
    (folder / "chat_template.jinja").write_text("the file")
    additional = folder / "additional_chat_templates"
    additional.mkdir()
    (additional / "tool_use.jinja").write_text("TOOLS {{ tools | length }}")
    assert _both(folder) == "the file"
    messages: Any = [{"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    rendered = Tokenizer.from_folder(folder).render_chat(messages, tools=tools)
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    assert rendered == reference.apply_chat_template(messages, tools=tools, tokenize=False)
    assert rendered == "TOOLS 1"
    (additional / "tool_use.jinja").write_bytes(b"\xff")
    with pytest.raises(InvalidRequestError, match=r"tool_use\.jinja"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("content", "rendered"),
    [
        (b"\xef\xbb\xbfhi", "\ufeffhi"),  # a mark is text: the model was trained with it
        (b"a\r\nb\r{{ 'c\r\nd' }}\r\n", "a\nb\nc\nd"),
        ("中 {{ '👍' }}".encode(), "中 👍"),
        (b"\n\n  {%- if true %}\n  x\n  {% endif %}\n\n", "  x\n"),
    ],
)
def test_the_bytes_of_a_template_file_mean_what_they_mean_to_transformers(
    folder: Path, content: bytes, rendered: str
) -> None:
    (folder / "chat_template.jinja").write_bytes(content)
    assert _both(folder) == rendered


def test_a_template_file_that_is_no_utf8_is_refused_by_name(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequestError, match=r"chat_template\.jinja"):
        Tokenizer.from_folder(folder)


def test_json_is_written_for_models_and_is_plain_text_to_filters(folder: Path) -> None:
    """jinja2's own filter sorts the keys, escapes <, >, & and ', and every letter but ASCII's."""
    value = '{"b": "<a> & \'é\'", "a": [1, null, true, "中"]}'
    _write_config(folder, chat_template=f"{{{{ {value.replace('null', 'none')} | tojson }}}}")
    assert _both(folder) == value
    options = "separators=(',', ':'), indent='\t', sort_keys=true, ensure_ascii=true"
    _write_config(folder, chat_template=f"{{{{ {{'b': ['é'], 'a': 1}} | tojson({options}) }}}}")
    assert _both(folder) == '{\n\t"a":1,\n\t"b":[\n\t\t"\\u00e9"\n\t]\n}'

    assert _render(folder, "{{ ['<'] | tojson + '<' }}{{ ('\"' | tojson)[:2] }}") == '["<"]<"\\'


def test_templates_read_the_date_from_a_clock_by_default_this_machines(folder: Path) -> None:
    template = ChatTemplate(
        "{{ strftime_now('%d %b %Y, %H:%M') }}", {}, "here", now=lambda: datetime(2026, 2, 1, 3, 4)
    )
    assert template.render(CONVERSATION) == ["01 Feb 2026, 03:04"]

    before = datetime.now()
    shown = datetime.fromisoformat(_render(folder, "{{ strftime_now('%Y-%m-%dT%H:%M:%S.%f') }}"))
    assert before <= shown <= datetime.now()


def test_tools_and_documents_are_known_and_not_given(folder: Path) -> None:
    names = ("tools", "documents", "messages", "enable_thinking", "bos_token", "unk_token")
    template = "".join(f"{{{{ {n} is defined }}}}{{{{ {n} is none }}}} " for n in names)
    (folder / "chat_template.jinja").write_text(template)
    assert _both(folder) == "TrueTrue TrueTrue TrueFalse FalseFalse FalseFalse FalseFalse "


class _Role(str):
    """A string with more to it."""

    def secret(self) -> str:
        return "secret"


def test_templates_get_plain_copies_of_values(folder: Path) -> None:
    message: Any = {"role": _Role("user"), "content": ("a", True, 1.5)}
    template = "{{ messages[0].role.secret is defined }} {{ messages[0].content | tojson }}"
    assert _render(folder, template, [message]) == 'False ["a", true, 1.5]'


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "at least one message"),
        (["hi"], "not str"),
        ([{"role": "user", "content": object()}], "not object"),
        ([{"role": "user", "content": b"hi"}], "not bytes"),
        ([{"role": "user", "content": [{"x": {1, 2}}]}], "not set"),
    ],
)
def test_messages_that_are_none_are_refused_in_words(
    folder: Path, messages: Any, reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        _render(folder, "x", messages)


def test_messages_that_hold_themselves_are_refused(folder: Path) -> None:
    content: list[Any] = []
    content.append(content)
    with pytest.raises(InvalidRequestError, match="messages of a chat"):
        _render(folder, "x", [ChatMessage(role="user", content=content)])


def test_a_template_may_reject_the_messages_in_words_that_are_shortened(folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"\(100015 characters\)") as caught:
        _render(folder, "{{ raise_exception('no' * 50000) }}")
    assert len(str(caught.value)) < 1000

    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system!') }}{% endif %}"
    with pytest.raises(InvalidRequestError, match="no system!"):
        _render(folder, template)
    assert _render(folder, template, CONVERSATION[1:]) == ""


@pytest.mark.parametrize("token", ["<s>", {"content": "<s>", "special": True}])
def test_special_tokens_are_known_to_the_template_in_either_form(
    folder: Path, token: object
) -> None:
    _write_config(folder, bos_token=token, eos_token=None)
    assert _render(folder, "[{{ bos_token }}][{{ eos_token }}]") == "[<s>][]"


@pytest.mark.parametrize(
    "template",
    [None, 5, [], ["x"], [{"name": []}], NAMED[:1], {"tool_use": "x"}, [{"name": "default"}]],
)
def test_a_model_without_a_template_says_so(folder: Path, template: object) -> None:
    _write_config(folder, chat_template=template)
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        Tokenizer.from_folder(folder).render_chat(CONVERSATION)
    assert str(folder) in str(caught.value)


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
        "{{ strftime_now.__globals__['json'] }}",
        "{{ strftime_now.__closure__[0].cell_contents }}",
        "{{ dict.__class__.__mro__ }}",
        "{{ dict.__call__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace()._Namespace__attrs.keys() }}",
        "{% set d = {} %}{{ d.update(a=1) }}",
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


def test_a_model_without_a_template_has_remedies(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    _write_config(folder)
    tokenizer = Tokenizer.from_folder(folder)
    remedies = r"--chat-template FILE \(or chatml\), or send a prompt, as to /v1/completions"
    with pytest.raises(InvalidRequestError, match=remedies) as refused:
        tokenizer.render_chat(CONVERSATION)
    assert refused.value.param == "chat_template"
    assert not tokenizer.templates().has_default
    assert tokenizer.render_chat(CONVERSATION, chat_template="chatml") == CHATML


CHATML = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi, {{ 7 * 7 }}!<|im_end|>\n"
    "<|im_start|>assistant\n"
)


def test_a_given_template_replaces_the_models(tokenizer: Tokenizer) -> None:
    given = "{% for m in messages %}({{ m.role }}){% endfor %}"
    assert tokenizer.render_chat(CONVERSATION, chat_template=given) == "(system)(user)"
    assert tokenizer.render_chat(CONVERSATION, chat_template="chatml") == CHATML
    ids = tokenizer.encode_chat(CONVERSATION, chat_template=given)
    assert ids == tokenizer.encode("(system)(user)", add_special_tokens=False)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert tokenizer.render_chat(CONVERSATION, chat_template=given, tools=tools) == "(system)(user)"
    with pytest.raises(InvalidRequestError, match=r"'chatmI': a template .* or chatml"):
        tokenizer.render_chat(CONVERSATION, chat_template="chatmI")


def test_few_given_templates_keep_their_processes(tokenizer: Tokenizer) -> None:
    first, *_, last = [f"{{{{ {number} }}}}" for number in range(6)]
    before = tokenizer.templates(first), tokenizer.templates(last)
    for number in range(2, 6):
        tokenizer.render_chat(CONVERSATION, chat_template=f"{{{{ {number} }}}}")
    assert tokenizer.templates(last) is before[1]
    assert tokenizer.templates(first) is not before[0]


def test_chatml_begins_with_what_the_tokenizer_puts_before_texts(folder: Path) -> None:
    _write_config(folder, bos_token="<|end|>")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.render_chat(CONVERSATION, chat_template="chatml") == CHATML
    end = tokenizer.backend.token_to_id("<|end|>")
    tokenizer = Tokenizer.from_folder(folder)
    tokenizer.backend.post_processor = TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", end)]
    )
    assert tokenizer.render_chat(CONVERSATION, chat_template="chatml") == f"<|end|>{CHATML}"
    assert tokenizer.encode_chat(CONVERSATION, chat_template="chatml")[0] == end


TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
TRIMMED = TURNS.replace("m.content", "m.content | trim")
PROMPTED = TURNS + "{% if add_generation_prompt %}[assistant]{% endif %}"
BY_PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }}|{% endfor %}{% endfor %}"
QUESTION = {"role": "user", "content": "Q"}


def _answer(content: Any, **more: Any) -> list[Any]:
    return [QUESTION, {"role": "assistant", "content": content, **more}]


@pytest.mark.parametrize(
    ("template", "messages", "key"),
    [
        (TURNS, _answer("so far"), True),
        (TURNS, _answer("so far "), True),
        (TRIMMED, _answer(" so far \n"), True),
        (PROMPTED, _answer("so"), True),
        (TURNS, _answer(""), True),
        (TURNS, _answer("CONTINUE_FINAL_MESSAGE_TAG a"), True),
        (TURNS, [QUESTION], True),
        (
            BY_PARTS,
            [{"role": "user", "content": [{"text": "a"}, {"text": "b "}, {"x": 1}]}],
            True,
        ),
    ],
)
def test_the_prompt_ends_where_that_of_transformers_does(
    folder: Path, template: str, messages: Any, key: bool
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
        (TURNS, _answer(None), True, "has no text"),
        (TURNS, _answer({"a": 1}), True, "has no text"),
        (BY_PARTS, _answer([{"x": 1}]), True, "has no text"),
        ("{{ messages[0].content }}", _answer("x"), True, "leaves out the last message"),
        ("{{ messages[-1].content[1:] }}", _answer("xyz"), True, "leaves out the last message"),
    ],
)
def test_what_cannot_be_continued_is_refused_by_both(
    folder: Path, template: str, messages: Any, key: bool, reason: str
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
        tokenizer.render_chat([QUESTION], True, continue_final_message=True)
    rendered = tokenizer.render_chat([QUESTION], False, continue_final_message=True)
    assert rendered == tokenizer.render_chat([QUESTION], continue_final_message=True) == "user: Q"


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
        expected = reference.apply_chat_template([QUESTION], tools=tools, tokenize=False)
        assert tokenizer.render_chat([QUESTION], tools=tools) == expected
    assert tokenizer.templates().text == "{{ tools | tojson }}"
