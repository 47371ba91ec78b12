"""The loader: strict about names and shapes, tolerant of dtypes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nanocore.protocol.errors import ModelFileError
from nanocore.worker.loader import INDEX_FILE, load_weights

NOTHING: frozenset[str] = frozenset()


def test_tensors_land_in_their_views_in_the_parameters_dtype(tmp_path: Path) -> None:
    stored = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(1, 3)}
    save_file({name: t.bfloat16() for name, t in stored.items()}, tmp_path / "model.safetensors")
    merged = torch.zeros(3, 3)
    num_bytes = load_weights(tmp_path, {"a": merged[:2], "b": merged[2:]}, NOTHING)
    assert torch.equal(merged, torch.cat([stored["a"], stored["b"]]))
    assert num_bytes == 9 * 2


def test_an_ignored_tensor_may_be_there(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "lm_head": torch.ones(5)}, tmp_path / "model.safetensors")
    load_weights(tmp_path, {"a": torch.zeros(2)}, frozenset({"lm_head"}))


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    for name in ("1.safetensors", "2.safetensors"):
        save_file({"a": torch.ones(2)}, tmp_path / name)
    write_index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    with pytest.raises(ModelFileError, match=r"2\.safetensors: tensor 'a' is also in .*1\.safet"):
        load_weights(tmp_path, {"a": torch.zeros(2)}, NOTHING)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    write_index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    with pytest.raises(ModelFileError, match=r"2\.safetensors is missing"):
        load_weights(tmp_path, {"a": torch.zeros(2), "b": torch.zeros(2)}, NOTHING)
