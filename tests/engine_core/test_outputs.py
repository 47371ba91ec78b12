"""A step's columns and events, split by client."""

from __future__ import annotations

import numpy as np

from nanocore.engine_core.scheduling.columns import LogprobColumns, TokenColumns
from nanocore.engine_core.scheduling.outputs import ClientOutput, split_by_client, split_events
from nanocore.protocol.messages import Event


def columns(outputs: list[ClientOutput]) -> dict[int, tuple[list[int], list[int], list[int]]]:
    """(handles, token ids, handles of events) by client."""
    return {
        output.client: (
            output.tokens.owners.tolist(),
            output.tokens.token_ids.tolist(),
            [event.handle for event in output.events],
        )
        for output in outputs
    }


def test_each_client_gets_its_own_rows_in_their_order_and_its_own_events() -> None:
    clients = np.array([2, 0, 2, 5, 0], np.int32)
    handles = np.array([10, 11, 12, 13, 14], np.uint32)
    token_ids = np.array([100, 101, 102, 103, 104], np.int32)
    events = [(5, Event(handle=13)), (0, Event(handle=14)), (9, Event(handle=15))]
    tokens = TokenColumns(handles, token_ids)
    assert columns(split_by_client(clients, tokens, events)) == {
        0: ([11, 14], [101, 104], [14]),
        2: ([10, 12], [100, 102], []),
        5: ([13], [103], [13]),
        9: ([], [], [15]),
    }


def test_each_token_keeps_its_log_probabilities_whatever_order_owners_are_in() -> None:
    owners = np.array([13, 10, 14, 11], np.uint32)
    clients = np.array([1, 0, 0, 1], np.int32)
    entries = LogprobColumns(
        owners=np.array([14, 11, 13, 14], np.uint32),
        ranks=np.array([1, 2, 3, 4]),
        counts=np.array([1, 2, 1, 1]),
        token_ids=np.array([5, 6, 7, 8, 9], np.int32),
        logprobs=np.zeros(5, np.float32),
    )
    tokens = TokenColumns(owners, np.arange(5, dtype=np.int32), np.array([1, 1, 2, 1]), entries)
    of_prompts = [(1, entries.take(np.array([1]))), (2, entries), (1, entries)]
    outputs = {one.client: one for one in split_by_client(clients, tokens, [], of_prompts)}
    said = {client: one.tokens.logprobs for client, one in outputs.items()}
    assert said[0] is not None
    assert said[1] is not None
    assert said[0].owners.tolist() == [14, 14]
    assert (said[0].ranks.tolist(), said[0].token_ids.tolist()) == ([1, 4], [5, 9])
    assert said[1].owners.tolist() == [11, 13]
    assert (said[1].ranks.tolist(), said[1].token_ids.tolist()) == ([2, 3], [6, 7, 8])
    assert said[2] is None
    assert outputs[1].prompt_logprobs is not None
    assert outputs[1].prompt_logprobs.owners.tolist() == [11, 14, 11, 13, 14]
    assert outputs[2].prompt_logprobs is entries


def test_a_step_of_many_clients_that_sampled_nothing_has_no_outputs() -> None:
    empty = np.zeros(0, np.int32)
    tokens = TokenColumns(empty, empty)
    assert split_by_client(empty, tokens, []) == []


def test_events_without_tokens_are_grouped_by_client() -> None:
    events = [(1, Event(handle=3)), (2, Event(handle=4)), (1, Event(handle=5))]
    assert columns(split_events(events)) == {1: ([], [], [3, 5]), 2: ([], [], [4])}
