"""A block is one span of bytes: copied to another block it is all that attention needs of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.attention_step import make_metadata
from nanocore.kernels.attention import AttentionMetadata, AttentionSpec, Rotary
from nanocore.kernels.cpu.library import find_library
from nanocore.kernels.interface import Kernels
from nanocore.kernels.kv_quantization import QUANTIZED_KV_CACHES, KVCacheFormat, kv_cache_format
from nanocore.kernels.select import select_kernels
from nanocore.kernels.triton.triton_backend import TritonKernels
from nanocore.worker.memory.kv_memory import KVLayout, KVMemory, KVSpec
from tests.campaign import in_campaign
from tests.kernels.layered_cache import parts

BLOCK_SIZE, NUM_BLOCKS, LENGTH, HEADS = 16, 6, 39, 4
SPECS = [KVSpec(2, 32), KVSpec(4, 16), KVSpec(1, 32)]
CPU = torch.device("cpu")


def make_kernels(name: str) -> Kernels:
    if name == "triton":
        return TritonKernels(CPU)
    if name == "cpu" and find_library() is None:
        pytest.skip("no native kernels are compiled")
    return select_kernels(name, CPU)


def make_memory(dtype: str, kernels: Kernels) -> KVMemory:
    device_type = "cuda" if kernels.name == "triton" else "cpu"
    if dtype in QUANTIZED_KV_CACHES:
        form = kv_cache_format(dtype, torch.float32, device_type)
    else:
        form = KVCacheFormat(getattr(torch, dtype))
    memory = KVMemory(KVLayout(SPECS, form, BLOCK_SIZE), NUM_BLOCKS, CPU)
    for block_id in range(NUM_BLOCKS):
        memory.blocks[0][block_id].fill_(255)
    return memory


def metadata_of(blocks: list[int]) -> AttentionMetadata:
    table_BM = torch.tensor([blocks], dtype=torch.int32)
    return make_metadata([(LENGTH, LENGTH)], table_BM, BLOCK_SIZE)


def store(kernels: Kernels, memory: KVMemory, layer: int, metadata: AttentionMetadata) -> Tensor:
    """K and V of the prompt to the layer's cache; its queries."""
    cache, spec = memory.layer(layer), SPECS[layer]
    dtype = torch.float32 if cache.k_scale_NSK is not None else cache.k_NSKD.dtype
    generator = torch.Generator().manual_seed(layer)
    columns = (HEADS + 2 * spec.num_kv_heads) * spec.head_dim
    qkv = torch.randn(LENGTH, columns, generator=generator).to(dtype)
    angles = torch.outer(torch.arange(float(LENGTH)), 0.5 ** torch.arange(spec.head_dim // 2))
    rotary = Rotary(angles.cos().to(dtype), angles.sin().to(dtype))
    return kernels.rope_and_store_kv(qkv, HEADS, None, rotary, cache, metadata).clone()


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        *((name, dtype) for name in ("torch", "cpu") for dtype in ("float32", "bfloat16")),
        *((name, dtype) for name in ("torch", "cpu") for dtype in ("int8", "fp8")),
        *in_campaign(*(("triton", dtype) for dtype in ("float32", "int8", "fp8"))),
    ],
)
def test_a_block_is_moved_by_one_copy(backend: str, dtype: str) -> None:
    kernels = make_kernels(backend)
    memory, metadata = make_memory(dtype, kernels), metadata_of([4, 1, 3])
    q = [store(kernels, memory, layer, metadata) for layer in range(len(SPECS))]

    def attend(metadata: AttentionMetadata) -> list[Tensor]:
        return [
            kernels.paged_attention(
                q_THD, memory.layer(layer), metadata, AttentionSpec(SPECS[layer].head_dim ** -0.5)
            )
            for layer, q_THD in enumerate(q)
        ]

    before = attend(metadata)
    assert all(x.isfinite().all() for x in before)
    memory.blocks[0][5].copy_(memory.blocks[0][1])
    memory.blocks[0][1].fill_(1)
    moved = replace(metadata, block_table=torch.tensor([[4, 5, 3]], dtype=torch.int32))
    for result, expected in zip(attend(moved), before, strict=True):
        assert torch.equal(result, expected)
    assert not torch.equal(attend(metadata)[1], before[1])  # it is no longer where it was


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_sequences_are_rows_of_the_table_wherever_they_are(backend: str, window: int) -> None:
    kernels = make_kernels(backend)
    memory = make_memory("float32", kernels)
    for x in parts(memory.layer(0)):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(1)))
    seqs, rows_B = [(39, 1), (17, 1), (32, 9), (20, 20)], torch.tensor([5, 0, 6, 2])
    table = torch.randint(0, NUM_BLOCKS, (7, 4), dtype=torch.int32)
    there = make_metadata(seqs, table, num_padding=2, table_rows_B=rows_B)
    gathered = make_metadata(seqs, table[rows_B], num_padding=2)
    q_THD = torch.randn(33, HEADS, 32)
    spec = AttentionSpec(0.2, window)
    out, expected = (
        kernels.paged_attention(q_THD, memory.layer(0), metadata, spec)
        for metadata in (there, gathered)
    )
    assert torch.equal(out, expected)
    with pytest.raises(AssertionError, match="gathers rows"):
        make_kernels("triton").paged_attention(q_THD, memory.layer(0), there, spec)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("torch", "float32"),
        ("torch", "int8"),
        ("cpu", "bfloat16"),
        *in_campaign(("triton", "int8")),
    ],
)
@pytest.mark.parametrize("layer", range(len(SPECS)))
def test_a_layer_is_written_where_it_lies_and_nowhere_else(
    backend: str, dtype: str, layer: int
) -> None:
    kernels = make_kernels(backend)
    memory = make_memory(dtype, kernels)
    store(kernels, memory, layer, metadata_of([4, 1, 3]))
    for x in parts(memory.layer(layer)):
        x.view(torch.uint8).fill_(255)
    assert all((memory.blocks[0][block_id] == 255).all() for block_id in range(NUM_BLOCKS))
