"""Free prefixes: an output is of its form, or begins with one of them and goes on as it likes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from nanocore.engine_core.grammars.token_table import TokenTable
from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.structured_outputs import ReasoningMarks
from tests.engine_core.grammars.walks import DEMO_MODEL, compiled, load_table

EOS = 2
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "name": {"type": "string"}},
        "additionalProperties": False,
    }
)
ARRAY = json.dumps({"type": "array", "items": {"type": ["boolean", "string", "integer"]}})
DEEPSEEK = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
MARKS = ("<tool_call>", "[TOOL_CALLS]", DEEPSEEK)
OTHER_TOKENS = ("</tool_call>", "[ARGS]")
Tokens = tuple[TokenTable, Tokenizer]


def make_tokens(folder: Path, kind: str) -> Tokens:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    if kind != "text":
        added = (*MARKS, *OTHER_TOKENS)
        tokenizer.add_tokens([AddedToken(m, special=kind == "special tokens") for m in added])
    tokenizer.save(str(folder / "tokenizer.json"))
    return load_table(folder, 1100, [EOS]), tokenizer


@pytest.fixture(scope="module", params=["text", "tokens", "special tokens"])
def tokens(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    """A vocabulary in which marks are text, or tokens of their own, special or not."""
    return make_tokens(tmp_path_factory.mktemp("marks"), request.param)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    return make_tokens(tmp_path_factory.mktemp("plain"), "text")


def is_allowed(tokens: Tokens, *texts: str, **wanted: Any) -> bool:
    """Whether masks let these texts through, tokenized apart, and then the end."""
    vocabulary, tokenizer = tokens
    matcher = compiled(vocabulary, **wanted).matcher()
    words_W = np.empty(vocabulary.num_words, np.int32)
    for token in [i for text in texts for i in tokenizer.encode(text).ids] + [EOS]:
        matcher.fill(words_W)
        assert matcher.failure is None
        if not int(words_W[token // 32]) >> token % 32 & 1:
            return False
        matcher.append([token])
    return True


FREE = (
    "{mark}",
    "{mark}\n{{\"name\": \"f\"}}\n</tool_call>",
    "{mark}f[ARGS]{{}} and more",
    "\n\n{mark}x",
    " {mark}a{mark}b",
)  # fmt: skip
BOUND = (
    "hello", "", "<", "\n", '{{"a": 1', '{{"b": 1}}', 'x{mark}', '{{"a": 1}}{mark}',
    "[ARGS]{mark}", "     {mark}", '     {{}}',
)  # fmt: skip
OF_FORM = ("{}", '{"a": 1}', '{"a":1,"name":"x"}', '{"name": "<tool_call>"}')


@pytest.mark.parametrize("mark", MARKS)
def test_an_output_is_of_its_form_or_begins_with_a_prefix(tokens: Tokens, mark: str) -> None:
    wanted = {"json": SCHEMA, "free_prefixes": ["<unused>", mark]}
    for text in FREE:
        assert is_allowed(tokens, text.format(mark=mark), **wanted), text
        assert not is_allowed(tokens, text.format(mark=mark), json=SCHEMA), text
    for text in BOUND:
        assert not is_allowed(tokens, text.format(mark=mark), **wanted), text


def test_json_may_be_indented_where_white_space_may_begin_a_call(plain: Tokens) -> None:
    """Or a model that begins with some could only call."""
    wanted: dict[str, Any] = {"json": SCHEMA, "free_prefixes": ["<tool_call>"]}
    for compact in (False, True):
        more = wanted | {"disable_any_whitespace": compact}
        assert is_allowed(plain, '\n\n{"a":1}', **more) == (not compact)
        assert is_allowed(plain, "\n\n<tool_call>", **more)
    assert not is_allowed(plain, " yes", choice=["yes"], free_prefixes=["<tool_call>"])
    assert not is_allowed(plain, '\n{"a":1}', json=SCHEMA)


@pytest.mark.parametrize("mark", MARKS)
def test_the_form_is_what_it_was(plain: Tokens, mark: str) -> None:
    for text in OF_FORM:
        assert is_allowed(plain, text, json=SCHEMA, free_prefixes=[mark]), text


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"regex": "[0-9]+"}, "17"),
        ({"choice": ["<tool>", "yes"]}, "<tool>"),
        ({"grammar": 'start: "a" n\nn: /[0-9]+/'}, "a12"),
        ({"json_object": True}, '{"x": []}'),
        ({"json": ARRAY}, '[true, "[TOOL_CALLS]"]'),
    ],
)
def test_every_kind_of_form_may_have_them(plain: Tokens, form: dict[str, Any], text: str) -> None:
    wanted = form | {"free_prefixes": ["<tool_call>", "[TOOL_CALLS]"]}
    assert is_allowed(plain, text, **wanted)
    assert is_allowed(plain, "<tool_call>17", **wanted)
    assert is_allowed(plain, "[TOOL_CALLS]17", **wanted)
    assert not is_allowed(plain, "<tool_c", **wanted)
    assert not is_allowed(plain, "maybe", **wanted)


@pytest.mark.parametrize("begins", [True, False])
def test_they_count_after_the_reasoning(tokens: Tokens, begins: bool) -> None:
    reasoning = ReasoningMarks(begin="<think>" if begins else "", end="</think>")
    wanted = {"json": SCHEMA, "free_prefixes": ["<tool_call>"], "reasoning": reasoning}
    thought = "<think>hm <tool_call></think>" if begins else "hm</think>"
    if (
        begins
        and len(tokens[1].encode("<tool_call>").ids) == 1
        and tokens[0].special_token("<tool_call>")
    ):  # a special token is no text
        thought = "<think>hm</think>"
    for gap in ("", "\n", "\n\n"):
        assert is_allowed(tokens, f"{thought}{gap}<tool_call>x</think>", **wanted), gap
        assert is_allowed(tokens, f'{thought}{gap}{{"a": 1}}', **wanted), gap
        assert not is_allowed(tokens, f"{thought}{gap}x", **wanted), gap
    assert is_allowed(tokens, "<tool_call>x", **wanted) == begins


def test_what_begins_like_the_form_is_told_from_it_later(plain: Tokens) -> None:
    """As Llama 3's calls are, which are objects that name a tool."""
    wanted = {"json": SCHEMA, "free_prefixes": ['{"name": "get_weather"', '{"name": "get"']}
    for text in (
        '{"name": "get_weather", "parameters": {}}; {"na', '{"name":"get"}', '{"name": "get"x',
        '{"name": "get_"}', '{"name": "got"}', '{"a": 1, "name": "get"}', "{}", '{"a":1}',
    ):  # fmt: skip
        assert is_allowed(plain, text, **wanted), text
    for text in (
        '{"name": "get_", "p": 1}',
        '{"b": "get"}',
        '{"names": "get"}',
        '{"a": 1, "b": 2}',
    ):
        assert not is_allowed(plain, text, **wanted), text


def test_a_list_of_calls_is_told_from_an_array(plain: Tokens) -> None:
    wanted = {"json": ARRAY, "free_prefixes": ["[find(", "[true_("]}
    for text in ("[find(a=1)]", "[true_()", "[]", "[false]", "[true]", '["find("]', "[1, 2]"):
        assert is_allowed(plain, text, **wanted), text
    for text in ("[find]", "[get(x=1)]", "[true_]", "[find"):
        assert not is_allowed(plain, text, **wanted), text


def test_a_special_token_other_than_the_end_may_come_in_what_is_free(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    vocabulary, tokenizer = make_tokens(tmp_path_factory.mktemp("special"), "special tokens")
    matcher = compiled(vocabulary, choice=["a"], free_prefixes=["[TOOL_CALLS]"]).matcher()
    words_W = np.empty(vocabulary.num_words, np.int32)
    matcher.append(tokenizer.encode("[TOOL_CALLS]").ids)
    matcher.fill(words_W)
    allowed = np.unpackbits(words_W.view(np.uint8), bitorder="little")
    special = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    assert len(special) > len(MARKS + OTHER_TOKENS)
    assert allowed[special].all()
    assert not allowed[tokenizer.get_vocab_size() :].any()


@pytest.mark.parametrize(
    "prefixes",
    [["<" + "\u00e9" * 30_000], ["[" * 200 + str(i) for i in range(256)]],
    ids=["a long one", "many that begin alike"],
)
def test_prefixes_that_are_too_complex_are_refused(plain: Tokens, prefixes: list[str]) -> None:
    with pytest.raises(InvalidRequestError, match="structured_outputs is too complex"):
        compiled(plain[0], json=SCHEMA, free_prefixes=prefixes)


@pytest.mark.parametrize(
    "text", ["\0", "\n", '"\\', "/", "a'b", "\U0001f600", "<[1]>", "%%", "$|^"]
)
def test_a_prefix_is_itself_and_nothing_else(plain: Tokens, text: str) -> None:
    wanted = {"choice": ["yes"], "free_prefixes": [text]}
    assert is_allowed(plain, f"{text}x", **wanted)
    assert not is_allowed(plain, "x", **wanted)
    assert is_allowed(plain, "yes", **wanted)


def test_a_form_that_is_wrong_is_named_as_without_them(plain: Tokens) -> None:
    bad = '{"properties": {"a": {"type": "integr"}}}'
    messages = set()
    for prefixes in ([], ["<tool_call>"]):
        with pytest.raises(InvalidRequestError) as caught:
            compiled(plain[0], json=bad, free_prefixes=prefixes)
        messages.add(str(caught.value))
    assert len(messages) == 1
