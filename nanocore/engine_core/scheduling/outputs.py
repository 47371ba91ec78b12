"""What a step produced, split into one columnar OUTPUT per client.

Built on the step loop from the rows that sampled; the io thread only encodes and sends it, or
merges what a slow client has yet to get.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from nanocore.engine_core.scheduling.logprob_columns import LogprobColumns
from nanocore.engine_core.scheduling.spans import IntArray, places_of
from nanocore.engine_core.scheduling.token_columns import TokenColumns
from nanocore.protocol.messages import Event


@dataclass(slots=True)
class ClientOutput:
    """One client's share of a step.

    tokens: by handle, uint32. prompt_logprobs: likewise, a request's prompt tokens in their order.
    """

    client: int
    tokens: TokenColumns
    events: list[Event] = field(default_factory=list)
    prompt_logprobs: LogprobColumns | None = None

    @property
    def num_logprobs_bytes(self) -> int:
        """Of all log probabilities and embeddings, as they travel."""
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
    """Group a step's tokens, and its (client, event) and (client, entries) pairs, by client.

    clients: of each owner of tokens; or the one client that all belong to.
    """
    outputs: dict[int, ClientOutput] = {}
    if isinstance(clients, int):
        if len(tokens.owners):
            outputs[clients] = ClientOutput(clients, tokens)
    elif len(clients):
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
    """Group (client, event) pairs by client: outputs without tokens."""
    outputs: dict[int, ClientOutput] = {}
    _add_events(outputs, events)
    return list(outputs.values())


def _split_logprobs(
    outputs: dict[int, ClientOutput], clients: IntArray, owners: IntArray, entries: LogprobColumns
) -> None:
    """Give each client's tokens their entries. clients: of each of these owners of tokens."""
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
