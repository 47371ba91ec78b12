"""The loader: every tensor once, only this rank's slices, whatever dtype; and clear refusals."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nanocore.protocol.errors import ModelFileError
from nanocore.worker.loading import loader
from nanocore.worker.loading.checkpoint import INDEX_FILE
from nanocore.worker.loading.loader import check_weights, load_weights
from nanocore.worker.loading.weights import (
    Entries,
    Index,
    LoadedSlice,
    TensorEntry,
    TensorNames,
    whole,
)

FLOAT8 = torch.float8_e4m3fn


def numbered(*shape: int) -> Tensor:
    """Distinct values that bfloat16 holds exactly, as long as they are below 256."""
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def load_part(folder: Path, stored: Tensor, index: Index, dtype: torch.dtype) -> Tensor:
    save_file({"a": stored}, folder / "model.safetensors")
    target = torch.empty_like(stored[index], dtype=dtype)
    exact = dtype if dtype == FLOAT8 else None
    load_weights(
        folder,
        {"a": TensorEntry(tuple(stored.shape), [LoadedSlice(target, index)], dtype=exact)},
        str,
    )
    return target


def refusal(folder: Path, entries: Entries, names: TensorNames = str) -> str:
    with pytest.raises(ModelFileError) as loading:
        load_weights(folder, entries, names)
    with pytest.raises(ModelFileError) as checking:
        check_weights(folder, entries, names)
    assert str(loading.value) == str(checking.value)
    return str(loading.value).replace(f"{folder}/", "")


def one(shape: tuple[int, ...] = (2,), name: str = "a") -> Entries:
    return {name: whole(torch.zeros(shape))}


INDEXES: list[Index] = [
    (),
    (slice(2, 5),),
    (slice(0, 6), slice(1, 3)),
    (slice(4, 6), slice(3, 7), slice(0, 2)),
    (slice(0, 6), slice(0, 7), slice(2, 5)),
    (slice(3, 3),),
]


@pytest.mark.parametrize("piece_bytes", [8, 32, 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index", INDEXES)
def test_a_rank_has_its_slice_however_the_file_is_cut(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    index: Index,
    dtype: torch.dtype,
    piece_bytes: int,
) -> None:
    monkeypatch.setattr(loader, "PIECE_BYTES", piece_bytes)
    stored = numbered(6, 7, 5).bfloat16()
    target = load_part(tmp_path, stored, index, dtype)
    assert torch.equal(target, stored[index].to(dtype))


def test_two_parts_of_a_tensor_and_views_with_gaps(tmp_path: Path) -> None:
    stored = numbered(4, 6)
    save_file({"a": stored}, tmp_path / "model.safetensors")
    memory = torch.zeros(4, 10)
    parts = [
        LoadedSlice(memory[:, 1:3], (slice(0, 4), slice(4, 6))),
        LoadedSlice(memory[1:3, 4:], (slice(2, 4),)),
    ]
    num_bytes = load_weights(tmp_path, {"a": TensorEntry((4, 6), parts)}, str)
    expected = torch.zeros(4, 10)
    expected[:, 1:3] = stored[:, 4:6]
    expected[1:3, 4:] = stored[2:4]
    assert torch.equal(memory, expected)
    assert num_bytes == (4 * 2 + 2 * 6) * 4


def test_a_scalar_and_an_empty_tensor(tmp_path: Path) -> None:
    save_file({"a": torch.tensor(3.0), "b": torch.empty(0, 2)}, tmp_path / "model.safetensors")
    scalar = torch.tensor(0.0)
    load_weights(tmp_path, {"a": whole(scalar), "b": whole(torch.empty(0, 2))}, str)
    assert scalar == 3.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offset_is_added_and_rounded_once(tmp_path: Path, dtype: torch.dtype) -> None:
    stored = torch.tensor([0.00391, 0.25], dtype=dtype)  # 0.00391: rounding twice would show
    save_file({"a": stored}, tmp_path / "model.safetensors")
    target = torch.empty(2, dtype=torch.bfloat16)
    load_weights(tmp_path, {"a": whole(target, offset=1.0)}, str)
    assert torch.equal(target, (stored.float() + 1).bfloat16())


def test_what_a_rank_does_not_keep_is_not_read_and_must_be_there(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(9)}, tmp_path / "model.safetensors")
    entries = one() | {"b": TensorEntry((9,))}
    assert load_weights(tmp_path, entries, str) == 2 * 4
    assert list(check_weights(tmp_path, entries, str)) == ["a", "b"]
    assert "'b' has shape [9], and by the model's settings [8]" in refusal(
        tmp_path, one() | {"b": TensorEntry((8,))}
    )
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert "1 of 2 tensors are missing, e.g. 'b'" in refusal(tmp_path, entries)


def test_an_ignored_tensor_may_be_there_of_any_dtype(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2), "ids": torch.arange(5)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert load_weights(tmp_path, one(), {"a": "a"}.get) == 8
    assert "tensor 'ids' is not part of this model" in refusal(tmp_path, one())


def test_a_bias_of_zeros_that_the_model_does_not_have_is_left_out(tmp_path: Path) -> None:
    for bias, refused in (
        (torch.zeros(5), False),
        (torch.eye(5)[3], True),
        (torch.zeros(5, 1), True),
    ):
        save_file({"a": torch.ones(2), "b.bias": bias}, tmp_path / "model.safetensors")
        if refused:
            assert "tensor 'b.bias' is not part of this model" in refusal(tmp_path, one())
        else:
            assert load_weights(tmp_path, one(), str) == 8
            assert list(check_weights(tmp_path, one(), str)) == ["a"]


def test_a_tensor_goes_where_its_translated_name_says(tmp_path: Path) -> None:
    save_file({"inner.a": torch.ones(2)}, tmp_path / "model.safetensors")
    entries = one()
    assert load_weights(tmp_path, entries, lambda name: name.removeprefix("inner.")) == 8
    assert entries["a"].parts[0].target.tolist() == [1.0, 1.0]
    assert "1 of 1 tensors are missing" not in refusal(tmp_path, one())


def test_two_tensors_for_one_place_are_refused(tmp_path: Path) -> None:
    save_file({"inner.a": torch.ones(2), "a": torch.ones(2)}, tmp_path / "model.safetensors")
    message = refusal(tmp_path, one(), lambda name: name.removeprefix("inner."))
    assert "'inner.a'" in message
    assert "'a' are both" in message or "'a' and" in message


def test_a_dtype_that_is_not_read_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, dtype=torch.int64)}, tmp_path / "model.safetensors")
    assert "tensor 'a' is I64, and one of F32, F16, BF16 is needed" in refusal(tmp_path, one())


def test_a_wrong_shape_names_file_tensor_and_both_shapes(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    assert refusal(tmp_path, one((3, 2))) == (
        "model.safetensors: tensor 'a' has shape [2, 3], and by the model's settings [3, 2]: are "
        "they of another model?"
    )


def test_shards_are_read_by_index_through_links(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "snapshots" / "1", tmp_path / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    for i, name in enumerate("ab", 1):
        save_file({name: torch.full((2,), float(i))}, blobs / name)
        (folder / f"model-0000{i}-of-00002.safetensors").symlink_to(f"../../blobs/{name}")
    write_index(
        folder, {name: f"model-0000{i}-of-00002.safetensors" for i, name in enumerate("ab", 1)}
    )
    (folder / "consolidated.safetensors").write_bytes(b"another copy, for other programs")
    entries = one(name="a") | one(name="b")
    assert load_weights(folder, entries, str) == 16
    assert [entry.parts[0].target.tolist() for entry in entries.values()] == [[1, 1], [2, 2]]


def test_a_single_file_may_have_any_name(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "weights.safetensors")
    assert load_weights(tmp_path, one(), str) == 8


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    for name in ("1.safetensors", "2.safetensors"):
        save_file({"a": torch.ones(2)}, tmp_path / name)
    write_index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    assert "2.safetensors: tensor 'a' is also in 1.safetensors" in refusal(tmp_path, one())


def test_an_index_that_names_another_shard_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "2.safetensors")
    entries = one(name="a") | one(name="b")
    write_index(tmp_path, {"a": "2.safetensors", "b": "1.safetensors"})
    assert "tensor 'a' should be in 2.safetensors, but it is in 1.safetensors" in refusal(
        tmp_path, entries
    )
    write_index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"})
    assert "tensor 'c' should be in 2.safetensors, but it is in no file" in refusal(
        tmp_path, entries
    )
    assert load_weights(tmp_path, entries, {"a": "a", "b": "b"}.get) == 16


def test_a_tensor_that_the_index_does_not_list_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "1.safetensors")
    write_index(tmp_path, {"a": "1.safetensors"})
    entries = one(name="a") | one(name="b")
    assert f"1.safetensors: tensor 'b' is not in {INDEX_FILE}" in refusal(tmp_path, entries)


@pytest.mark.parametrize("has_index", [False, True])
def test_a_single_file_is_read_and_not_shards_beside_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_index: bool
) -> None:
    save_file({"a": torch.full((2,), 5.0)}, tmp_path / "model.safetensors")
    shard = "model-00001-of-00001.safetensors"
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / shard)
    if has_index:
        write_index(tmp_path, {"a": shard, "b": shard})
    entries = one()
    load_weights(tmp_path, entries, str)
    assert entries["a"].parts[0].target.tolist() == [5, 5]
    assert f"model.safetensors is read, and not {shard}" in caplog.text


def test_a_stale_shard_beside_an_index_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, stale = "model-00001-of-00001.safetensors", "model-00002-of-00003.safetensors"
    save_file({"a": torch.full((2,), 5.0)}, tmp_path / whole)
    save_file({"a": torch.ones(2)}, tmp_path / stale)
    write_index(tmp_path, {"a": whole})
    entries = one()
    for _ in range(2):
        load_weights(tmp_path, entries, str)
    assert entries["a"].parts[0].target.tolist() == [5, 5]
    assert caplog.messages == [
        f"{tmp_path}: {whole} is read, and not {stale}, which does not belong to it"
    ]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    write_index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    assert "2.safetensors is missing: download it again" in refusal(tmp_path, one())
    (tmp_path / "2.safetensors").symlink_to("../../blobs/2")
    assert "it is a link to ../../blobs/2, which is not there" in refusal(tmp_path, one())


@pytest.mark.parametrize(
    "shard",
    ["/etc/a.safetensors", "../a.safetensors", "sub/a.safetensors", "..", "", "a\\b.safetensors",
     "a\0.safetensors", "a.bin"],
)  # fmt: skip
def test_an_index_cannot_name_files_elsewhere(tmp_path: Path, shard: str) -> None:
    write_index(tmp_path, {"a": shard})
    assert "is not the name of a safetensors file in this folder" in refusal(tmp_path, one())


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    for name in ("1.safetensors", "2.safetensors"):
        save_file({name[0]: torch.ones(2)}, tmp_path / name)
    assert f"and others, but no {INDEX_FILE}" in refusal(tmp_path, one())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "m.gguf"])
def test_other_formats_are_refused_with_a_way_to_convert(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    message = refusal(tmp_path, one())
    assert f"only {name}: no other format is read" in message
    assert "save_pretrained" in message


def test_an_unfinished_download_is_recognised(tmp_path: Path) -> None:
    assert "no *.safetensors files: download it again" in refusal(tmp_path, one())
    (tmp_path / "1234.incomplete").touch()
    assert "its download was not completed" in refusal(tmp_path, one())


def test_a_truncated_file_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(64)}, path)
    content = path.read_bytes()
    for size in (len(content) - 1, 20, 9):
        path.write_bytes(content[:size])
        message = refusal(tmp_path, one((64,)))
        assert f"{size} bytes of " in message
        assert "download was not completed" in message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "an empty file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "git lfs pull"),
        (b"\x02\0\0\0\0\0\0\0[]", "damaged"),
        (struct.pack("<Q", 14) + b'{"a":{"b":"c"}', "damaged"),
        (b"PK\3\4 a zip", "no safetensors file"),
    ],
)
def test_other_contents_are_recognised(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    message = refusal(tmp_path, one())
    assert message.startswith("model.safetensors: ")
    assert expected in message


def test_a_file_cut_short_while_it_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(64)}, path)
    found = loader.stored_tensors

    def cut_afterwards(folder: Path, ignored: frozenset[str]) -> list[object]:
        tensors = list(found(folder, ignored))
        path.write_bytes(path.read_bytes()[:-8])
        return list(tensors)

    monkeypatch.setattr(loader, "stored_tensors", cut_afterwards)
    with pytest.raises(ModelFileError, match="became shorter while it was read"):
        load_weights(tmp_path, one((64,)), str)


def test_nothing_is_printed_where_stderr_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    load_weights(tmp_path, one(), str, progress=True)
    assert capsys.readouterr() == ("", "")


class Terminal(list[str]):
    """A terminal that remembers what was written."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.append(text)
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("progress", [True, False])
def test_a_bar_counts_bytes_on_a_terminal_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: bool
) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    save_file({"a": torch.ones(1000)}, folder / "model.safetensors")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    load_weights(folder, one((1000,)), str, progress=progress)
    text = "".join(terminal)
    assert ("Loading my-model: 100%" in text and "4.00k/4.00k" in text) if progress else not text


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, FLOAT8])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
def test_a_number_that_is_not_finite_is_refused_with_its_tensors_name(
    tmp_path: Path, dtype: torch.dtype, value: float, target_dtype: torch.dtype
) -> None:
    stored = -numbered(4, 6)
    stored[2, 3] = math.copysign(math.nan, value) if dtype == FLOAT8 else value
    target_dtype = dtype if dtype == FLOAT8 else target_dtype
    with pytest.raises(ModelFileError, match=r"model\.safetensors: tensor 'a' has NaN or infinity"):
        load_part(tmp_path, stored.to(dtype), (slice(2, 3),), target_dtype)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_number_beyond_the_models_dtype_is_refused_with_the_flag(
    tmp_path: Path, dtype: torch.dtype, sign: int
) -> None:
    stored = torch.tensor([1.0, 65280.0 * sign, 0.0], dtype=dtype)
    assert load_part(tmp_path, stored, (), torch.float16).tolist() == stored.tolist()
    stored[1] = 65536.0 * sign
    words = "tensor 'a' has numbers beyond 65504, the largest of --dtype float16: use bfloat16"
    with pytest.raises(ModelFileError, match=words):
        load_part(tmp_path, stored, (), torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, FLOAT8])
def test_the_largest_numbers_of_a_dtype_are_loaded(tmp_path: Path, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    stored = torch.tensor([info.min, -0.0, info.tiny, info.max]).to(dtype)
    assert torch.equal(load_part(tmp_path, stored, (), dtype).float(), stored.float())
