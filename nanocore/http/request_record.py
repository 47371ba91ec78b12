"""RequestRecord: data of a request for its span: names and numbers, never texts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

from nanocore.client import SamplingParams
from nanocore.client.chat.events import ChatEvent, Finished, Started
from nanocore.client.requests.progress import Progress
from nanocore.http.dialects.encoding import UsageSum

Operation: TypeAlias = Literal["chat", "text_completion", "embeddings"]
"""Name of an endpoint's work in OpenTelemetry's conventions for generative AI."""
DISCONNECTED: Final = "disconnected"


class RequestRecord:
    """One request, filled in while it is served.

    operation: None if there is to be no span. start_ns: wall-clock time. start_s, first_token_s:
    monotonic time. request_model, response_model: the model's name in the request and in the
    response. status: of the response; 0: none was begun. error: machine-readable.
    """

    def __init__(self, request_id: str) -> None:
        self.operation: Operation | None = None
        self.request_id = request_id
        self.start_ns = time.time_ns()
        self.start_s = time.monotonic()
        self.first_token_s: float | None = None
        self.request_model: str | None = None
        self.response_model: str | None = None
        self.params: SamplingParams | None = None
        self.is_stream = False
        self.usage = UsageSum()
        self.finish_reasons: list[str] = []
        self.status = 0
        self.error: str | None = None

    def note_events(self, events: Sequence[ChatEvent], progress: Progress) -> None:
        if self.first_token_s is None:
            self.first_token_s = progress.first_token_s
        for event in events:
            if type(event) is Started:
                self.usage.add_prompt(len(event.prompt_token_ids), event.num_cached_tokens)
            elif type(event) is Finished:
                self.usage.add_sample(event.usage)
                self.finish_reasons.append(event.finish_reason)
