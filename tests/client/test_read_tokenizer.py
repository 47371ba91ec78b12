"""`read_tokenizer` makes of a tokenizer.json what the library makes of it, only sooner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from nanocore.client import tokenizer_files as module
from nanocore.client.tokenizer_files import read_tokenizer
from tests.client.trained_tokenizers import CORPUS, TRAINED

DEMO = Path("demo_model/nanocore_demo_model/tokenizer.json").resolve()


def content(**changes: Any) -> bytes:
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": False, "vocab": {"a": 0, "b": 1, "ab": 2, "<s>": 3},
        "merges": [["a", "b"]],
    }  # fmt: skip
    added = [
        {
            "id": 3, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": True,
            "normalized": False, "special": True,
        }
    ]  # fmt: skip
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None,
        "model": model,
    }  # fmt: skip
    for key, value in changes.items():
        place: Any = whole
        *path, last = key.split("__")
        for name in path:
            place = place[int(name) if name.isdecimal() else name]
        place[last] = value
    return json.dumps(whole).encode()


def quickly(data: bytes, monkeypatch: pytest.MonkeyPatch) -> tokenizers.Tokenizer:
    """Read it without the library's parser for a vocabulary."""
    parse = tokenizers.Tokenizer.from_buffer

    def small(parsed: bytes) -> tokenizers.Tokenizer:
        assert not json.loads(parsed)["model"]["vocab"], "the library has parsed a vocabulary"
        return parse(parsed)

    class Spied:
        from_buffer = staticmethod(small)

    monkeypatch.setattr(module.tokenizers, "Tokenizer", Spied)
    return read_tokenizer(data)


def slowly(data: bytes) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_buffer(data)


@pytest.mark.parametrize("name", TRAINED)
def test_every_kind_of_tokenizer_is_what_the_library_makes_of_it(name: str) -> None:
    data = TRAINED[name]().to_str().encode()
    ours, theirs = read_tokenizer(data), slowly(data)
    assert ours.to_str() == theirs.to_str()
    for line in CORPUS:
        assert ours.encode(line).ids == theirs.encode(line).ids


def test_a_vocabulary_of_pairs_is_not_parsed_by_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = slowly(DEMO.read_bytes()).to_str()
    assert quickly(DEMO.read_bytes(), monkeypatch).to_str() == expected


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model__merges": ["a b"]},
        {"model__dropout": 0.5},
        {"model__unk_token": "a", "model__fuse_unk": True, "model__byte_fallback": True},
        {
            "model__continuing_subword_prefix": "##",
            "model__vocab": {"a": 0, "##b": 1, "ab": 2, "<s>": 3},
            "model__merges": [["a", "##b"]],
        },
        {"model__end_of_word_suffix": "</w>", "model__ignore_merges": True},
        {
            "truncation": {
                "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0
            }
        },
        {"normalizer": {"type": "Lowercase"}},
    ],
)  # fmt: skip
def test_each_setting_is_kept(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    data = content(**changes)
    theirs = slowly(data)
    assert quickly(data, monkeypatch).to_str() == theirs.to_str()


@pytest.mark.parametrize(
    "changes",
    [
        {"added_tokens__0__id": 9},
        {"added_tokens__0__content": "<new>", "added_tokens__0__id": 7},
        {"model__type": "WordLevel", "model__unk_token": "a"},
        {"model__later": 1},
    ],
)
def test_what_is_not_understood_is_left_to_the_library(changes: dict[str, Any]) -> None:
    data = content(**changes)
    try:
        expected = slowly(data).to_str()
    except Exception as error:
        with pytest.raises(type(error), match=str(error)[:20]):
            read_tokenizer(data)
    else:
        assert read_tokenizer(data).to_str() == expected


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"{", b"\xff", content(model__merges=[["a", "c"]]),
        content(model__merges=["a b c"]),
    ],
)  # fmt: skip
def test_damage_is_the_librarys_error(data: bytes) -> None:
    with pytest.raises(Exception, match=r".") as theirs:
        slowly(data)
    with pytest.raises(Exception, match=r".") as ours:
        read_tokenizer(data)
    assert str(ours.value) == str(theirs.value) or "Token `c`" in str(ours.value)
