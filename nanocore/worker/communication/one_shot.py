"""All-reduce of small tensors in one kernel: a rank reads all others' memory and sums it itself.

Below some hundred kilobytes NCCL's all-reduce waits for its own hand-overs; where GPUs can read
each other's memory one kernel does (TensorRT-LLM and vLLM have such; here it is torch's symmetric
memory). Whether it works is tried at the start, and NCCL does it all otherwise. It has not been run
on several GPUs yet.
"""

from __future__ import annotations

import logging
from typing import Final

import torch
from torch import Tensor

from nanocore.worker.communication.communicator import Communicator
from nanocore.worker.communication.process_group import ProcessGroupCommunicator

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
        self._group, self._buffer = group, buffer
        self.rank, self.size = group.rank, group.size

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
        logger.warning("all-reduce by NCCL alone: sums in one kernel came out wrong")
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
