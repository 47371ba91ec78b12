"""Random weights for `--load-format dummy`: speed and memory of a model without its checkpoint.

A value depends on seed, tensor name and its place in the whole tensor, never on what a rank keeps:
at any tensor parallel size it is the same model. GPUs draw their own numbers, and so another model
than CPUs do: one core would take a minute for eight billion. Scaled so that activations neither
vanish nor overflow.
"""

from __future__ import annotations

import math
import zlib

import numpy as np
import torch
from torch import Tensor

from nanocore.worker.loading.weights import Entries, LoadedSlice, PendingOwners

_INT16_STD = 2**16 / math.sqrt(12)
_NORM_STD = 0.1
_BIAS_STD = 0.02


def fill_dummy_weights(entries: Entries, seed: int = 0) -> None:
    """Fill every part of all entries.

    Matrices have mean 0 and standard deviation 1 / sqrt(last dimension), biases 0 and 0.02, other
    vectors (norms) 1 and 0.1; all are uniform. Offsets change nothing: a norm is near 1 whatever a
    checkpoint would store. Memory beside the parameters: 1.5 MiB on a CPU and 16 MiB on a GPU, or
    six or four bytes per element of a tensor's row, if that is more. Owners are told of what is
    filled, and get floats alone: no tensor has a dtype that it must have.
    """
    unfilled = PendingOwners(part.owner for entry in entries.values() for part in entry.parts)
    for name, entry in entries.items():
        assert entry.dtype is None, f"{name} is no float"
        if name.endswith("bias"):
            std, mean = _BIAS_STD, 0.0
        elif len(entry.shape) < 2:
            std, mean = _NORM_STD, 1.0
        else:
            std, mean = 1 / math.sqrt(entry.shape[-1]), 0.0
        for part in entry.parts:
            _fill(part, entry.shape, (seed, zlib.crc32(name.encode())), std, mean)
            unfilled.count_filled(part.owner)


def _fill(
    part: LoadedSlice, shape: tuple[int, ...], seeds: tuple[int, int], std: float, mean: float
) -> None:
    num_rows, *row_shape = shape or (1,)
    start, stop, _ = part.index[0].indices(num_rows) if part.index else (0, num_rows, 1)
    memory = part.memory()
    target = memory.view(1) if not shape else memory
    draw = draw_on_host if target.device.type == "cpu" else draw_on_device
    block_rows = max(1, BLOCK_NUMEL[draw] // max(1, math.prod(row_shape)))
    for block in range(start // block_rows, -(-stop // block_rows)):
        first = block * block_rows
        count = min(block_rows, num_rows - first)
        values = draw((count, *row_shape), (*seeds, block), target.device)
        values.mul_(std).add_(mean)
        low, high = max(start, first), min(stop, first + count)
        rows = values[low - first : high - first]
        target[low - start : high - start].copy_(rows[(slice(None), *part.index[1:])])


def draw_on_host(shape: tuple[int, ...], seeds: tuple[int, ...], device: torch.device) -> Tensor:
    """float32 with mean 0 and standard deviation 1. Sixteen random bits per value: more than a
    bfloat16 can hold, and cheap."""
    numel = math.prod(shape)
    words = np.random.SFC64(seeds).random_raw(-(-numel // 4))
    values = torch.from_numpy(words.view(np.int16)[:numel]).to(torch.float32)
    return values.mul_(1 / _INT16_STD).view(shape)


def draw_on_device(shape: tuple[int, ...], seeds: tuple[int, ...], device: torch.device) -> Tensor:
    """Draw uniform numbers as `draw_on_host` does, by the device's own generator."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(repr(seeds).encode()))
    values = torch.empty(shape, device=device)
    return values.uniform_(-math.sqrt(3), math.sqrt(3), generator=generator)


BLOCK_NUMEL = {draw_on_host: 2**18, draw_on_device: 2**22}
