"""Blocks of every served type, against the dequantization of llama.cpp's own Python package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from nanocore.worker.loading.gguf.gguf_format import SERVED_TYPES, unpack_blocks
from nanocore.worker.loading.gguf.header import TENSOR_TYPES

BY_NAME = {kind.name: kind for kind in TENSOR_TYPES.values()}


def test_types_are_those_of_the_package() -> None:
    ours = {n: (kind.name, kind.block_numel, kind.block_bytes) for n, kind in TENSOR_TYPES.items()}
    for number, sizes in gguf.GGML_QUANT_SIZES.items():
        assert ours[int(number)] == (number.name, *sizes)


@pytest.mark.parametrize("name", SERVED_TYPES)
def test_any_block_is_what_the_package_says_to_the_bit(name: str) -> None:
    kind = BY_NAME[name]
    random = np.random.default_rng(seed_of(name))
    raw = random.integers(0, 256, (7, 3 * kind.block_bytes), dtype=np.uint8)
    ours = unpack_blocks(kind, torch.from_numpy(raw)).dequantize().numpy()
    with np.errstate(all="ignore"):
        theirs = gguf.dequantize(raw, gguf.GGMLQuantizationType[name])
    assert np.isfinite(theirs).mean() > 0.7  # random scales are sometimes no numbers
    np.testing.assert_array_equal(ours, theirs)


def seed_of(name: str) -> int:
    return sum(name.encode())
