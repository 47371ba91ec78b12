"""The tokenizer of a model folder: text to ids and back, and folders that do not have one."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from tokenizers.processors import TemplateProcessing

from nanocore.client.tokenizer import ChatMessage, Tokenizer
from nanocore.protocol.errors import InvalidRequestError
from tests.client.byte_tokens import END, ids_of
from tests.tiny_models import VOCAB_SIZE


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.text())
def test_what_is_encoded_is_decoded(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_encoding_is_by_the_models_own_vocabulary(
    tokenizer: Tokenizer,
) -> None:
    assert tokenizer.encode("aé") == ids_of(tokenizer, "aé")

    ids = [*tokenizer.encode("hi"), END]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hi<|end|>"


def test_a_whole_token_has_a_text_and_a_part_of_a_character_has_bytes(tokenizer: Tokenizer) -> None:
    texts = tokenizer.token_texts(skip_special_tokens=True)
    assert texts.are_exact
    ids = ids_of(tokenizer, "aé")
    assert [texts[token_id] for token_id in [*ids, END, 10**6]] == ["a", b"\xc3", b"\xa9", "", ""]
    assert tokenizer.token_texts(skip_special_tokens=True) is texts
    kept = tokenizer.token_texts(skip_special_tokens=False)
    assert kept[END] == "<|end|>"


def test_tokens_whose_text_depends_on_their_neighbours_have_none(folder: Path) -> None:
    backend = Tokenizer.from_folder(folder).backend
    backend.decoder = decoders.BPEDecoder()
    backend.save(str(folder / "tokenizer.json"))
    assert not Tokenizer.from_folder(folder).token_texts(skip_special_tokens=True).are_exact


def test_a_conversation_gets_no_second_set_of_special_tokens(folder: Path) -> None:
    backend = Tokenizer.from_folder(folder).backend
    backend.post_processor = TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", END)]
    )
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("a") == [END, *ids_of(tokenizer, "a")]
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}]) == ids_of(
        tokenizer, "user: a\nassistant: "
    )


def _with_sections(folder: Path, **sections: Any) -> Tokenizer:
    """The folder's tokenizer with other sections in its tokenizer.json; `model` is merged."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"] |= sections.pop("model", {})
    path.write_text(json.dumps(content | sections))
    return Tokenizer.from_folder(folder)


TRUNCATION = {"direction": "Left", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 16}, "direction": "Right", "pad_to_multiple_of": 8,
    "pad_id": END, "pad_type_id": 0, "pad_token": "<|end|>",
}  # fmt: skip


def test_a_second_bos_is_said_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend = Tokenizer.from_folder(folder).backend
    backend.post_processor = TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", END)]
    )
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(folder)
    tokenizer.encode("a")
    tokenizer.encode("<|end|>a", add_special_tokens=False)
    assert caplog.text == ""
    for _ in range(2):
        assert tokenizer.encode("<|end|>a")[:2] == [END, END]
    assert caplog.text.count("the tokenizer adds another one") == 1


def test_prompts_are_neither_cut_nor_filled_as_the_training_texts_were(folder: Path) -> None:
    tokenizer = _with_sections(folder, truncation=TRUNCATION, padding=PADDING)
    text = "a long prompt, longer than three tokens"
    assert tokenizer.encode(text) == ids_of(tokenizer, text)
    assert tokenizer.encode("a") == ids_of(tokenizer, "a")
    assert tokenizer.encode_chat([{"role": "user", "content": text}]) == ids_of(
        tokenizer, f"user: {text}\nassistant: "
    )


def test_a_text_is_always_the_same_tokens_even_if_they_were_varied_in_training(
    folder: Path,
) -> None:
    merges = {"vocab": {"a": 0, "b": 1, "ab": 2, "abab": 3}, "merges": ["a b", "ab ab"]}
    tokenizer = _with_sections(folder, model={**merges, "dropout": 0.5}, added_tokens=[])
    assert {tuple(tokenizer.encode("abab")) for _ in range(64)} == {(3,)}


@pytest.mark.parametrize("decoder", [None, {"type": "Fuse"}])
def test_a_tokenizer_that_does_not_say_how_to_decode_still_makes_text(
    folder: Path, decoder: object
) -> None:
    tokenizer = _with_sections(folder, decoder=decoder)
    assert tokenizer.decode(tokenizer.encode("ab")) == ("a b" if decoder is None else "ab")


def test_normalizers_and_prefix_spaces_are_the_models_own(folder: Path) -> None:
    normalizer = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}
    pre_tokenizer = {
        "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False,
    }  # fmt: skip
    tokenizer = _with_sections(folder, normalizer=normalizer, pre_tokenizer=pre_tokenizer)
    assert tokenizer.encode("E\u0301") == ids_of(tokenizer, " é")


def test_added_tokens_beyond_the_vocabulary_are_tokens(folder: Path) -> None:
    added = [
        {"id": VOCAB_SIZE + 1000, "content": "<far>", "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False, "special": False},
    ]  # fmt: skip
    tokenizer = _with_sections(folder, added_tokens=added)
    (far,) = tokenizer.encode("<far>")
    assert far >= VOCAB_SIZE - 1
    assert tokenizer.decode([far]) == "<far>"


@pytest.mark.parametrize("token_id", [10**6, 2**32, 2**70, -1])
def test_ids_that_no_token_has_add_no_text(tokenizer: Tokenizer, token_id: int) -> None:
    ids = ids_of(tokenizer, "ab")
    assert tokenizer.decode([ids[0], token_id, ids[1]]) == "ab"


def test_a_very_long_text_is_encoded_and_decoded_whole(tokenizer: Tokenizer) -> None:
    text = "é 中 a\n" * 20_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_that_is_no_unicode_is_an_invalid_request(tokenizer: Tokenizer) -> None:
    text = "a lone surrogate: \ud800"
    with pytest.raises(InvalidRequestError, match="cannot be tokenized"):
        tokenizer.encode(text)
    with pytest.raises(InvalidRequestError, match="cannot be tokenized"):
        tokenizer.encode_chat([{"role": "user", "content": text}])


def test_a_folder_without_a_tokenizer_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="pass token ids instead of text") as caught:
        Tokenizer.from_folder(tmp_path)
    assert f"{tmp_path} has no tokenizer.json" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b"\xff\xfe"])
def test_a_damaged_tokenizer_is_refused_by_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(InvalidRequestError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_a_file_that_cannot_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(InvalidRequestError, match=r"tokenizer\.json: Permission denied"):
        Tokenizer.from_folder(folder)


def test_contents_make_the_same_tokenizer_as_the_folder_they_are_from(folder: Path) -> None:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    tokenizer, expected = Tokenizer(files, "here"), Tokenizer.from_folder(folder)
    messages = [ChatMessage(role="user", content="é")]
    assert tokenizer.encode_chat(messages) == expected.encode_chat(messages)
    with pytest.raises(InvalidRequestError, match=r"here has no tokenizer\.json"):
        Tokenizer({}, "here")


def test_a_byte_order_mark_before_a_json_file_is_skipped(folder: Path) -> None:
    plain = Tokenizer.from_folder(folder)
    for path in folder.glob("*.json"):
        path.write_bytes(BOM_UTF8 + path.read_bytes())
    marked = Tokenizer.from_folder(folder)
    assert (folder / "tokenizer.json").read_bytes().startswith(BOM_UTF8)
    assert marked.encode("aé") == plain.encode("aé")
    assert marked.config == plain.config


def test_a_folder_without_a_config_has_text_but_no_chat(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("a") == ids_of(tokenizer, "a")
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"null"])
def test_a_damaged_config_is_refused_by_file(folder: Path, content: bytes) -> None:
    (folder / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(InvalidRequestError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(folder).render_chat([{"role": "user", "content": "hi"}])
