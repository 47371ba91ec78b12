"""What an engine's outputs come to."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from typing import cast

import pytest

from nanocore.bench.load import BenchRequest, Outcome
from nanocore.bench.targets import EngineTarget
from nanocore.client import AsyncEngineClient, EngineDeadError, SamplingParams
from nanocore.client.requests.progress import Progress
from nanocore.client.requests.request_outputs import CompletionOutput, RequestOutput
from nanocore.protocol.messages import FinishReason

TOKEN_IDS = [5, 6, 7, 8]


class ScriptedClient:
    """Streams outputs of so many tokens in all, and then ends, or fails."""

    def __init__(
        self, counts: list[int], reason: FinishReason | None, message: str | None = None
    ) -> None:
        self._counts, self._reason, self._message = counts, reason, message
        self.asked: list[tuple[object, SamplingParams, str]] = []

    async def generate(
        self, prompt: object, params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        self.asked.append((prompt, params, request_id))
        for place, count in enumerate(self._counts, 1):
            is_last = place == len(self._counts)
            reason = self._reason if is_last else None
            sample = CompletionOutput([], 0, TOKEN_IDS, count, "", reason, None, self._message)
            yield RequestOutput(request_id, None, [1], [sample], is_last, 0, Progress(1))
        if self._reason is None:
            raise EngineDeadError("it is gone")


def sent(client: ScriptedClient) -> Outcome:
    target = EngineTarget(cast("AsyncEngineClient", client), SamplingParams(temperature=0))
    return asyncio.run(target.send(BenchRequest(array("i", [1, 2]), 2, 9), "id-1", 3.0))


def test_each_output_with_new_tokens_is_an_arrival() -> None:
    client = ScriptedClient([1, 3, 3, 4, 4], "length")
    outcome = sent(client)
    assert outcome.error == ""
    assert outcome.chunk_tokens == [1, 2, 1]
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens) == (2, 4)
    assert outcome.token_ids == TOKEN_IDS
    assert outcome.start_s <= outcome.chunk_times_s[0] <= outcome.chunk_times_s[-1] <= outcome.end_s
    ((prompt, params, request_id),) = client.asked
    assert (prompt, params.max_tokens, params.temperature, request_id) == (
        array("i", [1, 2]), 9, 0, "id-1",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("counts", "reason", "message", "error"),
    [
        ([1], None, None, "EngineDeadError: it is gone"),
        ([1], "error", "no memory", "error: no memory"),
        ([1], "timeout", None, "timeout: ended by the engine"),
        ([0], "stop", None, "no token came"),
    ],
)
def test_what_does_not_end_by_itself_has_failed(
    counts: list[int], reason: FinishReason | None, message: str | None, error: str
) -> None:
    assert sent(ScriptedClient(counts, reason, message)).error == error
