"""The KV memory: what lies where in a block, how much it is, and that it is taken when used."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from nanocore.kernels.kv_quantization import KVCacheFormat, kv_cache_format
from nanocore.worker.dry_run import dry_run
from nanocore.worker.memory.kv_groups import CacheKind
from nanocore.worker.memory.kv_memory import ALIGNMENT_BYTES, KVLayout, KVMemory, KVSpec
from nanocore.worker.worker import Worker
from tests.kernels.layered_cache import parts
from tests.worker.configs import make_worker_config

CPU = torch.device("cpu")
FORMATS = {
    "float32": KVCacheFormat(torch.float32),
    "bfloat16": KVCacheFormat(torch.bfloat16),
    "int8": kv_cache_format("int8", torch.bfloat16),
    "fp8": kv_cache_format("fp8", torch.bfloat16),
    "fp8 on CUDA": kv_cache_format("fp8", torch.bfloat16, "cuda"),
}


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_all_layers_of_a_block_lie_side_by_side_in_it(form: KVCacheFormat, block_size: int) -> None:
    specs = [KVSpec(2, 64), KVSpec(1, 40), KVSpec(3, 128)]
    memory = KVMemory(KVLayout(specs, form, block_size), 3, CPU)
    block_bytes = memory.blocks[0][0].nbytes
    assert memory.blocks[0].nbytes == 3 * block_bytes
    assert block_bytes % ALIGNMENT_BYTES == 0
    assert memory.blocks[0][0].data_ptr() % ALIGNMENT_BYTES == 0
    end = memory.blocks[0][1].data_ptr()
    assert end == memory.blocks[0][0].data_ptr() + block_bytes
    for spec, cache in zip(specs, memory.layers(), strict=True):
        assert cache.block_bytes == block_bytes
        assert cache.k_NSKD.shape == (3, block_size, spec.num_kv_heads, spec.head_dim)
        for x in parts(cache):
            alignment = ALIGNMENT_BYTES if x.dim() == 4 else 16
            assert x[1].data_ptr() % alignment == 0
            assert end <= x[1].data_ptr() < end + ALIGNMENT_BYTES
            end = x[1].data_ptr() + x[1].nbytes
    assert end <= memory.blocks[0][2].data_ptr() < end + ALIGNMENT_BYTES
    assert not any(memory.blocks[0][block_id].any() for block_id in range(3))


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_single_block_has_the_strides_of_many(form: KVCacheFormat) -> None:
    layout = KVLayout([KVSpec(2, 16)] * 2, form, 16)
    (one, _), (many, _) = (KVMemory(layout, n, CPU).layers() for n in (1, 3))
    assert [x.stride() for x in parts(one)] == [x.stride() for x in parts(many)]
    assert one.block_bytes == layout.block_bytes[CacheKind()]


def test_without_need_of_alignment_a_block_is_what_its_layers_take() -> None:
    form = FORMATS["int8"]
    layout = KVLayout([KVSpec(1, 128)] * 3, form, 16)
    assert layout.block_bytes[CacheKind()] == 3 * 2 * 16 * form.bytes_per_head(128)


@pytest.mark.parametrize(("num_layers", "spec"), [
    (16, KVSpec(4, 64)), (28, KVSpec(8, 128)), (32, KVSpec(8, 128)), (36, KVSpec(8, 128)),
])  # fmt: skip
def test_large_blocks_do_not_lie_at_multiples_of_a_power_of_two(
    num_layers: int, spec: KVSpec
) -> None:
    layout = KVLayout([spec] * num_layers, FORMATS["bfloat16"], 16)
    least_bytes = num_layers * 2 * 16 * spec.num_kv_heads * spec.head_dim * 2
    assert least_bytes % 2**16 == 0
    assert layout.block_bytes[CacheKind()] % 2**11 != 0
    assert least_bytes < layout.block_bytes[CacheKind()] < 1.01 * least_bytes


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_what_is_allocated_is_what_was_told(tiny_model: Path, kv_cache_dtype: str) -> None:
    config = make_worker_config(
        folder=str(tiny_model), kv_cache_dtype=kv_cache_dtype, load_format="auto"
    )
    worker = Worker(config)
    worker.load_model()
    info, (guess,) = worker.profile(), dry_run(config)
    worker.allocate_kv_cache(11, 64)
    memory = worker.runner.kv_memory
    assert (
        memory.blocks[0].nbytes
        == 11 * info.kv_groups[0].block_bytes
        == 11 * guess.kv_groups[0].block_bytes
    )
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for cache in memory.layers()
        for x in parts(cache)
    }
    assert list(storages.values()) == [memory.blocks[0].nbytes]


def test_memory_on_a_cpu_is_taken_when_it_is_used() -> None:
    layout = KVLayout([KVSpec(8, 128)] * 4, FORMATS["bfloat16"], 16)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = KVMemory(layout, (1 << 31) // layout.block_bytes[CacheKind()], CPU)
    for block_id in (0, 500, 1000):
        memory.blocks[0][block_id].fill_(1)
    taken = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert taken < 1 << 27
