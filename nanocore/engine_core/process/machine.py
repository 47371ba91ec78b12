"""How fast each rank's part of the machine is, measured by ranks or in this process."""

from __future__ import annotations

from typing import Final

import torch

from nanocore.worker.machine_speed import STRETCH_S, measure_speed
from nanocore.worker.model_cost import MachineSpeed
from nanocore.worker.rank_messages import WorkerInfo

_ROOM_SHARE: Final = 8
"""Of what a rank could have, to measure in: one that is short of memory starts all the same."""


def machine_speeds(ranks: list[WorkerInfo], stretch_s: float = STRETCH_S) -> list[MachineSpeed]:
    """Of each rank, in order, while the others are busy, too.

    A GPU is its rank's alone; ranks that have loaded have measured theirs, and of a dry run's the
    first stands for all. The CPU's cores are shared evenly, and measured here, all at once.

    Args:
        stretch_s: see `measure_speed`.
    """
    measured = [rank.speed for rank in ranks if rank.speed is not None]
    if measured:
        return measured
    device, dtype = torch.device(ranks[0].device), getattr(torch, ranks[0].dtype)
    read_bytes = [int(rank.cost.read_weight_bytes(1)) for rank in ranks if rank.cost is not None]
    if device.type != "cpu":
        return [measure_speed(device, dtype, max(read_bytes), stretch_s)] * len(ranks)
    room_bytes = min(rank.memory_bytes for rank in ranks) // _ROOM_SHARE
    whole = measure_speed(device, dtype, sum(read_bytes), stretch_s, room_bytes)
    return [whole.shared(len(ranks))] * len(ranks)
