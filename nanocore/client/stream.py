"""One request's output on the client: its samples, as one async iterator with one reader.

What arrives goes to the samples; a reader gets what is new of all of them in one output. What is
read at once is bounded: of a long backlog only so much that the event loop is not held up, and
whoever reads on lets others have their turn before (`Progress.is_behind`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias

from nanocore.client.logprobs import PromptLogprobs
from nanocore.client.outputs import RequestOutput
from nanocore.client.progress import Progress
from nanocore.client.sample import Sample
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import NanocoreError
from nanocore.protocol.sampling import SamplingParams


class RequestStream:
    """An async iterator of RequestOutput, made of the samples that the connection feeds.

    Args:
        request_id, prompt, prompt_token_ids, params: the request.
        tokenizer: None if the request wants no text.
        leave: ends early one sample, while others go on, or with None the whole request; called at
            most once for each, and not after its end.

    finished: everything was read.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        leave: Leave,
    ) -> None:
        self.request_id = request_id
        self._prompt, self._prompt_token_ids = prompt, prompt_token_ids
        self._leave = leave
        self.progress = Progress(params.n)
        self.samples = [
            Sample(request_id, index, prompt_token_ids, params, tokenizer, self.progress)
            for index in range(params.n)
        ]
        self._only = self.samples[0] if params.n == 1 else None
        self._must_watch = bool(params.stop_strings)
        self._error: NanocoreError | None = None
        self.finished = False

    @property
    def is_running(self) -> bool:
        """Whether some sample has not ended."""
        return self.progress.num_running > 0

    def fail(self, error: NanocoreError) -> None:
        """End the stream with an error, which is raised in its reader."""
        self._error = error
        self.progress.wake_all()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """Wait for news, and return it as one output.

        Raises:
            NanocoreError: the request was refused, failed in the engine, or the engine is gone.
        """
        if self.progress.is_behind:
            await asyncio.sleep(0)
        while not self.finished:
            output = self.read()
            if output is not None:
                return output
            await self.news()
        raise StopAsyncIteration

    async def final(self) -> RequestOutput:
        """The last output. Reads only when all is there, unless stop strings need watching.

        Raises:
            NanocoreError: as `__anext__`.
        """
        if not self._must_watch and self.is_running and self._error is None:
            await self.progress.over()
        last = None
        async for output in self:
            last = output
        assert last is not None, "a request ends with an output or an error"
        return last

    def news(self) -> asyncio.Future[None]:
        """To be awaited after `read` found nothing, and before it is called again."""
        return self.progress.news()

    def read(self) -> RequestOutput | None:
        """Take in what has arrived; None if that is nothing a consumer would notice.

        Raises:
            NanocoreError: as `__anext__`, once everything that came before was read.
        """
        if self.finished:
            return None
        progress = self.progress
        progress.is_behind = False
        only = self._only
        if only is None:
            is_new = self._read_all()
        elif is_new := only.read():
            if only.finished:
                self._finish(only)
        if not is_new:
            if self._error is None:
                return None
            self.finished = True
            raise self._error
        first = self.samples[0]
        columns = first.prompt_logprobs
        return RequestOutput(
            self.request_id,
            self._prompt,
            self._prompt_token_ids,
            [sample.output for sample in self.samples] if only is None else [only.output],
            self.finished,
            first.num_cached_tokens,
            progress,
            None if columns is None else PromptLogprobs(columns, len(columns)),
            first.embedding if self.finished else None,
        )

    def close(self) -> None:
        """Stop reading: the request is aborted unless it has ended. Idempotent."""
        if self.finished:
            return
        self.finished = True
        if self.is_running and self._error is None:
            self._leave(self, None)

    # -- inside -----------------------------------------------------------------------------------

    def _read_all(self) -> bool:
        """Read every sample; whether anything is new."""
        is_new = False
        for sample in self.samples:
            if sample.read():
                is_new = True
                if sample.finished:
                    self._finish(sample)
        return is_new

    def _finish(self, sample: Sample) -> None:
        """A sample was read to its end; tell the engine, if that does not know it."""
        self.finished = self.progress.num_unread == 0
        if sample.outlives_reading and self._error is None:
            self._leave(self, sample if self.is_running else None)


Leave: TypeAlias = Callable[[RequestStream, Sample | None], None]
