"""The ends of a session's requests: of each that is accepted one for each sample, and not two."""

from __future__ import annotations

from typing import Any

from nanocore.protocol.messages import Accepted, Error, Op, Output
from tests.reliability.visitor import Visitor


class Ends:
    """A session's requests: how often each began and ended, as its client is told."""

    def __init__(self, client: Visitor) -> None:
        self._client = client
        self._num_samples: dict[str, int] = {}
        self._num_unanswered = 0
        self._id_of: dict[int, str] = {}
        self.refused: list[str | None] = []
        self.errors: list[Error] = []
        self.ended: list[str] = []

    def submit(self, body: dict[str, Any]) -> None:
        """Send a request, of which each sample must end."""
        n = body["sampling"].get("n", 1)
        self._num_samples[body["request_id"]] = n if isinstance(n, int) else 1
        self._num_unanswered += 1
        self._client.send(Op.SUBMIT, **body)

    def hear(self) -> None:
        """Take the next message."""
        message = self._client.hear()
        if isinstance(message, Error):
            self._num_unanswered -= 1
            self.refused.append(message.request_id)
            self.errors.append(message)
        elif isinstance(message, Accepted):
            self._num_unanswered -= 1
            for i in range(self._num_samples[message.request_id]):
                self._id_of[message.handle + i] = message.request_id
        elif isinstance(message, Output):
            for event in message.events:
                if event.finish_reason is not None:
                    self.ended.append(self._id_of.pop(event.handle))

    @property
    def num_running(self) -> int:
        """Samples that were accepted and have not ended."""
        return len(self._id_of)

    def hear_answers(self) -> None:
        """Read until each is accepted or refused."""
        while self._num_unanswered:
            self.hear()

    def hear_all(self) -> None:
        """Read until all that was sent is answered, and all that was accepted has ended."""
        while self.num_running or self._num_unanswered:
            self.hear()
