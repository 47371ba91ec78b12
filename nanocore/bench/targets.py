"""Targets of `nanocore bench serve`, and the one for an engine over its own wire.

Prompts for an engine are token ids, and text is only decoded after the measurement.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from nanocore.bench.datasets import PromptSource
from nanocore.bench.load import BenchRequest, Outcome, Send
from nanocore.client import AsyncEngineClient, NanocoreError, SamplingParams
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ModelFileError,
)

NANOCORE, OPENAI, OPENAI_CHAT, VLLM = "nanocore", "openai", "openai-chat", "vllm"
BACKENDS: Final = (NANOCORE, OPENAI, OPENAI_CHAT, VLLM)
PATHS: Final = {
    OPENAI: "/v1/completions",
    VLLM: "/v1/completions",
    OPENAI_CHAT: "/v1/chat/completions",
}
CONNECT_TIMEOUT_S: Final = 10.0
RETRY_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Destination of requests.

    engine_endpoint: of an engine; None is the user's default. base_url, path: of a server. model:
    in HTTP requests; None uses the server's first. model_id: in results. tokenizer: a folder, or a
    tokenizer.json.
    """

    backend: str
    engine_endpoint: str | None = None
    curve_dir: str | None = None
    base_url: str = ""
    path: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    insecure: bool = False
    model: str | None = None
    model_id: str | None = None
    tokenizer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFields:
    """Fields of every request. sampling: by the names of `SamplingParams`."""

    ignore_eos: bool = False
    logprobs: int | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    request_id_prefix: str = ""


DraftCounts: TypeAlias = Mapping[str, int]
"""Counters of drafts since the engine's start, by metric; accepted ones by position ("0"), too.
Empty if they cannot be read."""


@dataclass(frozen=True, slots=True)
class OpenTarget:
    """A target that is ready. model_id, tokenizer_id: in results. draft_counts: of the engine."""

    send: Send
    source: PromptSource
    model_id: str
    tokenizer_id: str | None
    draft_counts: Callable[[], Awaitable[DraftCounts]]


@contextmanager
def tokenizer_at(path: str) -> Iterator[Tokenizer]:
    """Open the tokenizer of a folder, a GGUF file or a tokenizer.json.

    Raises:
        ConfigError: there is none.
    """
    try:
        if path.lower().endswith(".gguf"):
            from nanocore.worker.loading.gguf.gguf_files import first_file
            from nanocore.worker.loading.gguf.model_files import gguf_model_files

            tokenizer = Tokenizer(gguf_model_files(first_file(Path(path))), path)
        elif Path(path).is_file():
            tokenizer = Tokenizer({"tokenizer.json": Path(path).read_bytes()}, path)
        else:
            tokenizer = Tokenizer.from_folder(Path(path))
    except (InvalidRequestError, ModelFileError, OSError) as error:
        raise ConfigError(f"--tokenizer {path}: {error}") from None
    try:
        yield tokenizer
    finally:
        tokenizer.close()


async def until_ready(attempt: Callable[[], Awaitable[str]], timeout_s: float) -> None:
    """Call `attempt` until it returns no problem, at least once.

    Raises:
        EngineDeadError: the last problem, after the timeout.
    """
    deadline_s = time.monotonic() + timeout_s
    while problem := await attempt():
        if time.monotonic() + RETRY_S > deadline_s:
            waited = f" (not ready after {timeout_s:g} s)" if timeout_s else ""
            raise EngineDeadError(problem + waited)
        await asyncio.sleep(RETRY_S)


@dataclass(frozen=True, slots=True)
class EngineTarget:
    """params: of every request, except for max_tokens."""

    client: AsyncEngineClient
    params: SamplingParams

    async def send(self, request: BenchRequest, request_id: str, arrival_s: float) -> Outcome:
        outcome = Outcome(request.num_prompt_tokens or 0, arrival_s, time.perf_counter())
        params = msgspec.structs.replace(self.params, max_tokens=request.num_output_tokens)
        sample, num_tokens = None, 0
        try:
            outputs = self.client.generate(request.prompt, params, request_id)
            async with aclosing(outputs):
                async for output in outputs:
                    now_s = time.perf_counter()
                    sample = output.outputs[0]
                    if sample.num_tokens > num_tokens:
                        outcome.add_tokens(sample.num_tokens - num_tokens, now_s)
                        num_tokens = sample.num_tokens
                    outcome.end_s = now_s
        except NanocoreError as error:
            outcome.error = f"{type(error).__name__}: {error}"
            return outcome
        assert sample is not None, "a request ends with an output or an error"
        if sample.finish_reason not in ("stop", "length"):
            outcome.error = f"{sample.finish_reason}: {sample.message or 'ended by the engine'}"
        elif not num_tokens:
            outcome.error = "no token came"
        outcome.num_output_tokens = num_tokens
        outcome.token_ids = sample.token_ids
        return outcome

    async def draft_counts(self) -> DraftCounts:
        try:
            stats = await self.client.stats()
        except NanocoreError:  # what was measured is reported all the same
            return {}
        names = "num_drafts", "num_draft_tokens", "num_accepted_tokens"
        accepted = stats.spec_decode_num_accepted_tokens_per_pos
        counts = {name: getattr(stats, f"spec_decode_{name}") for name in names}
        return counts | {str(place): num for place, num in enumerate(accepted)}


@asynccontextmanager
async def open_engine(
    destination: Destination, fields: RequestFields, ready_timeout_s: float
) -> AsyncIterator[OpenTarget]:
    """Join a running engine.

    Raises:
        ConfigError: invalid sampling parameters or tokenizer.
        EngineDeadError: there is no engine.
    """
    named = destination.tokenizer
    with nullcontext() if named is None else tokenizer_at(named) as tokenizer:
        async with join_engine(destination, ready_timeout_s) as client:
            card = client.model_card
            if tokenizer is None:
                tokenizer = await engine_tokenizer(client)
            defaults = SamplingParams.from_engine(card.default_sampling)
            try:
                params = msgspec.structs.replace(
                    defaults,
                    detokenize=False,
                    ignore_eos=fields.ignore_eos,
                    logprobs=fields.logprobs,
                    **fields.sampling,
                )
            except InvalidRequestError as error:
                raise ConfigError(str(error)) from None
            target = EngineTarget(client, params)
            yield OpenTarget(
                target.send,
                PromptSource.of_engine(tokenizer, card),
                destination.model_id or card.model,
                None if tokenizer is None else named or card.model,
                target.draft_counts,
            )


def join_engine(destination: Destination, ready_timeout_s: float) -> AsyncEngineClient:
    """Return a client, not connected yet. It does not resume requests: failures are measured."""
    return AsyncEngineClient.connect(
        destination.engine_endpoint,
        curve_dir=destination.curve_dir,
        timeout_s=ready_timeout_s or CONNECT_TIMEOUT_S,
        resume=False,
    )


async def engine_tokenizer(client: AsyncEngineClient) -> Tokenizer | None:
    try:
        return await client.get_tokenizer()
    except InvalidRequestError:
        return None
