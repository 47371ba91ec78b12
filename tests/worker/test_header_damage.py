"""A safetensors file with any byte of its header changed is what it was, or an error that names it.

Every single byte takes values of every kind that means something there, in turn. Then come changes
of structure: files cut short, lengths and offsets that lead elsewhere, names twice.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nanocore.protocol.errors import ModelFileError
from nanocore.worker.loading.checkpoint import INDEX_FILE, read_header
from nanocore.worker.loading.loader import load_weights
from nanocore.worker.loading.weights import Entries, whole

TENSORS = {
    "model.a.weight": torch.arange(6.0).view(2, 3),
    "b": torch.tensor([1.0, 2.0]).bfloat16(),
    "c": torch.tensor(3.0).half(),
}
BYTES = [0, 10, 0x7F, 0x80, 0xC3, 0xFF, *b' "+-.,0129:FI[]\\e{}']


def entries() -> Entries:
    return {name: whole(torch.full_like(tensor, torch.nan)) for name, tensor in TENSORS.items()}


def outcome(folder: Path) -> str:
    """ "loaded", if every value is in its place, or what the error says."""
    targets = entries()
    try:
        load_weights(folder, targets, str)
    except ModelFileError as error:
        message = str(error)
    else:
        for name, tensor in TENSORS.items():
            assert torch.equal(targets[name].parts[0].target, tensor), name
        return "loaded"
    assert str(folder) in message
    assert len(message) < 2000
    return message


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    return path


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write(file: Path, header: bytes, data: bytes) -> None:
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)


def test_no_byte_of_a_header_can_be_anything_that_is_not_noticed(file: Path) -> None:
    content = file.read_bytes()
    num_header_bytes = len(content) - len(header_of(file)[1])
    num_loaded = num_cases = 0
    with file.open("r+b", buffering=0) as writer:
        for place in range(num_header_bytes):
            for byte in set(BYTES) - {content[place]}:
                os.pwrite(writer.fileno(), bytes([byte]), place)
                num_loaded += outcome(file.parent) == "loaded"
                num_cases += 1
            os.pwrite(writer.fileno(), content[place : place + 1], place)
    assert num_cases > 4000
    assert 0 < num_loaded < num_cases / 10  # a byte of the metadata, or of padding


def test_a_file_cut_anywhere_is_an_error(file: Path) -> None:
    content = file.read_bytes()
    for size in range(len(content)):
        file.write_bytes(content[:size])
        assert outcome(file.parent) != "loaded"
    file.write_bytes(content + b"\0")
    assert outcome(file.parent) != "loaded"


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**8 + 1, 2**40, 2**31])
def test_a_length_that_leads_elsewhere_is_an_error(file: Path, length: int) -> None:
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    assert outcome(file.parent) != "loaded"


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": [0, 24, 48]}, {"data_offsets": [24, 0]}, {"data_offsets": [-8, 16]},
        {"data_offsets": [0, 2**64]}, {"data_offsets": [2**63, 2**63 + 24]},
        {"data_offsets": [4, 28]}, {"data_offsets": [6, 30]}, {"data_offsets": "0"},
        {"data_offsets": None}, {"data_offsets": [0.5, 24]}, {"dtype": "F33"}, {"dtype": None},
        {"dtype": "f32"}, {"dtype": "F64"}, {"dtype": ["F32"]}, {"dtype": "F8_E4M3"},
        {"shape": [2, -3]}, {"shape": [3, 2]}, {"shape": [6]}, {"shape": [2**32, 2**32]},
        {"shape": [10**30]}, {"shape": [True, 6]}, {"shape": None}, {"shape": {}},
        {"shape": [1] * 10_000},
    ],
    ids=str,
)  # fmt: skip
def test_an_entry_that_says_something_else_is_an_error(file: Path, change: dict) -> None:
    header, data = header_of(file)
    header["model.a.weight"] |= change
    write(file, json.dumps(header).encode(), data)
    assert outcome(file.parent) != "loaded"


@pytest.mark.parametrize(
    "text",
    [b"", b"null", b"[]", b"{}", b'"x"', b"1", b"{" * 1000, b'{"a":' * 100_000, b"\xff\xfe{}",
     b'{"__metadata__":1}', b'{"a":{}}', b'{"a":null}', b'{"a":[]}', b'{"\xed\xa0\x80":{}}'],
    ids=lambda text: repr(text[:20]),
)  # fmt: skip
def test_a_header_that_is_none_is_an_error(file: Path, text: bytes) -> None:
    write(file, text, b"")
    assert outcome(file.parent) != "loaded"
    write(file, text, bytes(32))
    assert outcome(file.parent) != "loaded"


def test_a_name_twice_is_an_error_or_the_same_tensor(file: Path) -> None:
    header, data = header_of(file)
    entries = [f"{json.dumps(name)}:{json.dumps(entry)}" for name, entry in header.items()]
    for twice in entries[1:]:
        for other in (twice, twice.replace("F", "I"), twice.replace("[", "[1,", 1)):
            for order in ([*entries, other], [other, *entries]):
                write(file, f"{{{','.join(order)}}}".encode(), data)
                outcome(file.parent)  # asserts that what is loaded is right


def test_a_folder_or_a_pipe_in_a_files_place_is_an_error(file: Path) -> None:
    file.unlink()
    file.mkdir()
    assert "is not a file" in outcome(file.parent)
    file.rmdir()
    os.mkfifo(file)
    assert "is not a file" in outcome(file.parent)


@pytest.mark.parametrize(
    "weight_map",
    [
        {"b": 1}, {"b": None}, {"b": ["model.safetensors"]}, {"b": {}}, [], "x", None, 3,
        {"b": "../model.safetensors"}, {"b": "/etc/passwd"}, {"b": "sub/model.safetensors"},
        {"b": "model.safetensors\0"}, {"b": ""}, {"b": ".."}, {"b": "x" * 300 + ".safetensors"},
        {"b": "model.safetensors", "x" * 10**6: "model.safetensors"},
        {"b": "model.bin"}, {"b\0": "model.safetensors"},
    ],
    ids=lambda value: f"{value!r:.40}",
)  # fmt: skip
def test_an_index_of_junk_is_an_error(file: Path, weight_map: Any) -> None:
    (file.parent / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    assert outcome(file.parent) != "loaded"


@pytest.mark.parametrize(
    "text",
    [b"\xff", b"", b"{", b"\xef\xbb\xbf{}", b"[" * 100_000, b'{"weight_map":' * 100_000, b"NaN"],
    ids=lambda text: repr(text[:20]),
)  # fmt: skip
def test_an_index_that_is_no_json_is_an_error(file: Path, text: bytes) -> None:
    (file.parent / INDEX_FILE).write_bytes(text)
    assert outcome(file.parent) != "loaded"


def test_a_header_is_read_as_it_was_written(file: Path) -> None:
    read = {tensor.name: tensor for tensor in read_header(file)}
    assert {name: tensor.shape for name, tensor in read.items()} == {
        name: tuple(tensor.shape) for name, tensor in TENSORS.items()
    }
