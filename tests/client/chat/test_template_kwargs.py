"""Further names for a template: those that are allowed, with values that are plain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanocore.client.chat.template import DEFAULT_TEMPLATE_KWARGS
from nanocore.client.tokenizer import ChatMessage, Tokenizer
from nanocore.protocol.errors import InvalidRequestError

USER: list[ChatMessage] = [{"role": "user", "content": "hi"}]


def _render(folder: Path, template: str, **how: Any) -> str:
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.from_folder(folder).render_chat(USER, **how)


def test_values_reach_the_template_as_they_are(folder: Path) -> None:
    template = "{{ thinking }} {{ documents | tojson }} {{ reasoning_effort is none }}"
    given = {"thinking": False, "documents": [{"a": (1, 2.5)}], "reasoning_effort": None}
    rendered = _render(folder, template, chat_template_kwargs=given)
    assert rendered == 'False [{"a": [1, 2.5]}] True'


def test_a_caller_may_allow_other_names(folder: Path) -> None:
    assert "mood" not in DEFAULT_TEMPLATE_KWARGS
    with pytest.raises(InvalidRequestError, match=r"\['mood'\].*enable_thinking.*leave it out"):
        _render(folder, "{{ mood }}", chat_template_kwargs={"mood": "good"})
    how = {"chat_template_kwargs": {"mood": "good"}, "allowed_template_kwargs": ["mood"]}
    assert _render(folder, "{{ mood }}", **how) == "good"
    with pytest.raises(InvalidRequestError, match="allowed are none"):
        _render(folder, "", chat_template_kwargs={"thinking": True}, allowed_template_kwargs=())


@pytest.mark.parametrize(
    "name",
    [
        "messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize",
        "bos_token", "eos_token", "image_token", "raise_exception", "strftime_now", "namespace",
        "dict", "range", "cycler", "joiner", "lipsum", "loop", "self", "caller",
        "_private", "__class__", "not a name", "1st", "", "a.b", "x=1", 5, None,
    ],
)  # fmt: skip
def test_names_with_a_meaning_are_refused_even_if_allowed(folder: Path, name: Any) -> None:
    how = {"chat_template_kwargs": {name: "x"}, "allowed_template_kwargs": [name]}
    with pytest.raises(InvalidRequestError, match=r"chat_template_kwargs\['?" + str(name)):
        _render(folder, "x", **how)


@pytest.mark.parametrize("value", [object(), b"x", {1, 2}, [object()], {"a": {1: 2}}])
def test_values_that_are_not_plain_are_refused(folder: Path, value: object) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"chat_template_kwargs: .*not (object|by|set|in)"
    ):
        _render(folder, "x", chat_template_kwargs={"thinking": value})


@pytest.mark.parametrize("given", [[("thinking", True)], "thinking", 5])
def test_what_is_no_dict_is_refused(folder: Path, given: Any) -> None:
    with pytest.raises(InvalidRequestError, match="a dict of names and values"):
        _render(folder, "x", chat_template_kwargs=given)
