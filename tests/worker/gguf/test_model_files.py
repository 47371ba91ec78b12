"""Converted vocabularies of GGUF files: merges, and the cache folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanocore.system.cache_folder import cache_entries
from nanocore.worker.loading.gguf import model_files as module
from nanocore.worker.loading.gguf.gguf_vocabulary import GgufVocabulary, TokenType
from nanocore.worker.loading.gguf.model_files import generation_settings, gguf_model_files
from nanocore.worker.loading.gguf.tokenizer_files import _merges, convert_model_files

CHECKPOINTS = Path("tests/fixtures/checkpoints").resolve()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a GGUF file, and an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    path = tmp_path / "model.gguf"
    shutil.copyfile(CHECKPOINTS / "gemma2-q5_k_m.gguf", path)
    return path


def forget() -> None:
    """What another process would not know."""
    module._known.clear()
    module._index.cache_clear()


def refuse_to_convert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "convert_model_files", lambda _: pytest.fail("it was cached"))


def test_a_vocabulary_is_converted_once_and_found_by_later_starts(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = convert_model_files(model)
    assert gguf_model_files(model) == expected
    refuse_to_convert(monkeypatch)
    assert gguf_model_files(model) == expected
    forget()
    assert gguf_model_files(model) == expected
    moved = model.rename(model.with_name("moved.gguf"))
    assert gguf_model_files(moved) == expected, "a header is known by its content"
    assert generation_settings(moved).values["eos_token_id"]


def test_another_header_or_tokenizer_beside_it_is_another_entry(model: Path) -> None:
    before = gguf_model_files(model)
    model.with_name("tokenizer.json").write_bytes(before["tokenizer.json"] + b"\n")
    forget()
    assert gguf_model_files(model)["tokenizer.json"] == before["tokenizer.json"] + b"\n"
    model.with_name("tokenizer.json").unlink()
    shutil.copyfile(CHECKPOINTS / "phi3-q4_0.gguf", model)
    assert gguf_model_files(model)["tokenizer.json"] != before["tokenizer.json"]


@pytest.mark.parametrize("kind", ["converted", "files"])
@pytest.mark.parametrize("damage", [b"", b"half", b"[]", None])
def test_a_damaged_entry_is_made_again(model: Path, kind: str, damage: bytes | None) -> None:
    expected = gguf_model_files(model)
    for entry in cache_entries():
        if entry.kind == kind:
            if damage is None:
                entry.path.unlink()
            else:
                entry.path.write_bytes(damage)
    forget()
    assert gguf_model_files(model) == expected
    forget()
    assert gguf_model_files(model) == expected


def test_without_a_cache_folder_it_is_converted_at_each_start(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = model.parent / "cache" / "nanocore"
    root.mkdir(parents=True)
    for kind in ("converted", "files"):
        (root / kind).mkdir()
        (root / kind).chmod(0o750)
    assert gguf_model_files(model) == convert_model_files(model)
    assert "vocabularies are converted at each start" in caplog.text
    assert not cache_entries()


def vocabulary_of(tokens: list[str], scores: list[float], types: list[int]) -> GgufVocabulary:
    return GgufVocabulary(
        path=Path("model.gguf"), architecture="llama", model="llama", pre="", tokens=tokens,
        types=types, scores=scores, merges=[], ids={}, add_bos=None, add_eos=None,
        add_space_prefix=None, templates={},
    )  # fmt: skip


@given(
    st.lists(
        st.tuples(
            st.text(st.sampled_from("ab\u2581\U0001f600\xe9"), min_size=0, max_size=6),
            st.sampled_from([0.0, -1.0, -2.5, -2.0]),
            st.sampled_from([TokenType.NORMAL, TokenType.NORMAL, TokenType.CONTROL]),
        ),
        max_size=60,
        unique_by=lambda entry: entry[0],
    )
)
def test_merges_are_all_pairs_of_tokens_that_make_a_token_the_best_first(
    entries: list[tuple[str, float, int]],
) -> None:
    scores = {token: score for token, score, kind in entries if kind == TokenType.NORMAL}
    expected = [
        (-score, -cut, token[:cut], token[cut:])
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    expected.sort(key=lambda merge: merge[:2])
    found = _merges(vocabulary_of(*map(list, zip(*entries, strict=True))) if entries
                    else vocabulary_of([], [], []))  # fmt: skip
    assert found == [merge[2:] for merge in expected]


def test_an_index_holds_names_sizes_and_digests_alone(model: Path) -> None:
    gguf_model_files(model)
    (index,) = [entry for entry in cache_entries() if entry.kind == "converted"]
    files = msgspec.json.decode(index.path.read_bytes())
    assert [set(file) for file in files] == [{"name", "num_bytes", "sha256"}] * 3
