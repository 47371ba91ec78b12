"""Ranks on CUDA devices of one host: torch.distributed with NCCL, joined through a file.

The world is all ranks of the engine; tensor parallel groups are parts of it, and pipeline stages
send to each other across them. Rendezvous is a FileStore; what NCCL (or gloo, in tests) connects by
itself is bound to the loopback interface, so nothing is reachable from outside the host. Where GPUs
can read each other's memory, small tensors are reduced in one kernel (torch's symmetric memory):
below some hundred kilobytes NCCL waits for its own hand-overs. It is tried at the start, and has
not been run on several GPUs yet.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from nanocore.worker.communication.communicator import Communicator

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
                # A string with a type of its own in some versions of torch.
                self.name: Any = group.group_name
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


logger = logging.getLogger(__name__)

MAX_BYTES: Final = 512 * 1024
"""Above, every rank reading everything costs more than NCCL's dealing it out."""

_DTYPES: Final = (torch.bfloat16, torch.float32)
OPERATION: Final = "one_shot_all_reduce_copy"


class OneShotCommunicator:
    """Implements `Communicator`: small sums at once, everything else through the group.

    Args:
        group: of the ranks. buffer: memory of MAX_BYTES that all of them can read, uint8.
    """

    def __init__(self, group: ProcessGroupCommunicator, buffer: Tensor) -> None:
        self._group = group
        self._buffer = buffer
        self.rank = group.rank
        self.size = group.size

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.nbytes > MAX_BYTES or x.dtype not in _DTYPES:
            return self._group.all_reduce(x)
        buffer = self._buffer.view(x.dtype)[: x.numel()].view(x.shape)
        reduce = getattr(torch.ops.symm_mem, OPERATION)
        return reduce(buffer, x.contiguous(), "sum", self._group.name)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._group.all_gather(x)


def with_one_shot(group: ProcessGroupCommunicator) -> Communicator:
    """The group with small sums in one kernel, if all of its ranks can; all must call it."""
    buffer, reason = shared_buffer(group)
    everyone = group.all_gather(torch.tensor([reason == ""], device=group.device))
    if not everyone.all():
        logger.info("all-reduce by NCCL alone: %s", reason or "another rank cannot share memory")
        return group
    assert buffer is not None, "or there would be a reason"
    communicator = OneShotCommunicator(group, buffer)
    if not _is_right(communicator, group):
        logger.warning("all-reduce by NCCL only: sums in one kernel came out wrong")
        return group
    logger.info("all-reduce of up to %d KiB in one kernel", MAX_BYTES // 1024)
    return communicator


def shared_buffer(group: ProcessGroupCommunicator) -> tuple[Tensor | None, str]:
    """(memory that all ranks can read, why there is none or "")."""
    if group.device.type != "cuda":
        return None, "the ranks are not on CUDA"
    try:
        import torch.distributed._symmetric_memory as symmetric_memory
    except ImportError:
        return None, "this torch has no symmetric memory"
    if not hasattr(torch.ops.symm_mem, OPERATION):
        return None, f"this torch has no {OPERATION}"
    peers = [i for i in range(torch.cuda.device_count()) if i != group.device.index]
    if not all(torch.cuda.can_device_access_peer(group.device, peer) for peer in peers):
        return None, "GPUs cannot read each other's memory"
    try:
        buffer = symmetric_memory.empty(MAX_BYTES, dtype=torch.uint8, device=group.device)
        symmetric_memory.rendezvous(buffer, group.name)
    except RuntimeError as error:  # of many kinds: drivers, containers, virtual machines
        return None, str(error).splitlines()[0]
    return buffer, ""


def _is_right(communicator: OneShotCommunicator, group: ProcessGroupCommunicator) -> bool:
    """Whether a sum is NCCL's but for rounding, and the same bits on every rank; all agree."""
    generator = torch.Generator().manual_seed(group.rank)
    x = torch.randn(64, 1024, generator=generator).to(group.device, torch.bfloat16)
    ours = communicator.all_reduce(x.clone())
    close = torch.allclose(ours.float(), group.all_reduce(x.float()), rtol=2e-2, atol=2e-2)
    same = (group.all_gather(ours) == ours).all()
    return bool(group.all_gather((same & close)[None]).all())
