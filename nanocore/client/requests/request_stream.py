"""RequestStream: the output of one request, as an async iterator with one reader.

Arriving tokens are appended to the samples; a reader gets the news of all of them in one output.
The number of tokens per read is limited, so that a long backlog does not block the event loop; a
reader that is behind lets other tasks run first (`Progress.is_behind`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias

from nanocore.client.requests.progress import Progress
from nanocore.client.requests.request_outputs import PromptLogprobs, RequestOutput, Resume
from nanocore.client.requests.sample import Sample
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import NanocoreError
from nanocore.protocol.messages import Submit
from nanocore.protocol.sampling import SamplingParams


class RequestStream:
    """An async iterator of RequestOutput; the connection feeds its samples.

    Args:
        request_id, prompt, prompt_token_ids, params: the request.
        tokenizer: None without detokenization.
        leave: aborts one sample, or with None the whole request; called at most once for each, and
            not after its end.

    finished: everything was read. num_output_tokens: tokens read, of all samples. seed: the first
    sample's, once the request is accepted. not_held: see ACCEPTED. message: the SUBMIT that was
    sent. deadline_s: by the monotonic clock, if its time is limited. resumes: changes of engine.
    num_deaths: engines that died while it was open, since its last token. was_alone: it was the
    only request when the last one died.
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
        self._prompt, self.prompt_token_ids = prompt, prompt_token_ids
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
        self.num_output_tokens = 0
        self.seed: int | None = None
        self.not_held: list[str] = []
        self.message: Submit | None = None
        self.deadline_s: float | None = None
        self.resumes: list[Resume] = []
        self.num_deaths = 0
        self.was_alone = False

    @property
    def num_arrived(self) -> int:
        """Output tokens that have arrived, of all samples, read or not."""
        return sum(len(sample.arrived_token_ids) for sample in self.samples)

    @property
    def is_running(self) -> bool:
        """Whether a sample has not ended."""
        return self.progress.num_running > 0

    @property
    def is_answered(self) -> bool:
        """Whether the engine has accepted it, or refused."""
        return self.seed is not None or self._error is not None

    def fail(self, error: NanocoreError) -> None:
        """End the stream with an error, which is raised in its reader."""
        self._error = error
        self.progress.wake_all()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """Wait for news, and return it as one output; raises NanocoreError."""
        if self.progress.is_behind:
            await asyncio.sleep(0)
        while not self.finished:
            output = self.read()
            if output is not None:
                return output
            await self.news()
        raise StopAsyncIteration

    async def final(self) -> RequestOutput:
        """Return the last output, and close. Reads only at the end, unless it seeks stop strings.

        Raises:
            NanocoreError: as `__anext__`.
        """
        try:
            if not self._must_watch and self.is_running and self._error is None:
                ended: asyncio.Future[None] = asyncio.Future()
                self.progress.on_end(lambda: None if ended.done() else ended.set_result(None))
                await ended
            last = None
            async for output in self:
                last = output
        finally:
            self.close()
        assert last is not None, "a request ends with an output or an error"
        return last

    def news(self) -> asyncio.Future[None]:
        """Return a future to await after `read` found nothing, and before it is called again."""
        return self.progress.news()

    def listen(self, callback: Callable[[], None]) -> None:
        """Register a callback for news that `advance` may find; called at least once."""
        self.progress.listen(callback)
        callback()

    def on_end(self, callback: Callable[[], None]) -> None:
        """Register a callback for the end; with stop strings also for all news."""
        if self._must_watch or not self.is_running or self._error is not None:
            self.listen(callback)
        else:
            self.progress.on_end(callback)

    def read(self) -> RequestOutput | None:
        """Read news as one output; None if there is nothing new.

        Raises:
            NanocoreError: as `__anext__`, once everything before the error was read.
        """
        if not self.advance():
            return None
        first, only = self.samples[0], self._only
        return RequestOutput(
            self.request_id,
            self._prompt,
            self.prompt_token_ids,
            [sample.output for sample in self.samples] if only is None else [only.output],
            self.finished,
            first.num_cached_tokens,
            self.progress,
            self.prompt_logprobs,
            first.embedding if self.finished else None,
            tuple(self.resumes) if self.resumes else (),
        )

    def advance(self) -> bool:
        """Let the samples read news; return whether there was any. Raises NanocoreError."""
        if self.finished:
            return False
        progress = self.progress
        progress.is_behind = False
        only = self._only
        if only is None:
            is_new = self._read_all()
        elif is_new := only.read():
            self.num_output_tokens = only.num_read
            if only.finished:
                self._finish(only)
        # Everything that came before the error is read first.
        if self._error is None or self.finished:
            return is_new
        if is_new:
            progress.is_behind = True  # of the error
            return True
        self.finished = True
        raise self._error

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Prompt logprobs that have arrived, if requested."""
        columns = self.samples[0].prompt_logprobs
        return None if columns is None else PromptLogprobs(columns, len(columns))

    def close(self) -> None:
        """Stop reading: the request is aborted unless it has ended. Idempotent."""
        if self.finished:
            return
        self.finished = True
        if self.is_running and self._error is None:
            self._leave(self, None)

    def _read_all(self) -> bool:
        is_new = False
        for sample in self.samples:
            if sample.read():
                is_new = True
                if sample.finished:
                    self._finish(sample)
        self.num_output_tokens = sum(sample.num_read for sample in self.samples)
        return is_new

    def _finish(self, sample: Sample) -> None:
        # The engine does not know that a stop string has ended the sample.
        self.finished = self.progress.num_unread == 0
        if sample.outlives_reading and self._error is None:
            self._leave(self, sample if self.is_running else None)


Leave: TypeAlias = Callable[[RequestStream, Sample | None], None]
