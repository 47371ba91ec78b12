"""An engine over its own wire: prompts are token ids, and no text is made while it is measured."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, nullcontext

import msgspec

from nanocore.bench.datasets import PromptSource
from nanocore.bench.opened import Opened, tokenizer_at
from nanocore.bench.outcome import BenchRequest, Outcome
from nanocore.bench.serve_options import Asked, Destination
from nanocore.client import AsyncEngineClient, NanocoreError, SamplingParams
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import ConfigError, InvalidRequestError

CONNECT_TIMEOUT_S = 10.0


class EngineTarget:
    """params: of every request, but for its max_tokens."""

    def __init__(self, client: AsyncEngineClient, params: SamplingParams) -> None:
        self._client, self._params = client, params

    async def send(self, request: BenchRequest, request_id: str, arrival_s: float) -> Outcome:
        """See `Target`."""
        outcome = Outcome(request.num_prompt_tokens or 0, arrival_s, time.perf_counter())
        params = msgspec.structs.replace(self._params, max_tokens=request.num_output_tokens)
        sample, num_tokens = None, 0
        try:
            outputs = self._client.generate(request.prompt, params, request_id)
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
            outcome.error = f"{sample.finish_reason}: {sample.message or 'the engine ended it'}"
        elif not num_tokens:
            outcome.error = "no token came"
        outcome.num_output_tokens, outcome.token_ids = num_tokens, sample.token_ids
        return outcome


@asynccontextmanager
async def open_engine(
    destination: Destination, asked: Asked, ready_timeout_s: float
) -> AsyncIterator[Opened]:
    """The engine that runs at an endpoint.

    Raises:
        ConfigError: what is asked cannot be. EngineDeadError: nobody answers.
    """
    named = destination.tokenizer
    with nullcontext() if named is None else tokenizer_at(named) as tokenizer:
        async with engine_client(destination, ready_timeout_s) as client:
            card = client.model_card
            if tokenizer is None:
                tokenizer = await engine_tokenizer(client)
            yield Opened(
                EngineTarget(client, sampling_params(client, asked)),
                PromptSource(
                    tokenizer,
                    takes_text=False,
                    vocab_size=card.vocab_size,
                    eos_token_ids=tuple(card.eos_token_ids),
                ),
                destination.model_id or card.model,
                None if tokenizer is None else named or card.model,
            )


def engine_client(destination: Destination, ready_timeout_s: float) -> AsyncEngineClient:
    """A client that is not entered yet. Requests fail with their session: that is measured, too."""
    return AsyncEngineClient.connect(
        destination.engine_endpoint,
        curve_dir=destination.curve_dir,
        timeout_s=ready_timeout_s or CONNECT_TIMEOUT_S,
        resume=False,
    )


async def engine_tokenizer(client: AsyncEngineClient) -> Tokenizer | None:
    """The model's; None if it has none."""
    try:
        return await client.get_tokenizer()
    except InvalidRequestError:
        return None


def sampling_params(client: AsyncEngineClient, asked: Asked) -> SamplingParams:
    """The model's defaults, and what was asked for.

    Raises:
        ConfigError: a value that no request can have.
    """
    defaults = SamplingParams.from_engine(client.model_card.default_sampling)
    try:
        return msgspec.structs.replace(
            defaults,
            detokenize=False,
            ignore_eos=asked.ignore_eos,
            logprobs=asked.logprobs,
            **asked.sampling,
        )
    except InvalidRequestError as error:
        raise ConfigError(str(error)) from None
