"""What one token says, as logprobs carry it: a text, and the bytes that it adds to one."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanocore.client.token_texts import TokenText
from nanocore.client.tokenizer import Tokenizer
from tests.client.tokenizer_kinds import KINDS, make
from tests.client.trained_tokenizers import CORPUS, TRAINED, trained

REPLACEMENT = "\ufffd"
SINGLE = ["byte-level", "llama-2", "gemma", "metaspace", "metaspace-bytes", "word-piece"]


def _text(tokenizer: Tokenizer, token: str) -> TokenText:
    return tokenizer.token_text(tokenizer.backend.token_to_id(token))


def _both(text: str) -> TokenText:
    return TokenText(text, text.encode())


@pytest.fixture(params=KINDS)
def any_tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return make(request.param, tmp_path)


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("Ġ", _both(" ")),
        ("Ġa", _both(" a")),
        ("b", _both("b")),
        ("Ã©", _both("é")),
        ("Ã", TokenText(REPLACEMENT, b"\xc3")),
        ("\u00e4\u00b8", TokenText(REPLACEMENT, b"\xe4\xb8")),
        ("abä", TokenText(f"ab{REPLACEMENT}", b"ab\xe4")),
        ("ÿ", TokenText(REPLACEMENT, b"\xff")),
        ("中文", _both("中文")),
        (" added ", _both(" added ")),
        ("<|end|>", _both("<|end|>")),
        ("<s é>", _both("<s é>")),
    ],
)
def test_tokens_of_bytes_say_their_bytes(tmp_path: Path, token: str, expected: TokenText) -> None:
    assert _text(make("byte-level", tmp_path), token) == expected


@pytest.mark.parametrize("kind", ["llama-2", "gemma", "metaspace-bytes"])
@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("▁the", _both(" the")),
        ("▁", _both(" ")),
        ("b", _both("b")),
        ("中", _both("中")),
        ("<0x41>", _both("A")),
        ("<0x20>", _both(" ")),
        ("<0xE2>", TokenText(REPLACEMENT, b"\xe2")),
        ("\ufffd", _both(REPLACEMENT)),
        (" added ", _both(" added ")),
        ("</s>", _both("</s>")),
        ("<unk>", _both("<unk>")),
    ],
)
def test_tokens_of_words_keep_their_space_and_byte_tokens_say_their_byte(
    tmp_path: Path, kind: str, token: str, expected: TokenText
) -> None:
    assert _text(make(kind, tmp_path), token) == expected


@pytest.mark.parametrize(
    ("token", "expected"),
    [("b", " b"), ("##d", "d"), (".", "."), ("中", " 中"), ("</s>", "</s>"), ("é", " é")],
)
def test_word_pieces_say_the_space_that_they_put_before_them(
    tmp_path: Path, token: str, expected: str
) -> None:
    assert _text(make("word-piece", tmp_path), token) == _both(expected)


@pytest.mark.parametrize(("token", "expected"), [("b", " b"), ("</s>", "</s>"), ("▁a", " ▁a")])
def test_tokens_that_nothing_joins_say_the_space_between_them(
    tmp_path: Path, token: str, expected: str
) -> None:
    assert _text(make("none", tmp_path), token) == _both(expected)


@pytest.mark.parametrize(
    ("kind", "token", "expected"),
    [
        ("suffix", "c</w>", _both("c")),
        ("ctc", "b", _both("b")),
        ("ctc", "|", _both(" ")),
        ("ctc", "<pad>", _both("<pad>")),
        ("byte-level-and-more", "!", _both("?")),
        ("byte-level-and-more", "Ġa", _both(" a")),
        ("byte-level-and-more", "\u00e4\u00b8", TokenText(REPLACEMENT, b"\xe4\xb8")),
    ],
)
def test_tokens_without_a_text_of_their_own_say_what_they_add_to_another(
    tmp_path: Path, kind: str, token: str, expected: TokenText
) -> None:
    tokenizer = make(kind, tmp_path)
    assert not tokenizer.token_texts(skip_special_tokens=False).are_exact
    assert _text(tokenizer, token) == expected


def test_the_same_token_again_is_not_a_space_only_because_it_is_said_twice(tmp_path: Path) -> None:
    """Decoders of speech drop repetitions, and the token may be the one that others are put to."""
    tokenizer = make("ctc", tmp_path)
    for token in "ab":
        assert _text(tokenizer, token) == _both(token)


@pytest.mark.parametrize("token_id", [10**6, 2**31 - 1, 2**70, -1])
def test_an_id_of_no_token_says_nothing(any_tokenizer: Tokenizer, token_id: int) -> None:
    assert any_tokenizer.token_text(token_id) == TokenText("", b"")


def test_every_token_of_every_kind_has_a_text_that_shows_its_bytes(
    any_tokenizer: Tokenizer,
) -> None:
    for token_id in range(any_tokenizer.backend.get_vocab_size() + 3):
        text = any_tokenizer.token_text(token_id)
        assert text.text == text.bytes.decode("utf-8", "replace")
        assert any_tokenizer.token_text(token_id) is text, "it is made once"


@pytest.mark.parametrize("kind", [kind for kind in TRAINED if kind.startswith("byte-")])
def test_the_bytes_of_all_tokens_of_a_text_are_the_text(kind: str) -> None:
    """Whatever the script, and however its characters are cut: this is what clients join."""
    tokenizer = trained(kind)
    for text in CORPUS:
        ids = tokenizer.encode(f"<s>{text}")
        data = b"".join(tokenizer.token_text(token_id).bytes for token_id in ids)
        assert data.decode().removeprefix(" ") == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("kind", SINGLE)
def test_the_bytes_of_tokens_joined_are_the_text_that_they_make(tmp_path: Path, kind: str) -> None:
    tokenizer = make(kind, tmp_path)
    words = ["b", "▁a", "é", "中", "b", "▁the"] if kind != "byte-level" else ["b", "Ġa", "Ã©", "b"]
    ids = [tokenizer.backend.token_to_id(word) for word in words]
    joined = b"".join(tokenizer.token_text(token_id).bytes for token_id in ids)
    assert joined.decode().lstrip() == tokenizer.decode(ids)
