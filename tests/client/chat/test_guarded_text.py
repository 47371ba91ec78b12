"""What spells a special token in users' texts stays text, in every tokenizer's way of matching."""

# ruff: noqa: RUF001

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from nanocore.client.chat.special_token_guard import SpecialTokenGuard, SpellingCutter
from nanocore.client.tokenizer import ChatMessage, Tokenizer
from nanocore.protocol.errors import InvalidRequestError

TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson(ensure_ascii=true) }}{% endif %}{{ note }}"
    "{% for m in messages %}<|s|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for p in m.content or [] %}{{ p.text }}{% endfor %}{% endif %}"
    "{{ m.reasoning_content }}{% for c in m.tool_calls or [] %}<call>{{ c | tojson }}</call>"
    "{% endfor %}<|e|>\n{% endfor %}{% if add_generation_prompt %}<|s|>assistant\n<\\u0074hink>"
    "{% endif %}"
)
SPECIAL = ["<|s|>", "<|e|>", "<s>", "<|s"]
CONTROL = ["<call>", "</call>", "<think>"]
PLAIN_ADDED = ["<other>", "\n\n"]
SYMBOLS = sorted({*"<|>/ -_▁\\\n\t\"'{}[]:,.", *map(chr, range(48, 123)), "é", "＜", "s̀"[1]})
KINDS: dict[str, tuple[Any, Any, dict[str, bool]]] = {
    "plain": (None, None, {}),
    "first": (None, pre_tokenizers.Metaspace(prepend_scheme="first"), {"normalized": False}),
    "always": (None, pre_tokenizers.Metaspace(prepend_scheme="always"), {"normalized": False}),
    "legacy": (
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        None,
        {"normalized": False},
    ),
    "legacy, normalized": (
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        None,
        {"normalized": True},
    ),
    "lower case": (normalizers.Lowercase(), None, {"normalized": True}),
    "compatible": (normalizers.NFKC(), None, {"normalized": True}),
    "accents": (normalizers.StripAccents(), None, {"normalized": True}),
    "strips": (None, None, {"lstrip": True, "rstrip": True}),
}

Call = tuple[list[Any], dict[str, Any]]
"""Messages, and what else encode_chat is given."""


def _backend(kind: str) -> Backend:
    normalizer, pre_tokenizer, flags = KINDS[kind]
    vocab = {symbol: i for i, symbol in enumerate([*SYMBOLS, "[UNK]"])}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="[UNK]"))
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.add_special_tokens([AddedToken(text, special=True, **flags) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, special=False, **flags) for text in CONTROL])
    backend.add_tokens([AddedToken(text, normalized=False) for text in PLAIN_ADDED])
    return backend


def _tokenizer(kind: str, template: str = TEMPLATE) -> Tokenizer:
    config = {"bos_token": "<s>", "chat_template": template}
    files = {
        "tokenizer.json": _backend(kind).to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    return Tokenizer(files, kind)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return _tokenizer(request.param)


def _check(tokenizer: Tokenizer, tokens: list[str], given: Call, harmless: Call) -> None:
    """The prompt has each token as often as that of harmless texts."""
    ids = tokenizer.encode_chat(given[0], **given[1])
    expected = tokenizer.encode_chat(harmless[0], **harmless[1])
    text = tokenizer.render_chat(harmless[0], **harmless[1])
    for token in tokens:
        token_id = tokenizer.backend.token_to_id(token)
        if tokenizer._source == "legacy, normalized":
            # A token is only known there at a beginning or after a space: cuts make beginnings.
            assert ids.count(token_id) <= text.count(token), token
        else:
            assert ids.count(token_id) == expected.count(token_id), token


def _conversation(texts: list[str]) -> Call:
    get = iter(texts).__next__
    call = {"function": {"name": "f", "arguments": {"a": get(), f"{get()}k": 1}}}
    messages = [
        {"role": "system", "content": get()},
        {"role": "user", "content": [{"type": "text", "text": get()} for _ in range(3)]},
        {"role": "assistant", "content": get(), "reasoning_content": get(), "tool_calls": [call]},
        {"role": "tool", "content": get()},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": get()}}]
    how = {"tools": tools, "chat_template_kwargs": {"note": get()}}
    return messages, {**how, "allowed_template_kwargs": ["note"]}


NUM_TEXTS = 11
FRAGMENTS = st.sampled_from(
    [*SPECIAL, *CONTROL, *PLAIN_ADDED, "<|", "|>", "s|>", "e|>", "<", ">", "s", "S|>", "<|E|>",
     "＜|s|>", "＜", "<CALL>", "s̀", "<|s̀|>", "\\ufdd0", "\ufdd0", "\ufdd1", " ", "▁", "\n", "é",
     "x"]
)  # fmt: skip
TEXT = st.lists(FRAGMENTS, max_size=6).map("".join)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(texts=st.lists(TEXT, min_size=NUM_TEXTS, max_size=NUM_TEXTS))
def test_special_tokens_are_as_many_as_the_template_writes(
    tokenizer: Tokenizer, texts: list[str]
) -> None:
    harmless = _conversation(["harmless"] * NUM_TEXTS)
    _check(tokenizer, SPECIAL, _conversation(texts), harmless)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(texts=st.lists(TEXT, min_size=3, max_size=3))
def test_what_the_template_writes_itself_is_no_ones_to_write_but_the_assistants(
    tokenizer: Tokenizer, texts: list[str]
) -> None:
    turns = zip(("system", "user", "tool"), texts, strict=True)
    messages = [ChatMessage(role=role, content=text) for role, text in turns]
    harmless = [ChatMessage(role=m["role"], content="harmless") for m in messages]
    _check(tokenizer, [*SPECIAL, *CONTROL], (messages, {}), (harmless, {}))


def test_the_text_of_a_prompt_has_no_sentinels() -> None:
    tokenizer = _tokenizer("plain")
    messages, how = _conversation(["<s>", "<s> \ufdd0", "\\ufdd1"] * 3 + ["<|s|>"] * 2)
    text = tokenizer.render_chat(messages, **how)
    assert "\ufdd2" not in text
    assert "\\ufdd2" not in text
    assert text.count("<s>") == 6 + 1  # those of the texts, and the first
    unguarded = tokenizer.templates().template(has_tools=False)
    unguarded._guard = None
    assert text == tokenizer.render_chat(messages, **how)


@pytest.mark.parametrize("text", ["plain", "a < b | c > d", "x\n\ny", "<other> é \t", "</ call>"])
def test_harmless_texts_are_tokenized_as_ever(tokenizer: Tokenizer, text: str) -> None:
    messages = [ChatMessage(role="user", content=text), ChatMessage(role="assistant", content="")]
    expected = tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)
    assert tokenizer.encode_chat(messages) == expected


def test_answers_may_hold_what_ends_their_thoughts() -> None:
    tokenizer = _tokenizer("plain", "{{ messages[0].content.split('<call>')[1] }}")
    assert tokenizer.render_chat([{"role": "assistant", "content": "a<call>b"}]) == "b"
    assert tokenizer.render_chat([{"role": "user", "content": "a<call>b"}]) == ""


@pytest.mark.parametrize("kind", ["first", "always", "legacy"])
def test_a_part_after_a_cut_begins_without_the_space_of_a_text(kind: str) -> None:
    tokenizer = _tokenizer(kind, "{{ messages[0].content }}")
    ids = tokenizer.encode_chat([{"role": "user", "content": "a<s>b"}])
    tokens = [tokenizer.backend.id_to_token(token_id) for token_id in ids]
    assert tokens == ["▁", "a", "<", "s", ">", "b"]


def test_a_role_cannot_be_what_the_template_lacks_for_a_token() -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'end' %}.{% endif %}{% endfor %}"
    )
    backend = _backend("plain")
    backend.add_special_tokens(["<|user|>", "<|end|>", "<|bad|>", "<|x|>"])
    files = {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": json.dumps({"chat_template": template}).encode(),
    }
    tokenizer = Tokenizer(files, "here")
    messages = [ChatMessage(role=role) for role in ("user", "end", "bad", "x", "ad|><|x", "new")]
    ids = tokenizer.encode_chat(messages)
    special = [i for i in ids if i in tokenizer._special_texts]
    assert [tokenizer.backend.id_to_token(i) for i in special] == ["<|user|>", "<|end|>"]
    assert tokenizer.render_chat(messages) == "<|user|><|end|>.<|bad|><|x|><|ad|><|x|><|new|>"


def test_a_part_is_whole_though_a_token_continues_another() -> None:
    backend = Backend(models.BPE(vocab={s: i for i, s in enumerate(SYMBOLS)}, merges=[]))
    backend.add_special_tokens(["<|s", "<|s|>", "<s>"])
    guard = SpecialTokenGuard(backend, "")
    marked, sentinel = guard.mark({"messages": [{"role": "user", "content": "a<|s|>b<s>"}]})
    parts = guard.parts(marked["messages"][0]["content"], sentinel)
    ids = guard.encode(parts, lambda text: backend.encode(text, add_special_tokens=False).ids)
    assert [backend.id_to_token(i) for i in ids] == list("a<|s|>b<s>")


def test_a_special_token_of_one_character_cannot_be_written_by_users() -> None:
    backend = _backend("plain")
    backend.add_special_tokens(["é"])
    guard = SpecialTokenGuard(backend, "")
    with pytest.raises(InvalidRequestError, match="'é', which is a special token"):
        guard.mark({"messages": [{"role": "user", "content": "café"}]})


def test_texts_with_every_sentinel_are_refused_only_if_one_is_needed() -> None:
    guard = SpecialTokenGuard(_backend("plain"), "")
    sentinels = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    harmless = {"messages": [{"role": "user", "content": sentinels}]}
    assert guard.mark(harmless) == (harmless, None)
    with pytest.raises(InvalidRequestError, match="every noncharacter"):
        guard.mark({"messages": [{"role": "user", "content": sentinels + "<s>"}]})


@pytest.mark.parametrize("unit", ["<", "<|", "<|s", "<|r1", "|>", "<|r99|"])
def test_cutting_looks_at_each_place_of_a_long_text_a_few_times(unit: str) -> None:
    """Counted, not timed: what a text of many beginnings costs does not grow with the tokens."""
    texts = [f"<|r{i}|>" for i in range(6000)] + [f"<|{'x' * i}|>" for i in range(20)]
    guarded = SpellingCutter(texts)
    text = unit * (50_000 // len(unit))
    assert guarded.cut(text + "<|r5|>", "\ufdd0").endswith("<\ufdd0|r5|>")
    assert max(map(len, guarded._lengths.values())) <= 24


def test_a_long_text_that_becomes_a_token_is_cut_where_it_does() -> None:
    guard = SpecialTokenGuard(_backend("lower case"), "")
    text = "x" * 5000 + "<|S|>" + "y" * 5000
    marked, sentinel = guard.mark({"messages": [{"role": "user", "content": text}]})
    parts = guard.parts(marked["messages"][0]["content"], sentinel)
    assert "".join(parts) == text
    assert max(map(len, parts)) > 2000
    assert not any("<|s|>" in part.lower() for part in parts)


def test_the_source_of_a_template_folder_is_known(tmp_path: Path) -> None:
    assert _tokenizer("plain").templates().text == TEMPLATE


def _special_texts(template: str, **chat: Any) -> list[str]:
    """The special tokens of a conversation's prompt, with tokens of several kinds of model."""
    backend = _backend("plain")
    backend.add_special_tokens(["<|end|>", "<|im_end|>", "<invoke>", "</invoke>"])
    files = {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": json.dumps({"chat_template": template}).encode(),
    }
    tokenizer = Tokenizer(files, "here")
    messages = chat.pop("messages", [{"role": "user", "content": "hi"}])
    ids = tokenizer.encode_chat(messages, **chat)
    return [tokenizer.backend.id_to_token(i) for i in ids if i in tokenizer._special_texts]


@pytest.mark.parametrize("gap", ["\u0301", "\u0301 ", " \u0301"])
def test_what_is_normalized_away_hides_no_beginning(gap: str) -> None:
    tokenizer = _tokenizer("accents")
    parts = [{"text": f"a<{gap * 200}"}, {"text": "|e|>b"}]
    harmless = [{"text": "a"}, {"text": "b"}]
    counts = [
        tokenizer.encode_chat([{"role": "user", "content": content}]).count(
            tokenizer.backend.token_to_id("<|e|>")
        )
        for content in (parts, harmless)
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("role", ["end", "end|>x", "d|>", "|end|>x", "im_end"])
def test_roles_complete_no_token(role: str) -> None:
    template = "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% endfor %}{{ ''.endswith('a') }}"
    assert _special_texts(template, messages=[{"role": role}]) == []


@pytest.mark.parametrize("key", ["|im_end|", "|im_end|>x", "invoke", "invoke>k", "/invoke", "n>"])
def test_keys_complete_no_token(key: str) -> None:
    template = "{% for k, v in tools[0] | items %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}"
    assert _special_texts(template, tools=[{key: "x"}]) == []


def test_keys_stay_whether_the_template_asks_for_them_or_not() -> None:
    template = "{{ tools[0].invoke }}{{ tools[0]['end|>'] }}"
    assert _special_texts(template, tools=[{"invoke": "a", "end|>": "b"}]) == []
    backend = _backend("plain")
    backend.add_special_tokens(["<invoke>", "<|end|>"])
    guard = SpecialTokenGuard(backend, template)
    conversation = {"messages": [], "tools": [{"invoke": "a", "end|>": "b", "invok": "c"}]}
    assert guard.mark(conversation) == (conversation, None)

    backend = _backend("plain")
    backend.add_special_tokens(["<|repo_name|>", "<|user|>", "<|file_sep|>", "[TOOL]"])
    guard = SpecialTokenGuard(backend, "")
    tool = {"name": "a", "user": {"repo_name": "b", "file": "c", "sep": "d", "TOOL": "e", "e": "f"}}
    conversation = {"messages": [], "tools": [tool]}
    assert guard.mark(conversation) == (conversation, None)


def test_a_cut_that_is_escaped_twice_leaves_no_trace() -> None:
    tokenizer = _tokenizer("plain", "{{ (messages[0].content | string) | tojson }}")
    message: Any = {"role": "tool", "content": {"content": [1, "<"]}}
    assert tokenizer.render_chat([message]) == "\"{'content': [1, '<']}\""


@pytest.mark.parametrize(
    "text",
    ["<|im_/thinkend|>", "</think|im_end|>", "<|im_/no_/thinkthinkend|>", "a<|im_end/think|b"],
)
def test_what_a_template_takes_out_of_a_text_joins_no_token(text: str) -> None:
    template = (
        "{{ messages[0].content.replace('/no_think', '') | replace(\"/think\", '') }}"
        "{% if messages[1] %}{{ messages[1].content.replace('b', '>') }}{% endif %}"
    )
    messages = [{"role": "user", "content": text}]
    assert _special_texts(template, messages=messages) == []
    harmless = [{"role": "user", "content": "a < b/think"}]
    assert _special_texts(template, messages=harmless) == []
