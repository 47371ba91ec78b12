"""Incremental detokenization: whole characters only, and the same text as decoding at once."""

from __future__ import annotations

import pytest

from nanocore.client.detokenizer import IncrementalDetokenizer
from nanocore.client.tokenizer import Tokenizer
from tests.client.byte_tokens import END, ids_of

REPLACEMENT = "\ufffd"

# Whether a U+FFFD at the end is text or half a character cannot be told, so it is left out here.


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


def test_a_byte_that_can_never_be_of_a_character_is_replaced_at_once(tokenizer: Tokenizer) -> None:
    pieces = _pieces(tokenizer, ids_of(tokenizer, b"a\xffb\xe4c"))
    assert pieces == ["a", REPLACEMENT, "b", "", f"{REPLACEMENT}c"]


def test_bytes_that_can_never_be_a_character_are_not_held_back_for_ever(
    tokenizer: Tokenizer,
) -> None:
    assert _pieces(tokenizer, ids_of(tokenizer, b"\x80" * 64)) == [REPLACEMENT] * 64


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


def test_special_tokens_inside_a_character_do_not_break_it(tokenizer: Tokenizer) -> None:
    first, *rest = ids_of(tokenizer, "中")
    assert _pieces(tokenizer, [first, END, *rest]) == ["", "", "", "中"]
    assert _pieces(tokenizer, [END] * 100 + [first, *rest])[-1] == "中"
