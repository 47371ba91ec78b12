"""LLM: the synchronous SDK for offline work. Results come in input order, with a progress bar.

An AsyncEngineClient in a thread of its own does the work.
"""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from tqdm import tqdm

from nanocore.client.async_client import AsyncEngineClient, Prompt
from nanocore.client.launcher import EngineArgument
from nanocore.client.outputs import RequestOutput
from nanocore.client.tokenizer import ChatMessage, Tokenizer
from nanocore.protocol.errors import EngineOverloadedError, InvalidRequestError
from nanocore.protocol.messages import ModelCard, Stats
from nanocore.protocol.sampling import SamplingParams

Result = TypeVar("Result")
_QUEUE_FACTOR = 4
"""Requests in flight per engine row: enough to keep it full, few enough to bound its queue."""


class LLM:
    """An engine of one's own, used synchronously.

    Args:
        model: model folder; None is the bundled demo model.
        tokenizer, start_timeout_s, engine_args: as for `AsyncEngineClient.launch`.

    Raises:
        EngineStartError: with the engine's own reason.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tokenizer: str | Path | None = None,
        start_timeout_s: float = 600.0,
        **engine_args: EngineArgument,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="nanocore-llm", daemon=True
        )
        self._thread.start()
        self._client = AsyncEngineClient.launch(
            model, tokenizer=tokenizer, start_timeout_s=start_timeout_s, **engine_args
        )
        try:
            self._run(self._client.__aenter__())
        except BaseException:
            self._stop_loop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the engine and free everything. Idempotent."""
        if not self._loop.is_closed():
            self._run(self._client.close())
            self._stop_loop()

    @property
    def model_card(self) -> ModelCard:
        """What the engine says of its model."""
        return self._client.model_card

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._run(self._client.get_tokenizer())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; returns their last outputs in the order of the prompts.

        Args:
            prompts: one prompt, or several; a list of integers is one prompt of token ids.
            sampling_params: for all, or one for each; None takes the model's defaults.
            use_tqdm: show a progress bar on stderr.
        """
        batch = _as_batch(prompts)
        all_params: list[SamplingParams | None]
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            all_params = [sampling_params] * len(batch)
        else:
            all_params = list(sampling_params)
        if len(all_params) != len(batch):
            raise InvalidRequestError(
                f"{len(batch)} prompts and {len(all_params)} sampling_params: give one for all, "
                "or as many as there are prompts"
            )
        return self._run(self._complete_all(batch, all_params, use_tqdm))

    def chat(
        self,
        conversations: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several."""
        if conversations and isinstance(conversations[0], dict):
            conversations = [cast("Sequence[ChatMessage]", conversations)]
        encode = self.get_tokenizer().encode_chat
        prompts = [encode(cast("Sequence[ChatMessage]", turns)) for turns in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stats(self) -> Stats:
        """The engine's counters and gauges."""
        return self._run(self._client.stats())

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes."""
        return self._run(self._client.reset_prefix_cache())

    async def _complete_all(
        self, prompts: list[Prompt], all_params: list[SamplingParams | None], use_tqdm: bool
    ) -> list[RequestOutput]:
        in_flight = asyncio.Semaphore(_QUEUE_FACTOR * self._client.max_num_seqs)
        with tqdm(total=len(prompts), unit="request", disable=not use_tqdm) as progress:

            async def complete(prompt: Prompt, params: SamplingParams | None) -> RequestOutput:
                async with in_flight:
                    output = await self._complete(prompt, params)
                progress.update()
                return output

            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(complete(prompt, params))
                    for prompt, params in zip(prompts, all_params, strict=True)
                ]
        return [task.result() for task in tasks]

    async def _complete(self, prompt: Prompt, params: SamplingParams | None) -> RequestOutput:
        """One completion, submitted again as often as the engine is too busy to take it."""
        while True:
            try:
                return await self._client.complete(prompt, params)
            except EngineOverloadedError as busy:
                await asyncio.sleep(busy.retry_after_s)

    def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # the task group's first failure is the cause
        except BaseException:
            future.cancel()  # Ctrl-C: the requests in flight are aborted
            raise

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, dict, array)):
        return [cast("Prompt", prompts)]
    batch = list(prompts)
    if batch and isinstance(batch[0], int):
        return [cast("list[int]", batch)]
    return cast("list[Prompt]", batch)
