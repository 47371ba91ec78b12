"""Texts in all scripts, tokenized as models do: piece by piece the same as decoded at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanocore.client.detokenizer import IncrementalDetokenizer
from nanocore.client.tokenizer import Tokenizer
from tests.client.tokenizer_kinds import expected_text
from tests.client.trained_tokenizers import CORPUS, SPECIAL, TRAINED, trained

PROPERTY = settings(max_examples=25, deadline=None, derandomize=True)
REPLACEMENT = "\ufffd"
PARTS = [
    *CORPUS,
    "a", " ", "  ", "\n", "don't", "!", ".", " ,", "<s>", " added ", "文字",
    "中", "é", "e\u0301", "\u0301", "한", "\u1100\u1161", "שלום", "\u202e",
    "👍", "👍🏿", "👩‍💻", "👨‍👩‍👧‍👦", "\u200d", "🇩🇪", "🇩", "❤️", "\ufe0f", "🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    REPLACEMENT, "\U0010ffff", "\x00", "▁", "##", "|",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=8).map("".join)


def _cut(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    """The same tokens in calls of any lengths, some of them empty."""
    edges = data.draw(st.lists(st.integers(0, len(ids)), max_size=6).map(sorted))
    starts, ends = [0, *edges], [*edges, len(ids)]
    return [ids[start:end] for start, end in zip(starts, ends, strict=True)]


def _spoiled(data: st.DataObject, tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """With tokens missing, twice, or put in between: special ones, and some that do not exist."""
    others = [tokenizer.backend.token_to_id(token) for token in SPECIAL]
    others += [tokenizer.backend.get_vocab_size() + 7]
    spoiled: list[int] = []
    for token_id in ids:
        change = data.draw(st.sampled_from(["", "", "", "", "missing", "twice", "another"]))
        spoiled += [] if change == "missing" else [token_id]
        spoiled += [token_id] if change == "twice" else []
        spoiled += [data.draw(st.sampled_from(others))] if change == "another" else []
    return spoiled


@pytest.mark.parametrize("kind", TRAINED)
@PROPERTY
@given(data=st.data(), prompt_text=TEXTS, text=TEXTS, skip=st.booleans(), spoil=st.booleans())
def test_however_a_text_is_cut_its_pieces_make_what_decoding_at_once_makes(
    kind: str, data: st.DataObject, prompt_text: str, text: str, skip: bool, spoil: bool
) -> None:
    tokenizer = trained(kind)
    ids = tokenizer.encode(text)
    prompt = tokenizer.encode(prompt_text) if data.draw(st.booleans()) else []
    if spoil:
        ids = _spoiled(data, tokenizer, ids)
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    shown = "".join(map(detokenizer.append, _cut(data, ids))) + detokenizer.flush()
    whole = expected_text(kind, tokenizer, prompt, ids, skip)
    assert shown in (whole, whole.removesuffix(REPLACEMENT))
    if kind.startswith("byte-level") and not spoil and not skip:
        assert whole == text


@pytest.mark.parametrize("kind", TRAINED)
def test_every_character_comes_out_by_the_token_that_completes_it(kind: str) -> None:
    tokenizer = trained(kind)
    for text in CORPUS:
        ids = tokenizer.encode(text)
        detokenizer = IncrementalDetokenizer(tokenizer, [], False)
        shown = ""
        for end, token_id in enumerate(ids, start=1):
            shown += detokenizer.append([token_id])
            whole = expected_text(kind, tokenizer, [], ids[:end], False)
            assert shown in (whole, whole.rstrip(REPLACEMENT))
