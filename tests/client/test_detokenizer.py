"""Incremental detokenization of the byte tokenizer: whole characters only, and its cost."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from nanocore.client.detokenizer import (
    MAX_CHARACTER_BYTES,
    MAX_CONTEXT_TOKENS,
    MAX_HELD_TOKENS,
    MAX_WINDOW_TOKENS,
    IncrementalDetokenizer,
)
from nanocore.client.tokenizer import Tokenizer
from tests.client.byte_tokens import END, ids_of
from tests.client.tokenizer_kinds import KINDS, make

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


def test_bytes_that_can_never_be_a_character_are_replaced_at_once(tokenizer: Tokenizer) -> None:
    pieces = _pieces(tokenizer, ids_of(tokenizer, b"a\xffb\xe4c"))
    assert pieces == ["a", REPLACEMENT, "b", "", f"{REPLACEMENT}c"]

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


WINDOWS = {"suffix", "ctc", "byte-level-and-more"}
NUM_TOKENS = 4000
SLICE_TOKENS = 100  # of windows


class _Counting:
    """The library's tokenizer, whose decodes are counted."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.num_tokens: list[int] = []
        """Of each decode."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        self.num_tokens.append(len(token_ids))
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _output(tokenizer: Tokenizer, num_tokens: int) -> list[int]:
    """Any tokens but for what is all half characters, of which some are held."""
    numbers = random.Random(5)
    num_ids = tokenizer.backend.get_vocab_size()
    ids = [numbers.randrange(num_ids) for _ in range(num_tokens)]
    whole = tokenizer.backend.token_to_id("b")
    return [token_id if i % 4 else whole for i, token_id in enumerate(ids)]


def test_a_token_costs_no_more_at_the_end_of_a_long_output_than_at_its_beginning(
    kind: str, tmp_path: Path
) -> None:
    tokenizer = make(kind, tmp_path)
    output = _output(tokenizer, NUM_TOKENS)
    num_distinct = len({*output})
    tokenizer.backend = counting = _Counting(tokenizer.backend)
    detokenizer = IncrementalDetokenizer(tokenizer, [], True)
    for token_id in output:
        detokenizer.append([token_id])
    if kind in WINDOWS:
        assert len(counting.num_tokens) < 1.5 * NUM_TOKENS
        assert max(counting.num_tokens) <= MAX_WINDOW_TOKENS + MAX_HELD_TOKENS
    else:
        assert len(counting.num_tokens) <= 2 * num_distinct + 8, "each is decoded once"
        assert max(counting.num_tokens) <= 2


def test_a_long_prompt_is_not_decoded(kind: str, tmp_path: Path) -> None:
    tokenizer = make(kind, tmp_path)
    prompt = _output(tokenizer, NUM_TOKENS)
    IncrementalDetokenizer(tokenizer, [], True)  # the first one looks at the vocabulary
    tokenizer.backend = counting = _Counting(tokenizer.backend)
    IncrementalDetokenizer(tokenizer, prompt, True).append(prompt[:1])
    assert sum(counting.num_tokens) <= 8 * MAX_CONTEXT_TOKENS


def test_bytes_that_are_no_text_cost_as_much_as_others(tmp_path: Path) -> None:
    tokenizer = make("byte-level-and-more", tmp_path)
    output = [tokenizer.backend.token_to_id("ÿ")] * NUM_TOKENS
    tokenizer.backend = counting = _Counting(tokenizer.backend)
    IncrementalDetokenizer(tokenizer, [], True).append(output)
    assert len(counting.num_tokens) < 1.5 * NUM_TOKENS
    most = MAX_WINDOW_TOKENS + MAX_HELD_TOKENS + MAX_CONTEXT_TOKENS + MAX_CHARACTER_BYTES
    assert max(counting.num_tokens) <= most


def test_how_many_tokens_may_be_detokenized_at_once_follows_from_what_one_costs(
    kind: str, tmp_path: Path
) -> None:
    """Windows decode for each token, the others once for each that is new."""
    tokenizer = make(kind, tmp_path)
    tokens_per_slice = IncrementalDetokenizer(tokenizer, [], True).tokens_per_slice
    assert tokens_per_slice == (SLICE_TOKENS if kind in WINDOWS else 2 * SLICE_TOKENS)
