"""A matcher follows what was delivered; it fails once, with a text, and never raises."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nanocore.engine_core.grammars import token_matcher
from nanocore.engine_core.grammars.token_table import TokenTable
from nanocore.protocol.errors import InvalidRequestError
from tests.engine_core.grammars.walks import (
    DEMO_MODEL,
    allowed,
    compiled,
    demo_vocabulary,
    follow,
    load_table,
)

EOS = 2


def tokens_of(vocabulary: TokenTable, text: str) -> list[int]:
    return list(vocabulary.tokenizer.tokenize_str(text))


def test_samples_of_a_grammar_are_independent(vocabulary: TokenTable) -> None:
    grammar = compiled(vocabulary, regex="[ab]{2}|cd")
    first, second = grammar.matcher(), grammar.matcher()
    at_the_beginning = allowed(vocabulary, first)
    first.append(tokens_of(vocabulary, "c"))
    assert allowed(vocabulary, first) == tokens_of(vocabulary, "d")
    assert allowed(vocabulary, second) == at_the_beginning == allowed(vocabulary, grammar.matcher())


def test_tokens_taken_in_at_once_or_one_by_one_lead_to_the_same_mask(
    vocabulary: TokenTable,
) -> None:
    """So a resumed request, whose tokens are replayed, goes on where it was."""
    grammar = compiled(vocabulary, json='{"type":"array","items":{"type":"integer"}}')
    tokens = tokens_of(vocabulary, "[1, 23,4")
    one_by_one, at_once = grammar.matcher(), grammar.matcher()
    for token in tokens:
        one_by_one.append([token])
        mask = allowed(vocabulary, one_by_one)
        assert allowed(vocabulary, one_by_one) == mask
    at_once.append(tokens)
    assert allowed(vocabulary, at_once) == mask


def test_masks_behind_drafts_are_those_that_come_when_the_drafts_were_right(
    vocabulary: TokenTable,
) -> None:
    grammar = compiled(vocabulary, json='{"type":"array","items":{"type":"integer"}}')
    tokens = tokens_of(vocabulary, "[1, 23,4]")
    drafted, plain = grammar.matcher(), grammar.matcher()
    words_DW = np.zeros((1 + len(tokens), len(vocabulary.all_words)), np.int32)
    assert drafted.fill(words_DW[0])
    assert drafted.fill_behind(words_DW[1:], tokens)
    for i in range(len(words_DW)):
        expected = np.zeros_like(words_DW[0])
        assert plain.fill(expected)
        assert np.array_equal(words_DW[i], expected)
        plain.append(tokens[i : i + 1])
    assert allowed(vocabulary, drafted) == tokens_of(vocabulary, "[")  # it has followed none


def test_behind_a_draft_that_cannot_follow_no_token_may_and_nothing_fails(
    vocabulary: TokenTable,
) -> None:
    matcher = compiled(vocabulary, regex="ab*").matcher()
    words_DW = np.full((2, len(vocabulary.all_words)), 7, np.int32)
    assert matcher.fill_behind(words_DW, tokens_of(vocabulary, "xa"))
    assert not words_DW.any()
    assert matcher.failure is None
    assert allowed(vocabulary, matcher) == tokens_of(vocabulary, "a")


def test_drafts_are_what_may_follow_of_those_proposed_and_then_what_must(
    vocabulary: TokenTable,
) -> None:
    matcher = compiled(vocabulary, regex=r'\{"name":"[a-z]+","age":[0-9]+\}').matcher()

    def drafted(proposed: str, most: int) -> str:
        drafts = matcher.draft(tokens_of(vocabulary, proposed), most)
        return vocabulary.tokenizer.decode_str(list(drafts))

    assert drafted("", 20) == '{"name":"'
    assert drafted("", 3) == '{"n'
    assert drafted("nothing", 20) == '{"name":"'
    matcher.append(tokens_of(vocabulary, '{"name":"bo'))
    assert drafted('b","agX', 20) == 'b","age":'
    assert drafted("b1", 20) == "b"
    matcher.append(tokens_of(vocabulary, '","age":1}'))
    assert drafted("", 20) == drafted("x", 20) == ""
    matcher.append([EOS])
    assert drafted("x", 20) == ""
    assert matcher.failure is None


def test_after_the_end_there_is_only_eos(vocabulary: TokenTable) -> None:
    matcher = compiled(vocabulary, regex="ab*").matcher()
    assert follow(vocabulary, matcher, "ab")
    assert EOS in allowed(vocabulary, matcher)
    for _ in range(3):
        matcher.append([EOS])
        assert allowed(vocabulary, matcher) == [EOS]
    assert matcher.failure is None


def test_where_an_output_must_end_only_eos_is_allowed(vocabulary: TokenTable) -> None:
    matcher = compiled(vocabulary, choice=["ab"]).matcher()
    assert follow(vocabulary, matcher, "ab")
    assert allowed(vocabulary, matcher) == [EOS]


@pytest.mark.parametrize("end", [[], [EOS]])
def test_a_token_that_cannot_follow_fails_its_own_matcher(
    vocabulary: TokenTable, end: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    grammar = compiled(vocabulary, regex="ab?")
    matcher, other = grammar.matcher(), grammar.matcher()
    [wrong] = tokens_of(vocabulary, "x")
    matcher.append([*tokens_of(vocabulary, "a"), *end, wrong])
    assert matcher.failure is None  # it is only noted
    assert allowed(vocabulary, matcher) == [EOS]
    assert matcher.failure == f"structured_outputs: token {wrong} cannot follow"
    assert allowed(vocabulary, matcher) == [EOS]
    assert follow(vocabulary, other, "ab")
    assert other.failure is None
    assert capfd.readouterr() == ("", "")


def test_an_eos_token_that_came_too_early_fails(vocabulary: TokenTable) -> None:
    matcher = compiled(vocabulary, choice=["ab"]).matcher()
    matcher.append([EOS])
    assert allowed(vocabulary, matcher) == [EOS]
    assert matcher.failure == f"structured_outputs: token {EOS} cannot follow"


def test_a_mask_of_all_tokens_need_not_be_applied(vocabulary: TokenTable) -> None:
    matcher = compiled(vocabulary, grammar="start: <[*]>*").matcher()
    words_W = np.empty(vocabulary.num_words, dtype=np.int32)
    assert not matcher.fill(words_W)
    assert compiled(vocabulary, regex="(?s:.*)").matcher().fill(words_W)


def test_masks_that_take_too_long_fail_and_are_told(
    vocabulary: TokenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few slow ones are forgiven; and quick ones pay back."""
    clock_s = [0.0]
    cost_ms = [1.0]

    def thread_time() -> float:
        clock_s[0] += cost_ms[0] / 1000
        return clock_s[0]

    grammar = compiled(vocabulary, regex="a*")
    told: list[str] = []
    grammar.on_too_slow = told.append
    monkeypatch.setattr(token_matcher.time, "thread_time", thread_time)

    def fills_until_failure(cost: float) -> int:
        matcher = grammar.matcher()
        cost_ms[0] = cost
        for count in range(1, 200):
            allowed(vocabulary, matcher)
            if matcher.failure is not None:
                assert told[-1] == matcher.failure
                return count
        return 200

    assert fills_until_failure(1.9) == 200
    assert told == []
    assert fills_until_failure(13.0) == 5
    matcher = grammar.matcher()
    for cost_ms[0] in (*[1.0] * 100, 60.0):  # what quick ones save has a limit
        assert matcher.failure is None
        allowed(vocabulary, matcher)
    assert matcher.failure is not None
    del told[1:]
    assert fills_until_failure(60.0) == 1
    assert "too complex" in told[0]
    assert len(told) == 2
    cost_ms[0] = 13.0
    with pytest.raises(InvalidRequestError, match="too complex"):  # when it is compiled, already
        compiled(vocabulary, regex="b*")


def test_an_eos_that_is_text_too_ends_nothing_before_its_time() -> None:
    """Its text is not written then, so elsewhere other tokens have to do."""
    [one] = tokens_of(demo_vocabulary(), "1")
    vocabulary = load_table(DEMO_MODEL, 1030, [EOS, one])
    matcher = compiled(vocabulary, regex="a[0-9]{2}").matcher()
    assert not {EOS, one} & {*allowed(vocabulary, matcher)}
    assert follow(vocabulary, matcher, "a2")
    assert allowed(vocabulary, matcher) == sorted(
        token for digit in "023456789" for token in tokens_of(vocabulary, digit)
    )
    assert follow(vocabulary, matcher, "3")
    assert allowed(vocabulary, matcher) == sorted([EOS, one])
    with pytest.raises(InvalidRequestError, match="no token of the model"):
        compiled(vocabulary, choice=["1"])


def test_a_text_that_the_tokenizer_normalizes_is_no_matter_of_complexity(tmp_path: Path) -> None:
    tokenizer = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "NFC"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    vocabulary = load_table(tmp_path, 1030, [EOS])
    with pytest.raises(InvalidRequestError, match="normalizes"):
        compiled(vocabulary, choice=["cafe\u0301 noir"])
    compiled(vocabulary, choice=["café noir"])
