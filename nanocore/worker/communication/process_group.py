"""Ranks on CUDA devices of one host: torch.distributed with NCCL, joined through a file.

The world is all ranks of the engine; tensor parallel groups are parts of it, and pipeline stages
send to each other across them. Rendezvous is a FileStore; what NCCL (or gloo, in tests) connects by
itself is bound to the loopback interface, so nothing is reachable from outside the host.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

_LOOPBACK = "lo"


class ProcessGroupCommunicator:
    """Implements `Communicator` for the one group of `groups` that this rank is in.

    Args:
        store_path: a file that no other engine uses, the same for all ranks, in a private folder.
        world_rank, world_size: this rank, and how many there are. groups: disjoint lists of world
        ranks, the same on all ranks, that reduce among themselves. device: this rank's; NCCL is
        used on CUDA, gloo on a CPU. A process can be in one world only.
    """

    def __init__(
        self,
        store_path: Path,
        world_rank: int,
        world_size: int,
        groups: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        is_cuda = device.type == "cuda"
        # Read when the backend opens its sockets. A user's own setting stands.
        os.environ.setdefault("NCCL_SOCKET_IFNAME" if is_cuda else "GLOO_SOCKET_IFNAME", _LOOPBACK)
        if is_cuda:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=dist.FileStore(str(store_path), world_size),  # type: ignore[attr-defined]
            rank=world_rank,
            world_size=world_size,
        )
        self.device = device
        for ranks in groups:
            # Every rank takes part in making every group, its own or not.
            group = dist.new_group(list(ranks))
            if world_rank in ranks:
                self.rank, self.size = list(ranks).index(world_rank), len(ranks)
                self._group = group
        assert hasattr(self, "_group"), f"rank {world_rank} is in none of {groups}"

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the group's ranks; overwrites x."""
        x = x.contiguous()
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape]: x of every rank of the group, in the order of ranks."""
        out = x.new_empty(self.size, *x.shape)
        dist.all_gather_into_tensor(out.view(-1), x.contiguous().view(-1), group=self._group)
        return out


class ProcessGroupChannel:
    """Tensors to and from one other rank of the world, which has a channel to us, in order."""

    def __init__(self, peer: int, device: torch.device) -> None:
        self._peer = peer
        self._device = device

    def send(self, x: Tensor) -> None:
        """Send x; on CUDA this waits on the stream, not on the host."""
        dist.send(x.contiguous(), self._peer)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next tensor that was sent, which has this shape and dtype."""
        out = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(out, self._peer)
        return out
