"""How a rank is connected to the others, by the kind of device they compute on."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from nanocore.worker.communication.communicator import Communicator, SingleRank, StageLinks
from nanocore.worker.communication.shared_memory import BUFFER_BYTES, ShmChannel, ShmCommunicator
from nanocore.worker.rank_messages import RankStart, WorkerConfig

CHANNEL_DEPTH: Final = 2
"""Steps whose hidden states can wait between two stages."""


class RankLinks(StageLinks, frozen=True):
    """tp: the ranks that share this one's layers."""

    tp: Communicator = SingleRank()


def channel_buffer_bytes(config: WorkerConfig, hidden_size: int) -> int:
    """Room for the hidden states of the largest step, in any dtype."""
    return 8 * -(-config.max_num_batched_tokens * hidden_size // 2)


def connect(start: RankStart, device: torch.device, hidden_size: int) -> RankLinks:
    """Join the other ranks; on CUDA all must call it."""
    config = start.config
    if device.type == "cuda":
        return _connect_cuda(start, device)
    tp: Communicator = SingleRank()
    if config.tensor_parallel_size > 1:
        rank, size = start.rank % config.tensor_parallel_size, config.tensor_parallel_size
        tp = ShmCommunicator(start.reduce_fd, rank, size, BUFFER_BYTES)
    buffer_bytes = channel_buffer_bytes(config, hidden_size)

    def channel(fd: int) -> ShmChannel | None:
        return None if fd < 0 else ShmChannel(fd, buffer_bytes, CHANNEL_DEPTH)

    return RankLinks(channel(start.receive_fd), channel(start.send_fd), tp)


def _connect_cuda(start: RankStart, device: torch.device) -> RankLinks:
    # It imports torch.distributed, which is a tenth of a second of everyone's start.
    from nanocore.worker.communication.process_group import (
        ProcessGroupChannel,
        ProcessGroupCommunicator,
    )

    tp_size, pp_size = start.config.tensor_parallel_size, start.config.pipeline_parallel_size
    rank, stage = start.rank, start.rank // tp_size
    stages = [list(range(i * tp_size, (i + 1) * tp_size)) for i in range(pp_size)]
    group = ProcessGroupCommunicator(
        Path(start.rendezvous), rank, start.config.num_ranks, stages, device
    )
    return RankLinks(
        receive=ProcessGroupChannel(rank - tp_size, device) if stage > 0 else None,
        send=ProcessGroupChannel(rank + tp_size, device) if stage < pp_size - 1 else None,
        tp=group if tp_size > 1 else SingleRank(),
    )
