"""Part: samples of a request that were submitted under one id.

All of a request, as it is submitted first; one of several samples, if it goes on elsewhere alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from nanocore.client.sample import Sample
from nanocore.client.stream import RequestStream
from nanocore.protocol.errors import NanocoreError
from nanocore.protocol.messages import Event


class Part:
    """samples: those that run. request_id: on the wire.

    is_accepted: they have their handles. last_word: with which an engine that stops has ended them.
    """

    __slots__ = ("is_accepted", "last_word", "request_id", "samples", "stream")

    def __init__(
        self,
        request_id: str,
        stream: RequestStream,
        samples: list[Sample],
        last_word: Event | None = None,
    ) -> None:
        self.request_id = request_id
        self.stream = stream
        self.samples = samples
        self.is_accepted = False
        self.last_word = last_word

    def end(self, event: Event) -> None:
        """Its samples have ended in this way."""
        for sample in self.samples:
            sample.push_event(event)

    def fail(self, error: NanocoreError) -> None:
        """It does not go on: as its engine said, or with an error that ends the whole request."""
        if self.last_word is not None:
            self.end(self.last_word)
        else:
            self.stream.fail(error)


Rescue: TypeAlias = Callable[[Part, NanocoreError], bool]
"""Offered a part that its session cannot go on with, and why; whether it is taken care of."""
