"""LLM: the synchronous SDK for offline inference, around an AsyncEngineClient in a thread."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from os import PathLike
from typing import Any, Final, Self, TypeVar, Unpack, cast

from nanocore.client.arguments import EngineArgument, check_sampling_params
from nanocore.client.async_client import AsyncEngineClient
from nanocore.client.chat.chat_request import ChatOptions, prepare_chat
from nanocore.client.requests.request_outputs import EmbeddingOutput, RequestOutput
from nanocore.client.requests.scoring import ScoreOutput
from nanocore.client.requests.submission import Prompt
from nanocore.client.tokenizer import ChatMessage, Tokenizer
from nanocore.protocol.errors import ClientStateError, EngineOverloadedError, InvalidRequestError
from nanocore.protocol.messages import ModelCard
from nanocore.protocol.metrics import Metric, Stats
from nanocore.protocol.sampling import Pooling, SamplingParams

Result = TypeVar("Result")
_QUEUE_FACTOR: Final = 4
"""Requests in flight per engine row: enough to keep it full, few enough to bound its queue."""


class LLM:
    """Synchronous use of a launched engine. Results are in input order, with a progress bar.

    Args:
        model: model folder; None is the demo model.
        tokenizer, start_timeout_s, engine_args: see `AsyncEngineClient.launch`.

    Raises:
        EngineStartError: with the engine's own reason.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        tokenizer: str | PathLike[str] | None = None,
        start_timeout_s: float = 600.0,
        **engine_args: EngineArgument,
    ) -> None:
        self._client = AsyncEngineClient.launch(
            model, tokenizer=tokenizer, start_timeout_s=start_timeout_s, **cast("Any", engine_args)
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="nanocore-llm", daemon=True
        )
        self._thread.start()
        try:
            self._run(self._client.__aenter__())
        except BaseException:
            self._stop_loop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine and free everything. Idempotent."""
        if not self._loop.is_closed():
            try:
                self._run(self._client.close())
            finally:
                self._stop_loop()

    @property
    def model_card(self) -> ModelCard:
        """Model card that the engine sent."""
        return self._client.model_card

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, from the engine's own files."""
        return self._run(self._client.get_tokenizer())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; return their last outputs in the order of the prompts.

        All or nothing: the first error, of a refused request or of the engine, is raised and the
        other requests are aborted. A sample that the engine ended has finish_reason "error".

        Args:
            prompts: one prompt, or several; a list of integers is one prompt of token ids.
            sampling_params: for all, or one for each; None uses the model's defaults.
            use_tqdm: show a progress bar on stderr.

        Raises:
            InvalidRequestError, ContextLengthError: a request cannot be served as it is.
            EngineDeadError: the engine is gone. ClientStateError: this LLM is closed.
        """
        batch = _as_batch(prompts)
        all_params = _params_of_each(len(batch), sampling_params, "prompts")
        calls = [
            partial(self._client.complete, prompt, params)
            for prompt, params in zip(batch, all_params, strict=True)
        ]
        return self._run(self._all(calls, use_tqdm))

    def chat(
        self,
        conversations: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, as `generate` completes prompts.

        Outputs are the model's unparsed text, reasoning and tool calls included.

        Args:
            options: see `ChatOptions`: tools, tool_choice, response_format and others.
        """
        if not isinstance(conversations, (list, tuple)):
            raise InvalidRequestError(
                "a conversation is a list of messages, and several are a list of such lists, not "
                f"{type(conversations).__name__}"
            )
        if conversations and isinstance(conversations[0], dict):
            conversations = [cast("Sequence[ChatMessage]", conversations)]
        tokenizer = self.get_tokenizer()
        all_params = _params_of_each(len(conversations), sampling_params, "conversations")
        default = SamplingParams.from_engine(self.model_card.default_sampling)
        chats = []
        for i, given in enumerate(all_params):
            params = default if given is None else given
            check_sampling_params(params)
            turns = cast("Sequence[ChatMessage]", conversations[i])
            try:
                chats.append(prepare_chat(turns, options, tokenizer, params))
            except InvalidRequestError as error:
                if len(conversations) == 1:
                    raise
                raise InvalidRequestError(f"conversations[{i}]: {error}") from None
        return self.generate(
            [chat.prompt_token_ids for chat in chats],
            [chat.params for chat in chats],
            use_tqdm=use_tqdm,
        )

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        use_tqdm: bool = True,
    ) -> list[EmbeddingOutput]:
        """Return the embeddings of prompts in order; see `AsyncEngineClient.embed`.

        All or nothing, as in `generate`.
        """
        calls = [
            partial(self._client.embed, prompt, pooling, normalize) for prompt in _as_batch(prompts)
        ]
        return self._run(self._all(calls, use_tqdm))

    def metrics(self) -> list[Metric]:
        """All metrics of the engine."""
        return self._run(self._client.metrics())

    def stats(self) -> Stats:
        return self._run(self._client.stats())

    def reset_prefix_cache(self) -> bool:
        return self._run(self._client.reset_prefix_cache())

    def score(
        self, pairs: Sequence[tuple[Prompt, Prompt]], *, use_tqdm: bool = True
    ) -> list[ScoreOutput]:
        """Return the log probability of each continuation given its context, in order.

        All or nothing, as in `generate`.

        Args:
            pairs: (context, continuation), see `AsyncEngineClient.score`.
            use_tqdm: show a progress bar on stderr.

        Raises:
            InvalidRequestError, ContextLengthError: a pair cannot be scored as it is.
            EngineDeadError: the engine is gone. ClientStateError: this LLM is closed.
        """
        if not isinstance(pairs, (list, tuple)) or not all(
            isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs
        ):
            raise InvalidRequestError("pairs are a list of (context, continuation)")
        calls = [partial(self._client.score, *pair) for pair in pairs]
        return self._run(self._all(calls, use_tqdm))

    async def _all(
        self, calls: Sequence[Callable[[], Awaitable[Result]]], use_tqdm: bool
    ) -> list[Result]:
        from tqdm import tqdm  # imports much, and a server's client shows no progress

        in_flight = asyncio.Semaphore(_QUEUE_FACTOR * self._client.limits.max_num_seqs)
        with tqdm(total=len(calls), unit="request", disable=not use_tqdm) as progress:

            async def one(call: Callable[[], Awaitable[Result]]) -> Result:
                async with in_flight:
                    result = await _accepted(call)
                progress.update()
                return result

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(call)) for call in calls]
        return [task.result() for task in tasks]

    def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        # On Ctrl-C the coroutine is cancelled and awaited before this returns.
        if self._loop.is_closed():
            coroutine.close()
            raise ClientStateError("this LLM is closed: make a new one")
        ended = threading.Event()
        call = asyncio.run_coroutine_threadsafe(_noted(coroutine, ended), self._loop)
        try:
            return call.result()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # the task group's first failure is the cause
        except BaseException:
            if not call.done():
                # Free its resources; requests in flight are aborted. The second hop lets the
                # coroutine begin before it is cancelled, so that it notes its end.
                self._loop.call_soon_threadsafe(self._loop.call_soon, call.cancel)
                ended.wait()
            raise

    def _stop_loop(self) -> None:
        # Calls of other threads end with the client; the loop must run once to report that.
        asyncio.run_coroutine_threadsafe(_others_end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _accepted(call: Callable[[], Awaitable[Result]]) -> Result:
    """Call until the engine is not overloaded any more, and return the result."""
    while True:
        try:
            return await call()
        except EngineOverloadedError as busy:
            await asyncio.sleep(busy.retry_after_s)


async def _others_end() -> None:
    # Wait until this is the loop's only task, and no thread works for it.
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()


async def _noted(coroutine: Coroutine[Any, Any, Result], ended: threading.Event) -> Result:
    try:
        return await coroutine
    finally:
        ended.set()


def _params_of_each(
    count: int, params: SamplingParams | Sequence[SamplingParams] | None, noun: str
) -> list[SamplingParams | None]:
    if not isinstance(params, (list, tuple)):
        return [cast("SamplingParams | None", params)] * count
    if len(params) != count:
        raise InvalidRequestError(
            f"{count} {noun} and {len(params)} sampling_params: give one for all, or as many as "
            f"there are {noun}"
        )
    return list(params)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, dict, array)):
        return [cast("Prompt", prompts)]
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Iterable):
        raise InvalidRequestError(
            f"prompts are one prompt or several, not {type(prompts).__name__}: a prompt is a str, "
            "a list or array of token ids or {'prompt_token_ids': [...]}"
        )
    batch = list(prompts)
    if batch and isinstance(batch[0], int):
        return [cast("list[int]", batch)]
    return cast("list[Prompt]", batch)
