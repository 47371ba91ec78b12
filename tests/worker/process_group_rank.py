"""One of three ranks: two that reduce, and a third; prints what it computed as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from nanocore.worker.communication.process_group import (
    ProcessGroupChannel,
    ProcessGroupCommunicator,
)

GROUPS = [[0, 1], [2]]


def listening_addresses() -> list[str]:
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(os.readlink(entry))
        except FileNotFoundError:
            continue  # the descriptor that reads the folder
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                addresses.append(fields[1].split(":")[0])
    return addresses


def main() -> None:
    store, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    communicator = ProcessGroupCommunicator(store, rank, 3, GROUPS, torch.device("cpu"))
    x = torch.full((2, 3), float(rank + 1))
    gathered = communicator.all_gather(torch.tensor([[rank, 7]]))
    half = communicator.all_reduce(torch.tensor([[1.0, 2.0]] * 2, dtype=torch.bfloat16).T)
    reduced = communicator.all_reduce(x)
    received = []
    if rank == 0:
        channel = ProcessGroupChannel(2, communicator.device)
        channel.send(reduced)
        channel.send(gathered.transpose(0, 1))
    elif rank == 2:
        channel = ProcessGroupChannel(0, communicator.device)
        received.append(channel.recv((2, 3), torch.float32).tolist())
        received.append(channel.recv((1, 2, 2), torch.int64).tolist())
    report = {
        "rank": [communicator.rank, communicator.size],
        "reduced": reduced.tolist(),
        "half": half.tolist(),
        "gathered": gathered.tolist(),
        "received": received,
        "listening": listening_addresses(),
    }
    dist.destroy_process_group()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
