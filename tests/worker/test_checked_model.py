"""What the weights say where config.json does not, and what is found before memory is taken."""

from __future__ import annotations

import json
import logging
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.process.check import check_engine
from nanocore.protocol.errors import CacheMemoryError, ConfigError, ModelFileError, StartError
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.devices import select_dtype, select_kv_format
from nanocore.worker.loading.checked_model import read_model
from nanocore.worker.loading.checkpoint import INDEX_FILE
from nanocore.worker.models import build_model
from nanocore.worker.placement import Placement
from nanocore.worker.worker import Worker
from tests.model_families import BUILDERS, greedy_continuations, rewrite_config
from tests.worker.configs import make_worker_config
from tests.worker.running import make_runner, run_runner, write_script
from tests.worker.test_model_config import parse

CPU = torch.device("cpu")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PROMPTS = [[5, 80, 200, 7], list(range(40, 90))]
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return BUILDERS["qwen2"](tmp_path_factory.mktemp("tied"))


@pytest.fixture
def folder(tied_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tied_model, tmp_path / "model"))


def read(folder: Path, dtype: str = "auto") -> tuple[ModelConfig, torch.dtype]:
    return read_model(make_worker_config(folder=str(folder), load_format="auto", dtype=dtype), CPU)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def says_what_transformers_says(folder: Path, dtype: str = "auto") -> bool:
    config, read_dtype = read(folder, dtype)
    model = build_model(config, Placement(read_dtype, CPU))
    expected = greedy_continuations(folder, PROMPTS, NUM_TOKENS, dtype=read_dtype)
    script = write_script(PROMPTS, [said.token_ids for said in expected])
    samples = run_runner(make_runner(folder, model.placement, model=model), script)
    return all(s.token_id == expected[s.request].token_ids[s.index] for s in samples)


def set_config(folder: Path, **changes: Any) -> None:
    """Change settings of config.json; those of None are taken out."""

    def edit(config: dict[str, Any]) -> None:
        config |= changes
        for name, value in changes.items():
            if value is None:
                del config[name]

    rewrite_config(folder, edit)


def test_a_tied_head_that_is_stored_too_is_the_embedding(folder: Path) -> None:
    tensors = tensors_of(folder)
    save_file(tensors | {HEAD: tensors[EMBEDDING].clone()}, folder / "model.safetensors")
    assert read(folder)[0].tie_word_embeddings
    assert says_what_transformers_says(folder)


def test_a_head_that_is_not_the_embedding_it_is_said_to_be_is_used(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = tensors_of(folder)
    other = torch.randn(tensors[EMBEDDING].shape, generator=torch.Generator().manual_seed(1))
    save_file(tensors | {HEAD: other}, folder / "model.safetensors")
    assert not read(folder)[0].tie_word_embeddings
    assert "lm_head that differs from the embedding" in caplog.text
    assert says_what_transformers_says(folder)


def test_a_head_that_is_stored_quantized_is_not_the_embedding(folder: Path) -> None:
    packed = {"lm_head.qweight": torch.zeros(8, 64, dtype=torch.int32)}
    save_file(tensors_of(folder) | packed, folder / "model.safetensors")
    assert not read(folder)[0].tie_word_embeddings


@pytest.mark.parametrize("change", ["last value", "dtype"])
def test_the_whole_head_is_compared_wherever_it_is(folder: Path, change: str) -> None:
    tensors = tensors_of(folder)
    head = tensors[EMBEDDING].clone()
    if change == "dtype":
        head = head.bfloat16()
    else:
        head[-1, -1] += 1
    (folder / "model.safetensors").unlink()
    for name, part in (("1.safetensors", tensors), ("2.safetensors", {HEAD: head})):
        save_file(part, folder / name)
    weight_map = dict.fromkeys(tensors, "1.safetensors") | {HEAD: "2.safetensors"}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    assert not read(folder)[0].tie_word_embeddings


def test_without_a_head_the_error_names_the_setting(folder: Path) -> None:
    set_config(folder, tie_word_embeddings=False)
    with pytest.raises(ModelFileError, match=r"'lm_head\.weight'.* tie_word_embeddings would"):
        check_engine(EngineConfig(model=str(folder), device="cpu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_have_their_own_dtype_where_none_is_named(folder: Path, dtype: torch.dtype) -> None:
    tensors = {
        name: tensor if "norm" in name else tensor.to(dtype)
        for name, tensor in tensors_of(folder).items()
    }
    save_file(tensors, folder / "model.safetensors")
    set_config(folder, dtype=None)
    assert read(folder)[1] == dtype
    assert read(folder, "float32")[1] == torch.float32
    set_config(folder, torch_dtype="float32")
    assert read(folder)[1] == torch.float32


def make_float16(folder: Path) -> None:
    tensors = {name: tensor.half() for name, tensor in tensors_of(folder).items()}
    save_file(tensors, folder / "model.safetensors")
    set_config(folder, dtype="float16")


def test_a_float16_checkpoint_runs_on_a_cpu_in_bfloat16_and_the_log_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_float16(folder)
    with caplog.at_level(logging.INFO):
        worker = Worker(make_worker_config(folder=str(folder), load_format="auto"))
    assert [record.message for record in caplog.records if "float16" in record.message] == [
        "the checkpoint's float16 is computed in bfloat16 here; --dtype float32 keeps every digit"
    ]
    worker.load_model()
    assert worker.profile().dtype == "bfloat16"
    check_engine(EngineConfig(model=str(folder), device="cpu"))


def test_a_float16_checkpoint_in_float32_says_what_transformers_says(folder: Path) -> None:
    make_float16(folder)
    assert says_what_transformers_says(folder, "float32")


def test_float16_is_for_cuda_and_for_models_that_it_holds() -> None:
    cuda = torch.device("cuda", 0)
    llama, gemma = parse("Llama", torch_dtype="float16"), parse("Gemma2", torch_dtype="float16")
    for name in ("auto", "float16"):
        assert select_dtype(name, llama, cuda) == torch.float16
    assert select_dtype("auto", gemma, cuda) == torch.bfloat16
    assert select_dtype("auto", llama, CPU) == torch.bfloat16
    with pytest.raises(ConfigError, match="--dtype float16: not on cpu; use --dtype auto"):
        select_dtype("float16", llama, CPU)
    with pytest.raises(ConfigError, match="Gemma2ForCausalLM exceed its range"):
        select_dtype("float16", gemma, cuda)
    with pytest.raises(ModelFileError, match="'float64' is not implemented"):
        select_dtype("auto", parse("Llama", torch_dtype="float64"), cuda)


def test_scales_of_a_quantized_cache_take_what_its_device_copies_at_once() -> None:
    for device, scale_dtype in ((torch.device("cuda", 0), torch.float32), (CPU, torch.bfloat16)):
        stored = select_kv_format("int8", torch.bfloat16, device)
        assert (stored.dtype, stored.scale_dtype) == (torch.int8, scale_dtype)
        assert stored.bytes_per_head(128) == 128 + scale_dtype.itemsize
        assert select_kv_format("auto", torch.bfloat16, device).scale_dtype is None


ABSURD = [
    {"vocab_size": 10**9}, {"hidden_size": 4 * 10**8, "head_dim": 16}, {"hidden_size": 2**31 - 4},
    {"intermediate_size": 10**9}, {"num_hidden_layers": 10**9},
    {"num_attention_heads": 10**9, "head_dim": 16}, {"head_dim": 10**9},
    {"num_attention_heads": 2 * 10**9, "num_key_value_heads": 10**9, "head_dim": 2**30},
    {"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 4}, {"max_position_embeddings": 10**9},
    {"num_hidden_layers": 1024, "hidden_size": 2**31 - 4, "intermediate_size": 2**31 - 1},
]  # fmt: skip


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("changes", ABSURD, ids=str)
def test_absurd_sizes_are_refused_before_memory_is_taken(
    folder: Path, changes: dict, load_format: Any
) -> None:
    set_config(folder, layer_types=None, **changes)
    tracemalloc.start()
    with pytest.raises(StartError) as checking:
        check_engine(EngineConfig(model=str(folder), device="cpu", load_format=load_format))
    if "max_position_embeddings" not in changes:  # of which the KV cache is to tell
        with pytest.raises(StartError) as starting:
            Worker(make_worker_config(folder=str(folder), load_format=load_format))
        assert type(starting.value) is type(checking.value)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(checking.value, ModelFileError | CacheMemoryError)
    assert peak_bytes < 50e6


def test_as_many_layers_as_config_json_says_are_in_the_files(folder: Path) -> None:
    set_config(folder, layer_types=None)
    for num_layers in (2, 4, 1000):
        set_config(folder, num_hidden_layers=num_layers)
        with pytest.raises(ModelFileError, match=f"say {num_layers} layers, .* weights of 3"):
            read(folder)
