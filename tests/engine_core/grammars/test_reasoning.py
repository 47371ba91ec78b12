"""Free reasoning before a structured output: it ends by its mark, and then the form holds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from nanocore.engine_core.grammars.token_table import TokenTable
from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.fields import MAX_STRUCTURED_OUTPUTS_BYTES
from nanocore.protocol.structured_outputs import ReasoningMarks
from tests.engine_core.grammars.test_free_prefixes import is_allowed
from tests.engine_core.grammars.walks import DEMO_MODEL, compiled, load_table

EOS = 2
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
)
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "json": ({"json": SCHEMA}, '{"a":1}'),
    "json_object": ({"json_object": True}, "{}"),
    "choice": ({"choice": ["x", "yz"]}, "yz"),
    "regex": ({"regex": "[0-9]+"}, "17"),
    "grammar": ({"grammar": 'start: "a" n\nn: /[0-9]+/'}, "a12"),
}
OPEN = ReasoningMarks(end="</think>")
OPTIONAL = ReasoningMarks(begin="<think>", end="</think>")


@pytest.fixture(scope="module", params=["tokens", "text"])
def tokens(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TokenTable, Tokenizer]:
    """A vocabulary in which the marks are tokens of their own, as most have them, or are not."""
    folder = tmp_path_factory.mktemp("marks")
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    if request.param == "tokens":
        tokenizer.add_tokens([AddedToken(m, special=False) for m in ("<think>", "</think>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    return load_table(folder, 1100, [EOS]), tokenizer


@pytest.mark.parametrize("kind", FORMS)
def test_the_form_follows_the_reasoning(tokens: tuple[TokenTable, Tokenizer], kind: str) -> None:
    wanted, form = FORMS[kind]
    for thought in ("hm {} \n<think </\n</think>", "</think>"):
        for lines in ("", "\n", "\n\n"):
            text = f"{thought}{lines}{form}"
            assert is_allowed(tokens, text, **wanted, reasoning=OPEN), text
            assert is_allowed(tokens, f"<think>{text}", **wanted, reasoning=OPTIONAL), text
    for text in (f"hm\n\n\n{form}", f"hm</think>{form}{form}]", "hm</think>", "hm", ""):
        assert not is_allowed(tokens, text, **wanted, reasoning=OPEN), text


@pytest.mark.parametrize("kind", FORMS)
def test_reasoning_is_a_must_only_where_the_prompt_has_begun_it(
    tokens: tuple[TokenTable, Tokenizer], kind: str
) -> None:
    wanted, form = FORMS[kind]
    assert not is_allowed(tokens, form, **wanted, reasoning=OPEN)
    assert is_allowed(tokens, form, **wanted, reasoning=OPTIONAL)
    assert not is_allowed(tokens, f"hm</think>{form}", **wanted, reasoning=OPTIONAL)


def test_marks_may_come_as_letters(tokens: tuple[TokenTable, Tokenizer]) -> None:
    texts = ("hm", "</", "think>", '{"a":1}')
    assert is_allowed(tokens, *texts, json=SCHEMA, reasoning=OPEN)
    assert is_allowed(tokens, "<", "think>", *texts, json=SCHEMA, reasoning=OPTIONAL)


def test_the_first_end_counts(tokens: tuple[TokenTable, Tokenizer]) -> None:
    assert not is_allowed(tokens, "a</think>b</think>yz", choice=["yz"], reasoning=OPEN)


def test_marks_count_among_the_texts(tokens: tuple[TokenTable, Tokenizer]) -> None:
    end = "c" * MAX_STRUCTURED_OUTPUTS_BYTES
    with pytest.raises(InvalidRequestError, match=f"{len(end) + 2} bytes"):
        compiled(tokens[0], regex="a", reasoning=ReasoningMarks(begin="b", end=end))


def test_an_end_without_text_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"reasoning\.end is empty"):
        ReasoningMarks(end="")


def test_a_refusal_names_the_schema_as_without_reasoning(
    tokens: tuple[TokenTable, Tokenizer],
) -> None:
    bad = '{"properties": {"a": {"type": "integr"}}}'
    said = []
    for reasoning in (None, OPEN):
        with pytest.raises(InvalidRequestError) as caught:
            compiled(tokens[0], json=bad, reasoning=reasoning)
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert "/properties/a" in said[0]
