"""Answers of /v1/responses that clients may ask for again, or continue.

In memory, bounded, the least recently used forgotten first; a server with several processes keeps
none, for the next request may come to another one.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec


class StoredResponse(msgspec.Struct, frozen=True):
    """body: the response object as JSON. items: of the whole conversation, input and output, as
    input items. input_items: of the request alone."""

    body: bytes
    items: list[Any]
    input_items: list[Any]


class ResponseStore:
    """limit_bytes: of all of them together; 0 keeps none."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self._limit_bytes > 0

    def put(self, response_id: str, response: StoredResponse) -> None:
        """Keep it, and forget others until there is room; one that is larger than all is not."""
        num_bytes = len(response.body) + len(msgspec.json.encode(response.items))
        self.remove(response_id)
        if num_bytes > self._limit_bytes:
            return
        self._stored[response_id] = (response, num_bytes)
        self._num_bytes += num_bytes
        while self._num_bytes > self._limit_bytes:
            _, (_, old_bytes) = self._stored.popitem(last=False)
            self._num_bytes -= old_bytes

    def get(self, response_id: str) -> StoredResponse | None:
        """The response, which is then the most recently used."""
        entry = self._stored.get(response_id)
        if entry is None:
            return None
        self._stored.move_to_end(response_id)
        return entry[0]

    def remove(self, response_id: str) -> bool:
        """Forget it; False if it was not there."""
        entry = self._stored.pop(response_id, None)
        if entry is None:
            return False
        self._num_bytes -= entry[1]
        return True
