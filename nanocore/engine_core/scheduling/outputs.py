"""What a step produced, split into one columnar OUTPUT per client.

Built on the step loop from the rows that sampled; the io thread only encodes and sends it, or
merges what a slow client has yet to get.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.scheduling.token_columns import IntArray, TokenColumns
from nanocore.protocol.messages import Event


@dataclass(slots=True)
class ClientOutput:
    """One client's share of a step.

    tokens: by handle, uint32. Their number columns are not sent: the wire has no field for them
    yet.
    """

    client: int
    tokens: TokenColumns
    events: list[Event] = field(default_factory=list)


def split_by_client(
    clients: IntArray | int,
    handles: NDArray[np.uint32],
    tokens: TokenColumns,
    events: list[tuple[int, Event]],
) -> list[ClientOutput]:
    """Group a step's tokens, and its (client, event) pairs, by client.

    clients, handles: of each owner of tokens; or the one client that all belong to.
    """
    outputs: dict[int, ClientOutput] = {}
    owned = TokenColumns(handles, tokens.token_ids, tokens.counts, tokens.columns)
    if isinstance(clients, int):
        if len(handles):
            outputs[clients] = ClientOutput(clients, owned)
    else:
        order = np.argsort(clients, kind="stable")
        clients = clients[order]
        starts = np.flatnonzero(np.diff(clients, prepend=-1))
        for start, end in pairwise([*starts.tolist(), len(order)]):
            client = int(clients[start])
            outputs[client] = ClientOutput(client, owned.take(order[start:end]))
    _add_events(outputs, events)
    return list(outputs.values())


def split_events(events: list[tuple[int, Event]]) -> list[ClientOutput]:
    """Group (client, event) pairs by client: outputs without tokens."""
    outputs: dict[int, ClientOutput] = {}
    _add_events(outputs, events)
    return list(outputs.values())


def _add_events(outputs: dict[int, ClientOutput], events: list[tuple[int, Event]]) -> None:
    for client, event in events:
        if client not in outputs:
            nothing = TokenColumns(np.zeros(0, np.uint32), np.zeros(0, np.int32))
            outputs[client] = ClientOutput(client, nothing)
        outputs[client].events.append(event)
