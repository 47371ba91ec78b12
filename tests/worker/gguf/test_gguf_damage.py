"""Damaged, hostile and foreign GGUF files: each is refused with a typed error that names the file.

Every error must come before memory is taken for what the file only claims to have.
"""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from nanocore.protocol.errors import ConfigError, ModelFileError
from nanocore.worker.loading.checkpoint import stored_tensors
from nanocore.worker.loading.gguf.architectures import gguf_tensors
from nanocore.worker.loading.gguf.gguf_files import gguf_in_folder
from nanocore.worker.loading.gguf.gguf_format import GgufFormat
from nanocore.worker.loading.gguf.header import read_header, read_vocabulary
from nanocore.worker.loading.gguf.model_files import gguf_model_files
from nanocore.worker.loading.model_folder import resolve_model
from nanocore.worker.loading.weights import Projection
from nanocore.worker.models import load_model_config
from nanocore.worker.worker import Worker
from tests.worker.configs import make_worker_config

QWEN_3 = Path("tests/fixtures/checkpoints/qwen3-q8_0.gguf").resolve()


def write(path: Path, tensors: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A file of an embedding, these tensors and these settings, by llama.cpp's package."""
    writer = gguf.GGUFWriter(path, changes.pop("architecture", "qwen3"))
    for key, value in changes.items():
        name = key.replace("__", ".")
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_uint32(name, value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as error:
        read_header(path)
    assert str(path) in str(error.value)
    with pytest.raises(ModelFileError):
        read_vocabulary(path)
    return str(error.value)


def test_a_file_cut_anywhere_in_its_header_is_refused(tmp_path: Path) -> None:
    content = write(tmp_path / "whole.gguf", qwen3__block_count=2, texts=["a", "bc"]).read_bytes()
    for size in range(len(content)):
        path = tmp_path / f"cut{size}.gguf"
        path.write_bytes(content[:size])
        refusal(path)
        path.unlink()


def test_any_damaged_byte_is_read_or_refused_and_nothing_else(tmp_path: Path) -> None:
    content = write(tmp_path / "whole.gguf", qwen3__block_count=2, texts=["a", "bc"]).read_bytes()
    num_refused = 0
    for place in range(len(content) - 4 * 32 * 4):
        for value in (0, 0x7F, 0xFF):
            path = tmp_path / "damaged.gguf"
            path.write_bytes(content[:place] + bytes([value]) + content[place + 1 :])
            try:
                read_vocabulary(path)
            except ModelFileError:
                num_refused += 1
    assert num_refused > 100


def header(*parts: tuple[str, Any]) -> bytes:
    return b"GGUF" + b"".join(struct.pack(f"<{layout}", value) for layout, value in parts)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"GGML" + bytes(40), "not a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1", "git-lfs"),
        (header(("I", 1)), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
        (header(("I", 3), ("Q", 2**40), ("Q", 0)), "at most"),
        (header(("I", 3), ("Q", 0), ("Q", 2**40)), "at most"),
        (header(("I", 3), ("Q", 0), ("Q", 1), ("Q", 2**63)), "at most"),
        (header(("I", 3), ("Q", 0), ("Q", 1), ("Q", 1), ("B", 97), ("I", 77)), "unknown"),
        (header(("I", 3), ("Q", 0), ("Q", 1), ("Q", 1), ("B", 97), ("I", 9), ("I", 9), ("Q", 1)),
         "array of type 9"),
        (header(("I", 3), ("Q", 0), ("Q", 1), ("Q", 1), ("B", 97), ("I", 9), ("I", 8),
                ("Q", 2**60)), "and the file has"),
        (header(("I", 3), ("Q", 0), ("Q", 1), ("Q", 1), ("B", 97), ("I", 9), ("I", 10),
                ("Q", 2**61)), "and the file has"),
        (header(("I", 3), ("Q", 0), ("Q", 1), ("Q", 1), ("B", 0xFF)), "UTF-8"),
    ],
)  # fmt: skip
def test_what_a_header_may_not_say(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    assert message in refusal(path)


@pytest.mark.parametrize(
    ("dims", "kind", "offset", "message"),
    [
        ([], 0, 0, "0 dimensions"),
        ([1] * 5, 0, 0, "5 dimensions"),
        ([0, 4], 0, 0, "shape"),
        ([2**40, 2**40], 0, 0, "shape"),
        ([4], 99, 0, "type 99"),
        ([33], 8, 0, "blocks of 32"),
        ([4], 0, 2**63, "ends at byte"),
        ([4], 0, 4, "alignment"),
        ([2**20], 0, 0, "ends at byte"),
    ],
)
def test_what_a_tensor_may_not_be(
    tmp_path: Path, dims: list[int], kind: int, offset: int, message: str
) -> None:
    path = tmp_path / "hostile.gguf"
    sizes = [("Q", size) for size in dims]
    start = header(("I", 3), ("Q", 1), ("Q", 0), ("Q", 1), ("B", 97), ("I", len(dims)), *sizes)
    path.write_bytes(start + struct.pack("<IQ", kind, offset) + bytes(256))
    assert message in refusal(path)


def test_what_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"architecture = 'mamba' is not served.*known: llama"):
        load_model_config(write(tmp_path / "mamba.gguf", architecture="mamba"))
    path = write(
        tmp_path / "pre.gguf", tokenizer__ggml__model="gpt2", tokenizer__ggml__pre="viking",
        tokenizer__ggml__tokens=["a", "b"], tokenizer__ggml__merges=["a b"],
    )  # fmt: skip
    with pytest.raises(ModelFileError, match=r"pre = 'viking'.*known: llama-bpe.*tokenizer.json"):
        gguf_model_files(path)
    path = write(
        tmp_path / "twice.gguf", tokenizer__ggml__model="gpt2", tokenizer__ggml__pre="qwen2",
        tokenizer__ggml__tokens=["a", "a"], tokenizer__ggml__merges=["a b"],
    )  # fmt: skip
    with pytest.raises(ModelFileError, match="'a' occurs twice"):
        gguf_model_files(path)
    path = write(
        tmp_path / "pieces.gguf", tokenizer__ggml__model="gpt2", tokenizer__ggml__pre="qwen2",
        tokenizer__ggml__tokens=["a", "b"],
    )  # fmt: skip
    with pytest.raises(ModelFileError, match=r"merges is missing: put .* tokenizer\.json beside"):
        gguf_model_files(path)
    path = write(
        tmp_path / "unscored.gguf", tokenizer__ggml__model="llama",
        tokenizer__ggml__tokens=["a", "b", "ab"],
    )  # fmt: skip
    with pytest.raises(ModelFileError, match="3 tokens, 3 types and 0 scores: it is damaged"):
        gguf_model_files(path)


@pytest.mark.parametrize("name", ["eos", "eot", "eom"])
def test_an_end_that_is_no_token_is_refused_unless_it_says_none(tmp_path: Path, name: str) -> None:
    vocabulary: dict[str, Any] = {
        "tokenizer__ggml__model": "gpt2", "tokenizer__ggml__pre": "qwen2",
        "tokenizer__ggml__tokens": ["a", "b", "ab"], "tokenizer__ggml__merges": ["a b"],
    }  # fmt: skip
    for number, is_refused in ((2, False), (3, True), (2**32 - 1, False)):
        path = write(
            tmp_path / f"{number}.gguf",
            **vocabulary,
            **{f"tokenizer__ggml__{name}_token_id": number},
        )
        if not is_refused:
            assert gguf_model_files(path)
            continue
        with pytest.raises(ModelFileError, match=rf"{name}_token_id = 3 is not among its 3 tokens"):
            gguf_model_files(path)


@pytest.mark.parametrize("shape", [(32,), (1, 32)])
def test_the_gate_of_a_shared_expert_is_a_vector_or_one_row(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    gate = {"blk.0.ffn_gate_inp_shexp.weight": np.zeros(shape, dtype=np.float32)}
    path = write(tmp_path / "moe.gguf", gate, architecture="qwen2moe")
    found = {tensor.name: tensor.shape for tensor in gguf_tensors(path)}
    assert found["model.layers.0.mlp.shared_expert_gate.weight"] == (1, 32)


def test_a_type_that_is_not_served_is_refused_with_the_file_s_name_of_the_tensor(
    tmp_path: Path,
) -> None:
    path = tmp_path / "q2_k.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_tensor(
        "blk.0.attn_q.weight", np.zeros((32, 84), dtype=np.uint8),
        raw_dtype=gguf.GGMLQuantizationType.Q2_K,
    )  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    kept = Projection("model.layers.0.self_attn.q_proj", (32, 256), slice(0, 32), slice(0, 256))
    with pytest.raises(ModelFileError, match=r"blk\.0\.attn_q\.weight is stored as Q2_K"):
        GgufFormat(path, 32, torch.float32).projection(kept)


def test_a_setting_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    sizes = {
        "qwen3__block_count": 1, "qwen3__embedding_length": 32, "qwen3__feed_forward_length": 32,
        "qwen3__attention__head_count": 1, "qwen3__context_length": 64,
        "qwen3__attention__layer_norm_rms_epsilon": 1,
    }  # fmt: skip
    load_model_config(write(tmp_path / "known.gguf", **sizes))
    path = write(tmp_path / "unknown.gguf", **sizes, qwen3__attention__clamp_kqv=8)
    with pytest.raises(ModelFileError, match=r"qwen3\.attention\.clamp_kqv = 8 is a setting"):
        load_model_config(path)
    lengths = {"qwen3__attention__key_length": 16, "qwen3__attention__value_length": 32}
    with pytest.raises(ModelFileError, match=r"value_length = 32 is not attention\.key_length, 16"):
        load_model_config(write(tmp_path / "unlike.gguf", **sizes, **lengths))
    del sizes["qwen3__block_count"]
    with pytest.raises(ModelFileError, match=r"qwen3\.block_count is missing"):
        load_model_config(write(tmp_path / "less.gguf", **sizes))


def test_a_tokenizer_beside_the_file_is_used_if_it_is_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(QWEN_3, path)
    made = gguf_model_files(path)["tokenizer.json"]
    beside = tmp_path / "tokenizer.json"
    beside.write_bytes(made + b"\n")
    assert gguf_model_files(path)["tokenizer.json"] == made + b"\n"
    beside.write_bytes(made.replace(b'"the":', b'"thy":'))
    with pytest.raises(ModelFileError, match="of another model"):
        gguf_model_files(path)


def test_a_model_is_named_by_its_file_or_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(QWEN_3, path)
    (tmp_path / "mmproj-model.gguf").touch()
    assert resolve_model(str(path)) == resolve_model(str(tmp_path)) == path
    with pytest.raises(ConfigError, match="has no revisions"):
        resolve_model(str(path), "main")
    shutil.copy(QWEN_3, tmp_path / "other.gguf")
    with pytest.raises(ModelFileError, match="2 models"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert gguf_in_folder(tmp_path) is None


def test_a_model_in_several_files_is_whole_or_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(
        tmp_path / "split.gguf", "qwen3", split_max_tensors=1, small_first_shard=False
    )
    for name in ("token_embd", "output_norm", "output"):
        writer.add_tensor(f"{name}.weight", np.ones((1, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first, second, third = sorted(tmp_path.glob("*.gguf"))
    assert resolve_model(str(tmp_path)) == resolve_model(str(third)) == first
    names = [(t.path, t.name) for t in stored_tensors(first, lambda _: True)]
    assert names == [
        (first, "model.embed_tokens.weight"), (second, "model.norm.weight"),
        (third, "lm_head.weight"),
    ]  # fmt: skip
    second.rename(tmp_path / "kept")
    with pytest.raises(ModelFileError, match=r"00002-of-00003\.gguf is missing"):
        list(stored_tensors(first, lambda _: True))
    shutil.copy(third, second)
    with pytest.raises(ModelFileError, match="not of the same model"):
        list(stored_tensors(first, lambda _: True))


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_not_finite_is_refused_with_its_tensors_name(
    tmp_path: Path, scale: float
) -> None:
    path = shutil.copy(QWEN_3, tmp_path / "model.gguf")
    name = "model.layers.0.mlp.down_proj.blocks"
    (stored,) = (t for t in stored_tensors(path, lambda found: found == name))
    with path.open("r+b") as file:
        file.seek(stored.offset + 2 * 34)  # each block of Q8_0 begins with its scale
        file.write(np.float16(scale).tobytes())
    worker = Worker(make_worker_config(folder=str(path), load_format="auto"))
    with pytest.raises(ModelFileError, match=r"ffn_down.weight.* has NaN or infinity in"):
        worker.load_model()
