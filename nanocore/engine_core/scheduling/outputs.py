"""What a step produced, split into one columnar OUTPUT per client.

Built on the step loop from the rows that sampled; the io thread only encodes and sends it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.scheduling.row_table import IntArray
from nanocore.protocol.messages import Event


@dataclass(slots=True)
class ClientOutput:
    """One client's share of a step. handles: uint32 [n]; token_ids: int32 [n], one per handle."""

    client: int
    handles: NDArray[np.uint32]
    token_ids: NDArray[np.int32]
    events: list[Event] = field(default_factory=list)


def split_by_client(
    clients: IntArray | int,
    handles: NDArray[np.uint32],
    token_ids: NDArray[np.int32],
    events: list[tuple[int, Event]],
) -> list[ClientOutput]:
    """Group a step's columns, and its (client, event) pairs, by client.

    clients: of each entry of the columns, or the one client that all belong to.
    """
    outputs: dict[int, ClientOutput] = {}
    if isinstance(clients, int):
        if len(handles):
            outputs[clients] = ClientOutput(clients, handles, token_ids)
    else:
        order = np.argsort(clients, kind="stable")
        clients = clients[order]
        starts = np.flatnonzero(np.diff(clients, prepend=-1))
        for start, end in pairwise([*starts.tolist(), len(order)]):
            client, mine = int(clients[start]), order[start:end]
            outputs[client] = ClientOutput(client, handles[mine], token_ids[mine])
    for client, event in events:
        outputs.setdefault(client, _empty(client)).events.append(event)
    return list(outputs.values())


def split_events(events: list[tuple[int, Event]]) -> list[ClientOutput]:
    """Group (client, event) pairs by client: outputs without tokens."""
    return split_by_client(0, np.zeros(0, np.uint32), np.zeros(0, np.int32), events)


def _empty(client: int) -> ClientOutput:
    return ClientOutput(client, np.zeros(0, np.uint32), np.zeros(0, np.int32))
