"""What a step produced, split into one columnar OUTPUT per client.

Built on the step loop from the rows that sampled; the io thread only encodes and sends it, or
merges what a slow client has yet to get.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.scheduling.token_columns import IntArray, NumberColumns, TokenColumns
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

    def __post_init__(self) -> None:
        if self.counts is not None and (self.counts == 1).all():
            self.counts = None

    def handle_of_each(self) -> NDArray[np.uint32]:
        """Whose each token is; uint32 [tokens]."""
        return self.handles if self.counts is None else np.repeat(self.handles, self.counts)

    def tokens_by_handle(self) -> dict[int, list[int]]:
        """Each request's tokens in this step, as lists; for reading one output at a time."""
        parts: dict[int, list[int]] = {}
        handles = self.handle_of_each().tolist()
        for handle, token_id in zip(handles, self.token_ids.tolist(), strict=True):
            parts.setdefault(handle, []).append(token_id)
        return parts


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
    if isinstance(clients, int):
        if len(handles):
            outputs[clients] = _output(clients, handles, tokens)
    else:
        order = np.argsort(clients, kind="stable")
        clients = clients[order]
        starts = np.flatnonzero(np.diff(clients, prepend=-1))
        for start, end in pairwise([*starts.tolist(), len(order)]):
            client, mine = int(clients[start]), order[start:end]
            outputs[client] = _output(client, handles[mine], tokens.take(mine))
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
            outputs[client] = ClientOutput(client, np.zeros(0, np.uint32), np.zeros(0, np.int32))
        outputs[client].events.append(event)


def _output(client: int, handles: NDArray[np.uint32], tokens: TokenColumns) -> ClientOutput:
    return ClientOutput(client, handles, tokens.token_ids, [], tokens.counts, tokens.columns)
