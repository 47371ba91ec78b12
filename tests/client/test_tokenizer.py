"""The tokenizer of a model folder: text to ids and back, and folders that do not have one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from tokenizers.processors import TemplateProcessing

from nanocore.client.tokenizer import ChatMessage, Tokenizer
from nanocore.protocol.errors import InvalidRequestError
from tests.client.byte_tokens import END, ids_of


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.text())
def test_what_is_encoded_is_decoded(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_encoding_is_by_the_models_own_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("aé") == ids_of(tokenizer, "aé")


def test_special_tokens_are_left_out_of_the_text_unless_wanted(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("hi"), END]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hi<|end|>"


def test_a_whole_token_has_a_text_and_a_part_of_a_character_has_bytes(tokenizer: Tokenizer) -> None:
    texts = tokenizer.token_texts(skip_special_tokens=True)
    assert texts is not None
    ids = ids_of(tokenizer, "aé")
    assert [texts[token_id] for token_id in [*ids, END, 10**6]] == ["a", b"\xc3", b"\xa9", "", ""]
    assert tokenizer.token_texts(skip_special_tokens=True) is texts
    kept = tokenizer.token_texts(skip_special_tokens=False)
    assert kept is not None
    assert kept[END] == "<|end|>"


def test_tokens_whose_text_depends_on_their_neighbours_have_none(folder: Path) -> None:
    backend = Tokenizer.from_folder(folder).backend
    backend.decoder = decoders.BPEDecoder()
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer.from_folder(folder).token_texts(skip_special_tokens=True) is None


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


def test_text_that_is_no_unicode_is_an_invalid_request(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError):
        tokenizer.encode("a lone surrogate: \ud800")


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
