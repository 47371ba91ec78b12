"""Special tokens that only the configuration names: as transformers reads them, from two files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import InvalidRequestError
from tests.tiny_models import write_byte_tokenizer

NAMES = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"]
TEMPLATE = "".join(
    f"{name}={{{{ {name} }}}}{{{{ {name} is defined }}}} "
    for name in [*NAMES, "image_token", "eoi"]
)
TEXT = "a<filler260>b<filler261><|end|>c<filler262>d<added>"


def _write(folder: Path, config: dict[str, Any], older: dict[str, Any] | None = None) -> Path:
    write_byte_tokenizer(folder)
    config = {"chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    if older is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(older))
    return folder


def _rendered(folder: Path) -> str:
    return Tokenizer.from_folder(folder).render_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("token", ["<filler260>", {"content": "<filler260>", "lstrip": False}])
def test_the_older_file_names_what_the_configuration_lacks(tmp_path: Path, token: object) -> None:
    rendered = _rendered(_write(tmp_path, {"eos_token": "<|end|>"}, {"bos_token": token}))
    assert "bos_token=<filler260>True eos_token=<|end|>True unk_token=False" in rendered


def test_of_both_files_the_older_one_wins_unless_the_newer_lists_all_tokens(tmp_path: Path) -> None:
    config: dict[str, Any] = {"bos_token": "<filler260>"}
    older = {"bos_token": "<filler261>", "pad_token": "<|end|>"}
    assert "bos_token=<filler261>" in _rendered(_write(tmp_path, config, older))
    config["added_tokens_decoder"] = {}
    rendered = _rendered(_write(tmp_path, config, older))
    assert "bos_token=<filler260>" in rendered
    assert "pad_token=False" in rendered


def test_a_model_may_name_tokens_of_its_own(tmp_path: Path) -> None:
    extra = {"extra_special_tokens": {"eoi": "<filler261>"}, "image_token": "<filler260>"}
    assert "image_token=<filler260>True eoi=<filler261>True" in _rendered(_write(tmp_path, extra))


def test_a_token_that_only_the_configuration_calls_special_is_one_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(_write(tmp_path, {"eos_token": "<filler260>"}))
    assert tokenizer.encode("<filler260>") == [260]
    assert tokenizer.decode([260]) == ""
    assert len(tokenizer.encode("<filler261>")) == len("<filler261>")


def test_added_tokens_beyond_the_vocabulary_get_the_ids_of_the_configuration(
    tmp_path: Path,
) -> None:
    added = {
        "385": {"content": "<b>", "special": False},
        "384": {"content": "<a>", "special": True},
    }
    tokenizer = Tokenizer.from_folder(_write(tmp_path, {"added_tokens_decoder": added}))
    assert tokenizer.encode("<a><b>") == [384, 385]
    assert tokenizer.decode([384, 385]) == "<b>"


def test_a_token_is_not_added_under_an_id_that_is_not_its_own(tmp_path: Path) -> None:
    """The tokenizer would number it 384; the model's row 384 is something else's, or missing."""
    added = {"390": {"content": "<gap>"}, "5": {"content": "<filler260>"}}
    config = {"added_tokens_decoder": added, "unk_token": "<unknown>"}
    tokenizer = Tokenizer.from_folder(_write(tmp_path, config))
    for text in ("<gap>", "<unknown>", "<filler260>"):
        assert len(tokenizer.encode(text)) == len(text)


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": [1]},
        {"added_tokens_decoder": {"x": {}}},
        {"added_tokens_decoder": {"384": "<a>"}},
        {"added_tokens_decoder": {"384": {"content": "\ud800"}}},
        {"unk_token": "\ud800"},
        {"added_tokens_decoder": {"384": {"content": "a"}, "0384": {"content": "b"}}},
    ],
)
def test_damaged_entries_are_an_invalid_request(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="special tokens of"):
        Tokenizer.from_folder(_write(tmp_path, config))


@pytest.mark.parametrize("token", [5, ["<a>"], {"text": "<a>"}, {"content": None}, {}, ""])
def test_a_token_that_is_none_has_no_name_and_does_no_harm(tmp_path: Path, token: object) -> None:
    folder = _write(tmp_path, {"unk_token": token, "additional_special_tokens": [token, 7]})
    Tokenizer.from_folder(folder).encode("a")
    _rendered(folder)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"null", b"\xef\xbb\xbf{"])
def test_a_damaged_older_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (_write(tmp_path, {}) / "special_tokens_map.json").write_bytes(content)
    with pytest.raises(InvalidRequestError, match=r"special_tokens_map\.json"):
        Tokenizer.from_folder(tmp_path)


TOKENS = st.sampled_from(["<filler260>", "<filler261>", "<|end|>"])
IN_CONFIG = st.one_of(
    st.none(), TOKENS, TOKENS.map(lambda t: {"__type": "AddedToken", "content": t, "special": True})
)
IN_OLDER = st.one_of(
    st.none(), TOKENS, TOKENS.map(lambda t: {"content": t, "lstrip": False, "rstrip": False})
)
ADDED = {
    "260": {"content": "<filler260>", "special": True, "normalized": False},
    "383": {"content": "<|end|>", "special": True, "normalized": False},
    "384": {"content": "<added>", "special": False, "normalized": True},
}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    config=st.dictionaries(st.sampled_from(NAMES), IN_CONFIG),
    image=st.none() | TOKENS,
    older=st.none() | st.dictionaries(st.sampled_from([*NAMES, "image_token"]), IN_OLDER),
    added=st.none() | st.sets(st.sampled_from(sorted(ADDED))),
    oldest=st.none() | st.sets(st.sampled_from(sorted(ADDED))),
    more=st.sampled_from([{}, {"additional_special_tokens": ["<filler262>"]},
                          {"extra_special_tokens": {"eoi": "<filler262>"}}]),
)  # fmt: skip
def test_names_and_ids_are_those_of_transformers(
    tmp_path_factory: pytest.TempPathFactory,
    config: dict[str, Any],
    image: str | None,
    older: dict[str, Any] | None,
    added: set[str] | None,
    oldest: set[str] | None,
    more: dict[str, Any],
) -> None:
    config = {**config, "image_token": image, **more}
    if added is not None:
        config["added_tokens_decoder"] = {key: ADDED[key] for key in added}
    folder = _write(tmp_path_factory.mktemp("model"), config, older)
    if oldest is not None:
        ids_by_text = {ADDED[key]["content"]: int(key) for key in oldest}
        (folder / "added_tokens.json").write_text(json.dumps(ids_by_text))
    tokenizer, reference = (
        Tokenizer.from_folder(folder),
        PreTrainedTokenizerFast.from_pretrained(folder),
    )
    messages: Any = [{"role": "user", "content": "hi"}]
    expected = reference.apply_chat_template(messages, tokenize=False)
    assert tokenizer.render_chat(messages) == expected
    ids = reference.encode(TEXT, add_special_tokens=False)
    assert tokenizer.encode(TEXT, add_special_tokens=False) == ids
    for skip in (True, False):
        decoded = reference.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == decoded
