"""A step's tokens and events, split into one columnar output per client.

Built on the step loop; the io thread only encodes and sends it, or merges outputs that wait for a
slow client.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
from msgspec.structs import replace

from nanocore.engine_core.scheduling.columns import (
    IntArray,
    LogprobColumns,
    TokenColumns,
    places_of,
)
from nanocore.protocol.messages import Event


class ClientOutput(msgspec.Struct):
    """One client's share of a step. Owners of tokens and of prompt_logprobs are handles, uint32."""

    client: int
    tokens: TokenColumns
    events: list[Event] = msgspec.field(default_factory=list)
    prompt_logprobs: LogprobColumns | None = None

    @property
    def num_logprobs_bytes(self) -> int:
        """Size of logprobs and embeddings on the wire."""
        tokens, prompts = self.tokens.logprobs, self.prompt_logprobs
        num_bytes = sum([len(event.embedding or b"") for event in self.events])
        num_bytes += 0 if tokens is None else tokens.num_bytes
        return num_bytes if prompts is None else num_bytes + prompts.num_bytes


def split_by_client(
    clients: IntArray | int,
    tokens: TokenColumns,
    events: list[tuple[int, Event]],
    prompt_logprobs: Sequence[tuple[int, LogprobColumns]] = (),
) -> list[ClientOutput]:
    """Group a step's tokens, (client, event) pairs and (client, logprobs) pairs by client.

    clients: the client of each owner of tokens, or the one client of all.
    """
    outputs: dict[int, ClientOutput] = {}
    if isinstance(clients, int):
        if len(tokens.owners):
            outputs[clients] = ClientOutput(clients, tokens)
    elif len(clients):
        # Sort once and cut, instead of one mask per client: there may be hundreds.
        order = np.argsort(clients, kind="stable")
        bare = tokens if tokens.logprobs is None else replace(tokens, logprobs=None)
        sorted_clients = clients[order]
        starts = np.flatnonzero(np.diff(sorted_clients, prepend=-1))
        for start, end in pairwise([*starts.tolist(), len(order)]):
            client = int(sorted_clients[start])
            outputs[client] = ClientOutput(client, bare.take(order[start:end]))
        if tokens.logprobs is not None:
            _split_logprobs(outputs, clients, tokens.owners, tokens.logprobs)
    for client, entries in prompt_logprobs:
        output = _output(outputs, client)
        parts = [one for one in (output.prompt_logprobs, entries) if one is not None]
        output.prompt_logprobs = LogprobColumns.joined(parts)
    _add_events(outputs, events)
    return list(outputs.values())


def split_events(events: list[tuple[int, Event]]) -> list[ClientOutput]:
    """Group (client, event) pairs by client, as outputs without tokens."""
    outputs: dict[int, ClientOutput] = {}
    _add_events(outputs, events)
    return list(outputs.values())


def _split_logprobs(
    outputs: dict[int, ClientOutput], clients: IntArray, owners: IntArray, entries: LogprobColumns
) -> None:
    """Add logprobs to the outputs. clients: the client of each owner."""
    clients_of_each = clients[places_of(entries.owners, owners)]
    for client in np.unique(clients_of_each).tolist():
        outputs[client].tokens.logprobs = entries.take(clients_of_each == client)


def _add_events(outputs: dict[int, ClientOutput], events: list[tuple[int, Event]]) -> None:
    for client, event in events:
        _output(outputs, client).events.append(event)


def _output(outputs: dict[int, ClientOutput], client: int) -> ClientOutput:
    if client not in outputs:
        nothing = TokenColumns(np.zeros(0, np.uint32), np.zeros(0, np.int32))
        outputs[client] = ClientOutput(client, nothing)
    return outputs[client]
