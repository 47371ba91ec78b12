"""A RequestStream that a test drives by hand, in the place of the connection."""

from __future__ import annotations

from typing import Any

from nanocore.client.requests.request_outputs import RequestOutput
from nanocore.client.requests.request_stream import RequestStream
from nanocore.client.requests.sample import Sample
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.messages import Event, FinishReason
from nanocore.protocol.sampling import SamplingParams
from tests.client.byte_tokens import ids_of
from tests.client.running import run

PATIENCE_S = 1.0
"""Everything has arrived before a test reads, so whatever has to wait would wait for ever."""


class DrivenStream:
    """A stream of request "r". aborts: what it asked the engine to end: "r", or single samples.

    prompt_ids: the prompt; None is "hi", for the tokenizer of bytes.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: list[int] | None = None, **params: Any
    ) -> None:
        self.aborts: list[str | int] = []
        self._tokenizer = tokenizer
        sampling = SamplingParams(**params)
        self.stream = RequestStream(
            "r",
            "hi",
            ids_of(tokenizer, "hi") if prompt_ids is None else prompt_ids,
            sampling,
            tokenizer if sampling.detokenize else None,
            self._left,
        )

    def push(self, text: str | bytes, index: int = 0) -> None:
        """The tokens of this text have arrived, together."""
        self.stream.samples[index].push_tokens(ids_of(self._tokenizer, text))

    def say(self, index: int = 0, **fields: Any) -> None:
        self.stream.samples[index].push_event(Event(handle=1 + index, **fields))

    def end(self, reason: FinishReason = "length", index: int = 0, **fields: Any) -> None:
        self.say(index, finish_reason=reason, **fields)

    def next(self) -> RequestOutput:
        return run(anext(self.stream), PATIENCE_S)

    def final(self) -> RequestOutput:
        return run(self.stream.final(), PATIENCE_S)

    async def read_between(self, pieces: list[str]) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        for piece in pieces:
            self.push(piece)
            outputs.append(await anext(self.stream))
            if outputs[-1].finished:
                return outputs
        self.end()
        return [*outputs, await anext(self.stream)]

    def rest(self) -> list[RequestOutput]:
        async def collect() -> list[RequestOutput]:
            return [output async for output in self.stream]

        return run(collect(), PATIENCE_S)

    def _left(self, stream: RequestStream, sample: Sample | None) -> None:
        self.aborts.append(stream.request_id if sample is None else sample.index)
