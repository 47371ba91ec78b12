"""Incremental detokenization: whole characters only, and the same text as decoding at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanocore.client.detokenizer import IncrementalDetokenizer
from nanocore.client.tokenizer import Tokenizer
from tests.client.byte_tokens import END, ids_of

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)
REPLACEMENT = "\ufffd"
FAMILY = "👨‍👩‍👧"  # three emoji and two zero-width joiners

# Whether a U+FFFD at the end is text or half a character cannot be told, so it is left out here.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT))


def _pieces(
    tokenizer: Tokenizer, output: list[int], prompt: list[int] | None = None, skip: bool = True
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt or [], skip)
    return [detokenizer.append([token_id]) for token_id in output]


@pytest.mark.parametrize("character", ["é", "中", "👍", "\U0010ffff", "߿", "ࠀ"])
def test_a_character_of_many_tokens_comes_out_whole_with_its_last(
    tokenizer: Tokenizer, character: str
) -> None:
    ids = ids_of(tokenizer, character)
    assert _pieces(tokenizer, ids) == [""] * (len(ids) - 1) + [character]


def test_half_a_character_is_held_back_and_the_text_before_it_is_not(tokenizer: Tokenizer) -> None:
    assert _pieces(tokenizer, ids_of(tokenizer, "aé")) == ["a", "", "é"]


def test_a_joined_emoji_comes_out_code_point_by_code_point(tokenizer: Tokenizer) -> None:
    pieces = _pieces(tokenizer, ids_of(tokenizer, FAMILY))
    assert [piece for piece in pieces if piece] == list(FAMILY)


def test_many_tokens_at_once_give_the_same_text(tokenizer: Tokenizer) -> None:
    text = f"a é 中 {FAMILY} z"
    detokenizer = IncrementalDetokenizer(tokenizer, [], True)
    assert detokenizer.append(ids_of(tokenizer, text)) == text
    assert detokenizer.append([]) == ""


@PROPERTY
@given(TEXTS, TEXTS)
def test_the_pieces_of_a_text_make_the_text(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    output = ids_of(tokenizer, text)
    pieces = _pieces(tokenizer, output, ids_of(tokenizer, prompt))
    assert "".join(pieces) == text == tokenizer.decode(output)


@PROPERTY
@given(st.lists(st.sampled_from([*b"aA\x80\xc3\xa9\xe4\xb8\xad\xf0\x9f\x91\x8d\xff"]), max_size=24))
def test_invalid_bytes_never_raise_and_never_split_a_character(
    tokenizer: Tokenizer, data: list[int]
) -> None:
    output = ids_of(tokenizer, bytes(data))
    shown = "".join(_pieces(tokenizer, output))
    decoded = tokenizer.decode(output)
    assert decoded.startswith(shown), "a character shown by halves would differ from the whole"
    assert set(decoded.removeprefix(shown)) <= {REPLACEMENT}, "only what is no text is held back"


def test_a_byte_that_can_never_be_of_a_character_is_replaced_at_once(tokenizer: Tokenizer) -> None:
    pieces = _pieces(tokenizer, ids_of(tokenizer, b"a\xffb\xe4c"))
    assert pieces == ["a", REPLACEMENT, "b", "", f"{REPLACEMENT}c"]


def test_bytes_that_can_never_be_a_character_are_not_held_back_for_ever(
    tokenizer: Tokenizer,
) -> None:
    assert _pieces(tokenizer, ids_of(tokenizer, b"\x80" * 64)) == [REPLACEMENT] * 64


def test_an_incomplete_character_at_the_end_is_dropped(tokenizer: Tokenizer) -> None:
    pieces = _pieces(tokenizer, ids_of(tokenizer, "ok中".encode()[:-1]))
    assert "".join(pieces) == "ok"


def test_special_tokens_are_skipped(tokenizer: Tokenizer) -> None:
    output = [*ids_of(tokenizer, "a"), END, *ids_of(tokenizer, "b")]
    assert _pieces(tokenizer, output) == ["a", "", "b"]


def test_special_tokens_are_kept_on_request(tokenizer: Tokenizer) -> None:
    output = [*ids_of(tokenizer, "a"), END, *ids_of(tokenizer, "b")]
    assert _pieces(tokenizer, output, skip=False) == ["a", "<|end|>", "b"]


def test_the_prompt_is_not_part_of_the_output(tokenizer: Tokenizer) -> None:
    prompt = ids_of(tokenizer, "the prompt, longer than the context that is kept")
    assert _pieces(tokenizer, ids_of(tokenizer, "xy"), prompt) == ["x", "y"]


@pytest.mark.parametrize("tail", [b"\xc3", b"\xff", b"\xe4\xb8", b"\xef\xbf\xbd"])
def test_a_prompt_that_ends_in_half_a_character_is_not_repeated(
    tokenizer: Tokenizer, tail: bytes
) -> None:
    prompt = ids_of(tokenizer, b"secret" + tail)
    text = "".join(_pieces(tokenizer, ids_of(tokenizer, "xyz"), prompt))
    assert text.lstrip(REPLACEMENT) == "xyz"


def test_a_prompt_whose_context_begins_inside_a_character_does_no_harm(
    tokenizer: Tokenizer,
) -> None:
    prompt = ids_of(tokenizer, "中中中")  # the last 8 tokens begin with the second byte of one
    assert _pieces(tokenizer, ids_of(tokenizer, "中"), prompt) == ["", "", "中"]


def test_ids_outside_the_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    assert _pieces(tokenizer, [10**6, *ids_of(tokenizer, "a")], prompt=[10**6]) == ["", "a"]


def test_special_tokens_inside_a_character_do_not_break_it(tokenizer: Tokenizer) -> None:
    first, *rest = ids_of(tokenizer, "中")
    assert _pieces(tokenizer, [first, END, *rest]) == ["", "", "", "中"]
    assert _pieces(tokenizer, [END] * 100 + [first, *rest])[-1] == "中"
