"""Interfaces between ranks: those that share a model's layers, and pipeline stages.

`shared_memory` implements it through shared memory between processes on a CPU,
`process_group` through torch.distributed (NCCL on CUDA). All ranks of a group make the same calls
in the same order; a rank that stops is noticed by the executor, which watches over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from nanocore.kernels.step import RankGroup


class Communicator(RankGroup, Protocol):
    """A group of `size` ranks, of which this is number `rank`."""

    @property
    def rank(self) -> int: ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape]: x of every rank, in the order of ranks. Shapes are equal on all."""


@dataclass(eq=False)
class SingleRank:
    """Implements `Communicator` for a rank that has its layers for itself.

    In a dry run, where nothing is exchanged, it stands for any rank of any number.
    """

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]


class Channel(Protocol):
    """Passes hidden states from a rank to the one behind it in the next stage, in order."""

    def send(self, tensor: Tensor) -> None: ...

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...


class StageLinks(msgspec.Struct, frozen=True):
    """A rank's connections to the stages before and after its own, where there are any."""

    receive: Channel | None = None
    send: Channel | None = None
