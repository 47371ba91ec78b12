"""The vocabulary of a model folder: padded, cut, with several EOS tokens, or none and why."""

from __future__ import annotations

import sys
from codecs import BOM_UTF8
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from nanocore.protocol.errors import InvalidRequestError
from tests.engine_core.grammars.walks import (
    BYTE_LEVEL_EOS,
    BYTE_LEVEL_TOKENS,
    allowed,
    byte_fallback_vocabulary,
    byte_level_vocabulary,
    compiled,
    load_table,
)


@pytest.mark.parametrize(
    "vocab_size", [BYTE_LEVEL_TOKENS, BYTE_LEVEL_TOKENS + 1, BYTE_LEVEL_TOKENS + 500]
)
def test_tokens_that_pad_the_model_are_in_no_mask(tmp_path: Path, vocab_size: int) -> None:
    byte_level_vocabulary(tmp_path)
    vocabulary = load_table(tmp_path, vocab_size, [BYTE_LEVEL_EOS])
    assert vocabulary.num_words == -(-vocab_size // 32)
    matcher = compiled(vocabulary, grammar="start: <[*]>*").matcher()
    for _ in range(3):
        tokens = allowed(vocabulary, matcher)
        assert max(tokens) < BYTE_LEVEL_TOKENS
        matcher.append([65])


def test_masks_are_cut_to_the_models_vocabulary(tmp_path: Path) -> None:
    byte_level_vocabulary(tmp_path)
    vocabulary = load_table(tmp_path, 100, [7])
    assert vocabulary.num_words == 4
    assert max(allowed(vocabulary, compiled(vocabulary, regex="(?s:.)+").matcher())) < 100
    with pytest.raises(InvalidRequestError, match="no token of the model"):
        compiled(vocabulary, grammar="start: <[150-200]>")


def test_every_eos_token_of_the_model_ends_an_output(tmp_path: Path) -> None:
    vocabulary = byte_fallback_vocabulary(tmp_path)
    matcher = compiled(vocabulary, regex="a").matcher()
    matcher.append(vocabulary.tokenizer.tokenize_str("a"))
    assert allowed(vocabulary, matcher) == [2, 3]


def test_an_eos_token_that_the_tokenizer_does_not_know_is_left_out(tmp_path: Path) -> None:
    byte_level_vocabulary(tmp_path)
    vocabulary = load_table(
        tmp_path, BYTE_LEVEL_TOKENS + 9, [BYTE_LEVEL_EOS, BYTE_LEVEL_TOKENS + 3]
    )
    assert vocabulary.eos_token_ids == {BYTE_LEVEL_EOS}
    with pytest.raises(InvalidRequestError, match="out of range"):
        load_table(tmp_path, BYTE_LEVEL_TOKENS + 9, [BYTE_LEVEL_TOKENS + 3])


def test_a_folder_without_a_vocabulary_says_why(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"has no tokenizer\.json"):
        load_table(tmp_path, 100, [1])
    byte_level_vocabulary(tmp_path)
    for eos in ([], [BYTE_LEVEL_TOKENS + 1]):
        with pytest.raises(InvalidRequestError, match="has no EOS token"):
            load_table(tmp_path, BYTE_LEVEL_TOKENS, eos)


def test_a_tokenizer_is_refused_whose_tokens_have_no_bytes(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(path))
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="llguidance cannot read") as caught:
            load_table(tmp_path, 2, [1])
        assert len(str(caught.value)) < 800
        path.write_text("{")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('no library')", r"cannot import .*RuntimeError: no library"),
        ("def (", r"cannot import .*SyntaxError"),
        ("raise SystemExit(3)", r"cannot import .*SystemExit: 3"),
        ("", r"release of llguidance without LLMatcher, LLParserLimits, LLTokenizer"),
    ],
)
def test_a_package_that_is_damaged_or_of_another_release_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    byte_level_vocabulary(tmp_path)
    (tmp_path / "llguidance.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "llguidance"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(InvalidRequestError, match=rf"{reason}.*pip install 'llguidance>=1.9,<2'"):
        load_table(tmp_path, BYTE_LEVEL_TOKENS, [BYTE_LEVEL_EOS])
    monkeypatch.delitem(sys.modules, "llguidance", raising=False)


def test_a_byte_order_mark_before_the_tokenizer_is_skipped_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    byte_level_vocabulary(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(BOM_UTF8 + b"\n" + path.read_bytes())
    vocabulary = load_table(tmp_path, BYTE_LEVEL_TOKENS, [BYTE_LEVEL_EOS])
    assert vocabulary.eos_token_ids == {BYTE_LEVEL_EOS}
    assert f"{path} begins with a byte order mark, which is skipped" in caplog.text


def test_a_tokenizer_that_is_the_path_of_another_is_not_followed(tmp_path: Path) -> None:
    byte_level_vocabulary(tmp_path)
    other = (tmp_path / "tokenizer.json").rename(tmp_path / "other.json")
    (tmp_path / "tokenizer.json").write_text(str(other))
    with pytest.raises(InvalidRequestError, match="it is not a JSON object"):
        load_table(tmp_path, BYTE_LEVEL_TOKENS, [BYTE_LEVEL_EOS])
