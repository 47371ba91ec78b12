"""Which of a model's files are offered, and that they stay what the digests say."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from nanocore.engine_core.io import served_files as module
from nanocore.engine_core.io.served_files import ServedFiles
from nanocore.protocol.errors import ModelFileError


def test_the_files_of_the_allow_list_are_named_with_size_and_digest(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    (tmp_path / "chat_template.jinja").write_bytes(b"hello")
    (tmp_path / "special_tokens_map.json").write_bytes(b"{ }")
    (tmp_path / "vocab.txt").write_bytes(b"a")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "additional_chat_templates").mkdir()
    for name in ("tool_use.jinja", "other.jinja"):
        (tmp_path / "additional_chat_templates" / name).write_bytes(b"tools")
    entries = ServedFiles(tmp_path).entries
    assert [(entry.name, entry.num_bytes) for entry in entries] == [
        ("tokenizer.json", 2),
        ("special_tokens_map.json", 3),
        ("chat_template.jinja", 5),
        ("vocab.txt", 1),
        ("additional_chat_templates/tool_use.jinja", 5),
    ]
    assert entries[2].sha256 == hashlib.sha256(b"hello").hexdigest()


def test_what_is_served_is_what_was_there_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(b"old")
    files = ServedFiles(tmp_path)
    path.write_bytes(b"new and longer")
    assert files.chunk("tokenizer.json", 0) == b"old"
    assert files.chunk("tokenizer.json", 2) == b"d"


def test_a_file_above_the_limit_is_left_out_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 10)
    (tmp_path / "tokenizer.json").write_bytes(b"x" * 11)
    (tmp_path / "tokenizer_config.json").write_bytes(b"x" * 10)
    assert [entry.name for entry in ServedFiles(tmp_path).entries] == ["tokenizer_config.json"]
    assert "11 bytes" in caplog.text


def test_a_file_that_cannot_be_read_is_a_start_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"x")

    def refuse(_path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: Permission denied"):
        ServedFiles(tmp_path)
