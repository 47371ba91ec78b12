"""Models without a tokenizer.json: transformers makes one of their vocabulary, and runs nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import transformers

from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import InvalidRequestError
from tests.client.vocabulary_folders import (
    TEXTS,
    write_byte_level,
    write_config,
    write_sentence_pieces,
    write_word_pieces,
)

needs_sentencepiece = pytest.mark.skipif(
    find_spec("sentencepiece") is None or find_spec("google.protobuf") is None,
    reason="needs sentencepiece and protobuf",
)
FOLDERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "gpt-2": ("GPT2Tokenizer", lambda folder: write_byte_level(folder, "GPT2Tokenizer")),
    "qwen": ("Qwen2Tokenizer", lambda folder: write_byte_level(folder, "Qwen2TokenizerFast")),
    "bert": ("BertTokenizer", write_word_pieces),
    "llama": (
        "LlamaTokenizer", lambda folder: write_sentence_pieces(folder, "LlamaTokenizerFast")
    ),
    "gemma": ("GemmaTokenizer", lambda folder: write_sentence_pieces(folder, "GemmaTokenizer")),
    "any": ("TokenizersBackend", lambda folder: write_sentence_pieces(folder, "TokenizersBackend")),
    "of-old": (
        "TokenizersBackend", lambda folder: write_sentence_pieces(folder, "PreTrainedTokenizerFast")
    ),
}  # fmt: skip
IN_SENTENCE_PIECES = {"llama", "gemma", "any", "of-old"}
KINDS = [
    pytest.param(name, marks=needs_sentencepiece if name in IN_SENTENCE_PIECES else ())
    for name in FOLDERS
]


def _both(folder: Path, class_name: str) -> tuple[Tokenizer, Any]:
    reference = getattr(transformers, class_name).from_pretrained(folder, local_files_only=True)
    return Tokenizer.from_folder(folder), reference


def _are_equal(tokenizer: Tokenizer, reference: Any) -> None:
    for text in TEXTS:
        for special in (True, False):
            ids = reference.encode(text, add_special_tokens=special)
            assert tokenizer.encode(text, special) == ids
            for skip in (True, False):
                decoded = reference.decode(
                    ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )
                assert tokenizer.decode(ids, skip) == decoded


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("added", [None, "added_tokens.json", "tokenizer_config.json"])
def test_ids_and_texts_are_those_of_transformers(
    tmp_path: Path, kind: str, added: str | None
) -> None:
    class_name, write = FOLDERS[kind]
    write(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    plain = Tokenizer.from_folder(tmp_path)
    next_id = plain.backend.get_vocab_size()
    if added == "added_tokens.json":
        (tmp_path / added).write_text(json.dumps({"<added>": next_id}))
    elif added is not None:
        config["added_tokens_decoder"] = {next_id: {"content": "<added>", "special": True}}
        path.write_text(json.dumps(config))
    tokenizer, reference = _both(tmp_path, class_name)
    _are_equal(tokenizer, reference)
    assert (next_id in tokenizer.encode("a<added>")) is (added is not None)


@pytest.mark.parametrize(("kind", "settings"), [
    ("bert", {"do_lower_case": False}),
    ("bert", {"strip_accents": False}),
    ("bert", {"tokenize_chinese_chars": False}),
    ("gpt-2", {"add_prefix_space": True}),
    ("gpt-2", {"additional_special_tokens": ["the cat"]}),
    ("qwen", {"image_token": "the"}),
    pytest.param("llama", {"add_bos_token": True}, marks=needs_sentencepiece),
    pytest.param("llama", {"add_eos_token": True}, marks=needs_sentencepiece),
    pytest.param("llama", {"add_prefix_space": False}, marks=needs_sentencepiece),
    pytest.param("llama", {"legacy": True}, marks=needs_sentencepiece),
])  # fmt: skip
def test_settings_of_the_model_count(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    class_name, write = FOLDERS[kind]
    write(tmp_path)
    plain = Tokenizer.from_folder(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    tokenizer, reference = _both(tmp_path, class_name)
    _are_equal(tokenizer, reference)
    assert any(tokenizer.encode(text) != plain.encode(text) for text in TEXTS)


def test_the_older_file_of_special_tokens_counts(tmp_path: Path) -> None:
    write_byte_level(tmp_path, "GPT2Tokenizer")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "the"}))
    _are_equal(*_both(tmp_path, "GPT2Tokenizer"))


def test_conversations_are_rendered_by_the_models_template(tmp_path: Path) -> None:
    write_byte_level(tmp_path, "Qwen2Tokenizer")
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    tokenizer, reference = _both(tmp_path, "Qwen2Tokenizer")
    messages: Any = [{"role": "user", "content": "the cat"}]
    assert tokenizer.encode_chat(messages) == reference.apply_chat_template(messages).input_ids


def test_a_tokenizer_json_needs_no_transformers(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_byte_level(tmp_path, "GPT2Tokenizer")
    for path in tokenizer_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setitem(sys.modules, "transformers", None)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"


def test_without_transformers_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_byte_level(tmp_path, "GPT2Tokenizer")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InvalidRequestError) as caught:
        Tokenizer.from_folder(tmp_path)
    for part in ("vocab.json and merges.txt", "pip install transformers,", "tokenizer=FOLDER",
                 "detokenize=False"):  # fmt: skip
        assert part in str(caught.value)


@pytest.mark.parametrize("missing", ["sentencepiece", "google.protobuf"])
def test_without_what_reads_sentence_pieces_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e")
    write_config(tmp_path, tokenizer_class="LlamaTokenizer")
    monkeypatch.setitem(sys.modules, missing, None)
    package = "sentencepiece" if missing == "sentencepiece" else "protobuf"
    with pytest.raises(InvalidRequestError, match=rf"pip install [\w ]*{package}"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", [
    None, 5, "", "MyOwnTokenizer", "AutoTokenizer", "ByT5Tokenizer", "BertModel", "__path__",
    "models.bert.BertTokenizer", "PythonBackend",
])  # fmt: skip
def test_a_class_that_transformers_does_not_have_is_refused_by_name(
    tmp_path: Path, name: object
) -> None:
    write_byte_level(tmp_path, "GPT2Tokenizer")
    write_config(tmp_path, tokenizer_class=name)
    with pytest.raises(InvalidRequestError, match="cannot be made") as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(name) in str(caught.value)
    assert "tokenizer=FOLDER" in str(caught.value)


@pytest.mark.parametrize(("file", "content"), [
    ("vocab.json", b"{"), ("vocab.json", b"[]"), ("vocab.json", b"\xff"),
    ("merges.txt", b"#version\nno such\n"), ("merges.txt", b"\xff\xfe"),
    ("tokenizer_config.json", b'{"tokenizer_class": "GPT2Tokenizer", "eos_token": {"x": 1}}'),
    ("added_tokens.json", b"{"), ("added_tokens.json", b'{"a": "b"}'), ("added_tokens.json", b"[]"),
])  # fmt: skip
def test_damaged_files_are_an_invalid_request(tmp_path: Path, file: str, content: bytes) -> None:
    write_byte_level(tmp_path, "GPT2Tokenizer")
    (tmp_path / file).write_bytes(content)
    with pytest.raises(InvalidRequestError, match=str(tmp_path)):
        Tokenizer.from_folder(tmp_path)


@needs_sentencepiece
def test_a_damaged_model_of_sentence_pieces_is_refused_by_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e")
    write_config(tmp_path, tokenizer_class="LlamaTokenizer")
    with pytest.raises(InvalidRequestError, match="cannot be made") as caught:
        Tokenizer.from_folder(tmp_path)
    assert "tiktoken" not in str(caught.value), "transformers would ask for it"


def test_a_vocabulary_alone_is_not_enough(tmp_path: Path) -> None:
    write_byte_level(tmp_path, "GPT2Tokenizer")
    (tmp_path / "vocab.json").unlink()
    with pytest.raises(InvalidRequestError, match="cannot be made"):
        Tokenizer.from_folder(tmp_path)


def test_no_file_of_a_model_names_code_to_run_or_another_file_to_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_byte_level(tmp_path, "GPT2Tokenizer")
    expected = Tokenizer.from_folder(tmp_path).backend.to_str()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "vocab.json").write_text('{"a": 0}')
    (elsewhere / "tokenizer.json").write_text("{}")
    paths = {
        "vocab_file": str(elsewhere / "vocab.json"),
        "tokenizer_file": str(elsewhere / "tokenizer.json"),
        "fast_tokenizer_files": ["../elsewhere/tokenizer.json"],
        "name_or_path": str(elsewhere),
        "init_inputs": [str(elsewhere / "vocab.json")],
    }
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    path = tmp_path / "tokenizer_config.json"
    own = {"auto_map": {"AutoTokenizer": ["own.GPT2Tokenizer", "own.GPT2TokenizerFast"]}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **own, **paths}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(paths))
    monkeypatch.setattr(sys, "stdin", None)  # nobody is asked
    assert Tokenizer.from_folder(tmp_path).backend.to_str() == expected
    assert not (tmp_path / "ran").exists()
    assert capfd.readouterr().out == ""
