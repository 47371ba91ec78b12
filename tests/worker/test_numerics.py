"""The numerics fingerprint: equal for what gives equal bits, and for nothing else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from nanocore.kernels.kv_quantization import kv_cache_format
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.worker.communication.shared_memory import BUFFER_BYTES, create_group_region
from nanocore.worker.config.generation_config import GenerationDefaults
from nanocore.worker.loading.checkpoint import INDEX_FILE
from nanocore.worker.loading.loader import load_weights
from nanocore.worker.loading.weights import LoadedSlice, TensorEntry, whole
from nanocore.worker.memory.kv_groups import CacheKind, LayerGroup
from nanocore.worker.models import load_model_config
from nanocore.worker.numerics import numerics_fingerprint, rank_numerics
from nanocore.worker.rank_messages import RankStart, WorkerConfig, WorkerInfo
from nanocore.worker.worker import Worker
from tests.kernels.cpu_case import runnable_libraries
from tests.model_families import BUILDERS
from tests.tiny_models import make_tiny_qwen3
from tests.worker.configs import make_worker_config
from tests.worker.lora_adapters import modules_of, write_adapter

WEIGHTS = "model.safetensors"
MAX_MODEL_LEN = 64
CHECKPOINTS = Path(__file__).parents[1] / "fixtures" / "checkpoints"

pytestmark = pytest.mark.skipif(
    not runnable_libraries(), reason="nanocore was installed without a C++ compiler"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_qwen3(tmp_path / "model", head_dim=16)


def fingerprint(folder: Path, **changes: Any) -> str | None:
    config = make_worker_config(**{"folder": str(folder), "load_format": "auto"} | changes)
    return fingerprint_of(config, [Worker(config)])


def fingerprint_of(config: WorkerConfig, ranks: list[Worker]) -> str | None:
    for rank in ranks:
        rank.load_model()
    infos = [rank.profile() for rank in ranks]
    model = load_model_config(Path(config.folder), config.hf_overrides)
    return numerics_fingerprint(infos, model, config.max_model_len)


def fingerprint_of_two_ranks(folder: Path) -> str | None:
    config = make_worker_config(folder=str(folder), load_format="auto", tensor_parallel_size=2)
    fd = create_group_region(2, BUFFER_BYTES)
    start = RankStart(
        config=config, rank=0, cores=[], board_fd=-1, reduce_fd=fd, receive_fd=-1, send_fd=-1,
        rendezvous="",
    )  # fmt: skip
    ranks = [Worker(config, msgspec.structs.replace(start, rank=rank)) for rank in range(2)]
    os.close(fd)
    return fingerprint_of(config, ranks)


def copy_with(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    copy = Path(shutil.copytree(folder, folder.with_name("changed")))
    tensors = load_file(copy / WEIGHTS)
    change(tensors)
    save_file(tensors, copy / WEIGHTS)
    return copy


def test_it_is_that_of_the_files_wherever_they_lie(model: Path) -> None:
    first = fingerprint(model)
    assert first is not None
    assert len(first) == 32
    assert fingerprint(Path(shutil.copytree(model, model.with_name("copy")))) == first


@pytest.mark.parametrize(
    "flags",
    [
        {"max_num_seqs": 7},
        {"max_num_batched_tokens": 512},
        {"block_size": 64},
        {"max_model_len": 128},
        {"enforce_eager": True},
        {"batch_invariant": True},
        {"async_scheduling": True},
        {"seed": 5},
        {"kv_cache_memory_bytes": 1 << 20},
        {"attention_backend": "cpu"},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_flags_that_decide_no_bits_leave_it(model: Path, flags: dict[str, Any]) -> None:
    assert fingerprint(model, **flags) == fingerprint(model)


@pytest.mark.parametrize(
    "flags",
    [
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"kv_cache_dtype": "int8"},
        {"hf_overrides": {"rope_theta": 20_000.0}},
        {"hf_overrides": {"rms_norm_eps": 1e-5}},
        {"load_format": "dummy"},
    ],
    ids=str,
)
def test_flags_that_decide_bits_change_it(model: Path, flags: dict[str, Any]) -> None:
    changed = fingerprint(model, **flags)
    assert changed is not None
    assert changed != fingerprint(model)


def test_whether_activations_are_quantized_changes_it(model: Path) -> None:
    kept = fingerprint(model, quantization="int4", activation_quantization="none")
    assert kept is not None
    assert kept != fingerprint(model, quantization="int4")


def test_what_is_said_of_equal_bytes_changes_it(tmp_path: Path) -> None:
    """GPTQ stored zero points less one before its second version."""
    folder = Path(shutil.copytree(CHECKPOINTS / "gptq-v2-desc-act-g32", tmp_path / "gptq"))
    first = fingerprint(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {"checkpoint_format": "gptq", "format": "gptq"}
    (folder / "config.json").write_text(json.dumps(config))
    assert first is not None
    assert fingerprint(folder) != first


def test_the_seed_of_dummy_weights_changes_it(model: Path) -> None:
    first, same, other = (fingerprint(model, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert first == same
    assert first != other


def test_one_bit_of_one_weight_changes_it(model: Path) -> None:
    def flip(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"].view(torch.uint8).view(-1)[-4] ^= 1

    assert fingerprint(copy_with(model, flip)) != fingerprint(model)


def test_tensors_that_change_places_change_it(model: Path) -> None:
    names = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(2)]

    def exchange(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update(zip(names, [tensors[name] for name in names[::-1]], strict=True))

    assert fingerprint(copy_with(model, exchange)) != fingerprint(model)


def test_how_tensors_are_dealt_out_to_files_leaves_it(model: Path) -> None:
    def split(tensors: dict[str, torch.Tensor]) -> None:
        rest = {name: tensors.pop(name) for name in sorted(tensors)[::2]}
        save_file(rest, model.with_name("rest.safetensors"))

    copy = copy_with(model, split)
    shutil.move(model.with_name("rest.safetensors"), copy / "b.safetensors")
    shutil.move(copy / WEIGHTS, copy / "a.safetensors")
    files = {
        name: f"{c}.safetensors" for c in "ab" for name in load_file(copy / f"{c}.safetensors")
    }
    (copy / INDEX_FILE).write_text(json.dumps({"weight_map": files}))
    assert fingerprint(copy) == fingerprint(model)


def test_how_far_the_model_is_stretched_changes_it_by_what_is_served(model: Path) -> None:
    """Dynamic NTK rotates by the served length, once it is more than the original one."""
    overrides = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    lengths = (64, 128, 2048, 4096)
    short, longer, long, longest = (
        fingerprint(model, hf_overrides=overrides, max_model_len=length) for length in lengths
    )
    assert short == longer
    assert len({short, long, longest}) == 3


def test_instruction_sets_have_their_own(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = list(runnable_libraries())
    found = set()
    for name in names:
        monkeypatch.setenv("NANOCORE_CPU_ISA", name)
        found.add(fingerprint(model))
    assert len(found) == len(names)


def test_two_ranks_have_another_one_and_always_the_same(model: Path) -> None:
    first = fingerprint_of_two_ranks(model)
    assert first is not None
    assert fingerprint_of_two_ranks(model) == first
    assert fingerprint(model) != first


def test_the_order_of_ranks_counts_and_one_without_leaves_none(model: Path) -> None:
    config = load_model_config(model)
    one, other, without = (
        WorkerInfo(
            device="cpu", dtype="float32", kernels="cpu", weight_bytes=1,
            kv_groups=[LayerGroup(CacheKind(), 1, 1)],
            available_kv_bytes=1, memory_bytes=1, numerics=numerics,
        )
        for numerics in ("1", "2", None)
    )  # fmt: skip
    both = numerics_fingerprint([one, other], config, MAX_MODEL_LEN)
    assert both != numerics_fingerprint([other, one], config, MAX_MODEL_LEN)
    assert numerics_fingerprint([one, without], config, MAX_MODEL_LEN) is None


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("qwen3", {"block_size": 24}),
        ("qwen3", {"attention_backend": "torch"}),
        ("narrow", {}),
    ],
    ids=str,
)
def test_an_engine_whose_bits_depend_on_the_batch_has_none(
    tmp_path: Path, family: str, flags: dict[str, Any]
) -> None:
    folder = make_tiny_qwen3(tmp_path, head_dim=24 if family == "narrow" else 16)
    assert fingerprint(folder, **flags) is None


def test_an_engine_with_experts_has_one(tmp_path: Path) -> None:
    folder = BUILDERS["qwen2_moe"](tmp_path)
    assert fingerprint(folder) is not None
    assert fingerprint(folder) != fingerprint(folder, quantization="int8")


class Triton(TorchKernels):
    name = "triton"


@pytest.mark.parametrize(
    ("flags", "has_one"),
    [
        ({}, False),
        ({"batch_invariant": True}, True),
        ({"batch_invariant": True, "tensor_parallel_size": 2}, True),
        ({"batch_invariant": True, "tensor_parallel_size": 4}, False),
    ],
    ids=str,
)
def test_on_cuda_it_takes_the_flag_and_sums_in_one_order(
    model: Path, flags: dict[str, Any], has_one: bool
) -> None:
    dtype = torch.bfloat16
    numerics = rank_numerics(
        make_worker_config(**flags), load_model_config(model), dtype, Triton(),
        kv_cache_format("auto", dtype, "cuda"), b"",
    )  # fmt: skip
    assert (numerics is not None) == has_one


@pytest.mark.parametrize(
    ("family", "part", "changes"),
    [
        ("granite", "", {"logits_divisor": 5.0}),
        ("granite", "", {"embedding_scale": 3.0}),
        ("gemma2", "", {"logits_softcap": 3.0}),
        ("gemma2", "", {"norms_are_whole": True}),
        ("gemma2", "attention", {"scale": 3.0}),
        ("smollm3", "attention", {"unrotated_layers": frozenset()}),
        ("gpt2", "mlp", {"activation": "silu"}),
        ("qwen2_moe", "moe", {"shared_inner_size": 3}),
    ],
)
def test_what_one_family_alone_has_changes_it(
    family: str, part: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = load_model_config(BUILDERS[family](tmp_path))
    kept = msgspec.structs.replace(config, generation=GenerationDefaults(ignored=("x",)))
    if part:
        changes = {part: msgspec.structs.replace(getattr(config, part), **changes)}
    changed = msgspec.structs.replace(config, **changes)
    flags = make_worker_config(batch_invariant=True)
    numerics = [
        rank_numerics(
            flags, model, torch.bfloat16, Triton(),
            kv_cache_format("auto", torch.bfloat16, "cuda"), b"",
        )
        for model in (config, kept, changed)
    ]  # fmt: skip
    assert None not in numerics
    assert numerics[0] == numerics[1] != numerics[2]


def test_a_digest_is_of_the_slices_that_a_rank_reads(tmp_path: Path) -> None:
    save_file({"a": torch.arange(8.0).view(4, 2)}, tmp_path / WEIGHTS)

    def digest_of(rows: slice) -> bytes:
        digest = xxhash.xxh3_128()
        target = torch.empty(rows.stop - rows.start, 2)
        load_weights(
            tmp_path, {"a": TensorEntry((4, 2), [LoadedSlice(target, (rows,))])}, str, False, digest
        )
        return digest.digest()

    first, second = digest_of(slice(0, 2)), digest_of(slice(2, 4))
    assert first != second
    assert first == digest_of(slice(0, 2))


def test_a_digest_is_of_what_files_hold_whatever_it_becomes(tmp_path: Path) -> None:
    save_file({"a": torch.arange(8.0)}, tmp_path / WEIGHTS)
    digests = set()
    for dtype in (torch.float32, torch.bfloat16):
        digest = xxhash.xxh3_128()
        load_weights(tmp_path, {"a": whole(torch.empty(8, dtype=dtype))}, str, False, digest)
        digests.add(digest.digest())
    assert len(digests) == 1


def test_a_merged_adapter_is_part_of_it(model: Path, tmp_path: Path) -> None:
    adapters = [str(tmp_path / name) for name in ("a", "b", "again")]
    for folder, alpha in zip(adapters, (6, 7, 6), strict=True):
        write_adapter(Path(folder), modules_of(model, ("q_proj", "v_proj")), lora_alpha=alpha)
    one, other, again = (fingerprint(model, merge_lora=folder) for folder in adapters)
    assert one == again
    assert len({None, fingerprint(model), one, other}) == 4
