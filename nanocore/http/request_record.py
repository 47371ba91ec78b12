"""What is known of a request at its end, for those who watch: names and numbers, never texts.

Made only if somebody watches.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final, Literal, Protocol, TypeAlias

from nanocore.client import SamplingParams
from nanocore.client.chat.answer_stream import AnswerStream
from nanocore.client.chat.events import ChatEvent, Finished, Started
from nanocore.http.dialects.usage import UsageSum

Operation: TypeAlias = Literal["chat", "text_completion", "embeddings"]
"""As OpenTelemetry's conventions for generative AI call what an endpoint does."""
DISCONNECTED: Final = "disconnected"


class RequestRecord:
    """Of one request, filled while it is answered.

    start_ns: by the clock on the wall; start_s, first_token_s: by the monotonic one. request_model,
    response_model: the model as it was asked for, and its name in the answer. status: of the
    answer; 0: none has begun. error: what failed, for programs.
    """

    def __init__(self, operation: Operation, request_id: str) -> None:
        self.operation = operation
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

    def saw(self, events: Sequence[ChatEvent], answer: AnswerStream) -> None:
        """What has come of one of the request's prompts."""
        if self.first_token_s is None:
            self.first_token_s = answer.first_token_s
        for event in events:
            if type(event) is Started:
                self.usage.add_prompt(len(event.prompt_token_ids), event.num_cached_tokens)
            elif type(event) is Finished:
                self.usage.add_sample(event.usage)
                self.finish_reasons.append(event.finish_reason)


class RecordWriter(Protocol):
    """Takes records where they are looked at."""

    def write(
        self, record: RequestRecord, server: tuple[str, int] | None, parent: Mapping[str, str]
    ) -> None:
        """A request has ended. server: its address. parent: headers that name the caller's span."""
        ...

    async def close(self) -> None:
        """Deliver what is left, in bounded time."""
        ...
