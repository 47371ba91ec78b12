"""What a step produced, split into one columnar OUTPUT per client.

Built on the step loop from the rows that sampled; the io thread only encodes and sends it, or
merges what a slow client has yet to get.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.scheduling.token_columns import (
    EMPTY_COLUMNS,
    IntArray,
    NumberColumns,
    TokenColumns,
)
from nanocore.protocol.messages import Event


@dataclass(slots=True)
class ClientOutput:
    """One client's share of a step.

    handles: uint32 [n]. token_ids: int32 [tokens], handle by handle. counts: int [n], tokens per
    handle, each at least 1; None: one each. columns: float32 [tokens] each, by name; the wire has
    no field for them yet.
    """

    client: int
    handles: NDArray[np.uint32]
    token_ids: NDArray[np.int32]
    events: list[Event] = field(default_factory=list)
    counts: IntArray | None = None
    columns: NumberColumns = field(default_factory=dict)

    def tokens_by_handle(self) -> dict[int, list[int]]:
        """The tokens of each request."""
        parts: dict[int, list[int]] = {}
        handles = self.handles if self.counts is None else np.repeat(self.handles, self.counts)
        for handle, token_id in zip(handles.tolist(), self.token_ids.tolist(), strict=True):
            parts.setdefault(handle, []).append(token_id)
        return parts


def split_by_client(
    clients: IntArray | int, tokens: TokenColumns, events: list[tuple[int, Event]]
) -> list[ClientOutput]:
    """Group a step's columns, and its (client, event) pairs, by client.

    clients: of each owner of tokens, or the one client that all belong to. tokens: by handle.
    """
    outputs: dict[int, ClientOutput] = {}
    if isinstance(clients, int):
        if len(tokens.owners):
            outputs[clients] = _output(clients, tokens)
    else:
        order = np.argsort(clients, kind="stable")
        clients = clients[order]
        starts = np.flatnonzero(np.diff(clients, prepend=-1))
        for start, end in pairwise([*starts.tolist(), len(order)]):
            client = int(clients[start])
            outputs[client] = _output(client, tokens.take(order[start:end]))
    for client, event in events:
        outputs.setdefault(client, _output(client, EMPTY_COLUMNS)).events.append(event)
    return list(outputs.values())


def split_events(events: list[tuple[int, Event]]) -> list[ClientOutput]:
    """Group (client, event) pairs by client: outputs without tokens."""
    return split_by_client(0, EMPTY_COLUMNS, events)


def _output(client: int, tokens: TokenColumns) -> ClientOutput:
    handles, token_ids, counts, columns = tokens
    return ClientOutput(client, handles.view(np.uint32), token_ids, counts=counts, columns=columns)
