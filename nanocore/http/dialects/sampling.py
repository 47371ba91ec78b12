"""Sampling parameters as OpenAI's APIs have them, with vLLM's further ones."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec.structs import replace

from nanocore.client import SamplingParams, StructuredOutputsParams
from nanocore.http.errors import bad_request
from nanocore.protocol.errors import InvalidRequestError, quoted
from nanocore.protocol.fields import MAX_EXACT_INT, MAX_INT32
from nanocore.protocol.sampling import EngineSamplingParams

_SAME: Final = (
    "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stop_token_ids", "ignore_eos",
    "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "include_stop_str_in_output", "skip_special_tokens", "allowed_token_ids", "bad_words",
    "prompt_logprobs",
)  # fmt: skip
"""Fields that SamplingParams has by the same name, and None where they are not given."""
_TOKEN_ID: Final = re.compile("[0-9]{1,10}")
Priority: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
"""Below 0 a request would go before everybody's, which is for administrators, on the wire alone."""


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that the dialects have in common. None: as the model's makers recommend.

    Values are `SamplingParams`'s; ranges are checked there and by the engine. Beyond these: top_p=0
    is greedy, a seed may be any int64 (-1, as with vLLM, has the engine draw one), and max_tokens
    has no limit.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: Priority | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    use_beam_search: bool | None = None

    def sampling_params(
        self, recommended: EngineSamplingParams, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """What is asked for, over what the model's makers recommend.

        Raises:
            HttpError, InvalidRequestError: a value is out of range, or not served.
        """
        if self.use_beam_search:
            raise bad_request("beam search is not served: leave use_beam_search out")
        given = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        if self.logit_bias:
            given["logit_bias"] = _logit_bias(self.logit_bias)
        if self.structured_outputs is not None:
            given["structured_outputs"] = _structured_outputs(self.structured_outputs)
        if given.get("top_p") == 0:
            given |= {"top_p": 1.0, "temperature": 0.0}
        if self.seed is not None:
            given["seed"] = _seed(self.seed)
        if max_tokens is not None:
            given["max_tokens"] = min(max_tokens, MAX_INT32)
        if logprobs is not None:
            given["logprobs"] = logprobs
        return replace(SamplingParams.from_engine(recommended), **given)


def _seed(given: int) -> int | None:
    """The engine's seeds are smaller: of others the lower bits count."""
    if not -(2**63) <= given < 2**63:
        raise bad_request(f"seed={quoted(given)} is out of range: it is an int64", "seed")
    return None if given == -1 else given & MAX_EXACT_INT


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    """JSON's keys are strings."""
    for token_id in given:
        if not _TOKEN_ID.fullmatch(token_id):
            raise bad_request(
                f"logit_bias has the key {quoted(token_id)}: keys are token ids, of at most ten "
                "decimal digits",
                "logit_bias",
            )
    biases = {int(token_id): bias for token_id, bias in given.items()}
    if len(biases) < len(given):
        raise bad_request("logit_bias has two keys for one token id", "logit_bias")
    return biases


def _structured_outputs(given: dict[str, Any]) -> StructuredOutputsParams:
    """vLLM's fields; those that are null are left out."""
    known = {name: value for name, value in given.items() if value is not None}
    try:
        return StructuredOutputsParams(**known)
    except TypeError as error:
        raise InvalidRequestError(f"structured_outputs: {error}") from None
