"""Sizes that suit one kind of device and not another: a GPU wants more work at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Parameters of an engine that are left open until its device is known."""

    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048


CPU_SIZES: Final = Sizes()
CUDA_SIZES: Final = Sizes(block_size=64, max_num_batched_tokens=8192)
FLASH_BLOCK_SIZE: Final = 256
"""What any flash-attn takes."""
