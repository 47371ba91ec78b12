"""Scoring: the log probability of a continuation given its context.

The prompt is both without the last token, which is sampled as the only allowed token. Its log
probability is that of an output token, the others are prompt logprobs. So no position is computed
in vain, and a continuation of one token, as in most multiple-choice tasks, can use the prefix
cache.
"""

from __future__ import annotations

from array import array
from itertools import chain
from operator import index

import msgspec

from nanocore.client.connection.tokenizer_loader import TokenizerLoader
from nanocore.client.requests.request_outputs import RequestOutput
from nanocore.client.requests.submission import Prompt, TokensPrompt, given_token_ids
from nanocore.protocol.errors import InvalidRequestError, NanocoreError
from nanocore.protocol.sampling import SamplingParams


class ScoreOutput(msgspec.Struct, frozen=True):
    """Score of a continuation.

    token_ids: the continuation's. token_logprobs: natural log probability of each, given all tokens
    before it. is_greedy: each is the most likely token. num_cached_tokens: context tokens found in
    the prefix cache.
    """

    request_id: str
    token_ids: list[int]
    token_logprobs: list[float]
    is_greedy: bool
    num_cached_tokens: int

    @property
    def logprob(self) -> float:
        """Log probability of the whole continuation: the sum over its tokens."""
        return sum(self.token_logprobs)

    @property
    def num_tokens(self) -> int:
        """Tokens of the continuation."""
        return len(self.token_ids)


class ScoreRequest(msgspec.Struct, frozen=True):
    """Request that scores a continuation. Neither part is empty."""

    context_ids: list[int]
    continuation_ids: list[int]

    @property
    def prompt(self) -> list[int]:
        return self.context_ids + self.continuation_ids[:-1]

    @property
    def params(self) -> SamplingParams:
        """Return parameters that sample the last token and return logprobs of the others."""
        return SamplingParams(
            temperature=0,
            max_tokens=1,
            allowed_token_ids=self.continuation_ids[-1:],
            logprobs=0,
            prompt_logprobs=0 if len(self.continuation_ids) > 1 else None,
            detokenize=False,
        )

    def score(self, output: RequestOutput) -> ScoreOutput:
        """Return the score from the request's last output; raises NanocoreError."""
        (sample,) = output.outputs
        if not sample.logprobs:
            raise NanocoreError(
                f"request {output.request_id} has no score: it ended with "
                f"{sample.finish_reason}: {sample.message or 'aborted by its caller'}"
            )
        num_in_prompt = len(self.continuation_ids) - 1
        of_prompt = (output.prompt_logprobs or [])[-num_in_prompt:] if num_in_prompt else []
        own = [next(iter(found.values())) for found in chain(of_prompt, sample.logprobs) if found]
        return ScoreOutput(
            request_id=output.request_id,
            token_ids=self.continuation_ids,
            token_logprobs=[found.logprob for found in own],
            is_greedy=all(found.rank == 1 for found in own),
            num_cached_tokens=output.num_cached_tokens or 0,
        )


async def score_request(
    tokenizer: TokenizerLoader, context: Prompt, continuation: Prompt, vocab_size: int
) -> ScoreRequest:
    """Join a context and its continuation.

    Two texts are tokenized as one: the continuation's tokens are those after as many as the context
    has alone, and white space at the end of the context belongs to the continuation, as in
    lm-evaluation-harness. Token ids are used as they are.

    Raises:
        InvalidRequestError: one of them is empty or not a prompt.
    """
    if isinstance(context, str) and isinstance(continuation, str):
        context_ids = await _open_ids(tokenizer, context.rstrip())
        together = await _open_ids(tokenizer, context + continuation) if continuation else []
        continuation_ids = together[len(context_ids) :]
    else:
        if isinstance(context, str):
            context_ids = await _open_ids(tokenizer, context)
        else:
            context_ids = _given_ids("context", context)
        if isinstance(continuation, str):
            continuation_ids = await tokenizer.encode(continuation, add_special_tokens=False)
        else:
            continuation_ids = _given_ids("continuation", continuation)
    if not context_ids and isinstance(context, str):
        prefix_token_id = (await tokenizer.get()).prefix_token_id
        context_ids = [] if prefix_token_id is None else [prefix_token_id]
    if not context_ids:
        raise InvalidRequestError(
            "the context is empty, and a first token has no probability: give at least one; for "
            "independent text, the model's BOS or EOS"
        )
    if not continuation_ids:
        raise InvalidRequestError(
            "the continuation has no tokens of its own: give at least one; if its text merges with "
            "the context's last token, give both as token ids"
        )
    last = continuation_ids[-1]
    if not 0 <= last < vocab_size:
        raise InvalidRequestError(
            f"the continuation's last token, {last!r}, is not a token id of this model: valid "
            f"ids are 0 to {vocab_size - 1}"
        )
    return ScoreRequest(context_ids, continuation_ids)


async def _open_ids(tokenizer: TokenizerLoader, text: str) -> list[int]:
    """Encode with the tokens that the tokenizer adds before a text (BOS), without those behind
    (EOS)."""
    token_ids = await tokenizer.encode(text)
    _, num_appended = (await tokenizer.get()).num_added_tokens
    return token_ids[: len(token_ids) - num_appended]


def _given_ids(name: str, prompt: list[int] | array[int] | TokensPrompt) -> list[int]:
    try:
        return [index(token_id) for token_id in given_token_ids(prompt)]
    except TypeError as error:
        raise InvalidRequestError(f"the token ids of the {name}: {error}") from None
