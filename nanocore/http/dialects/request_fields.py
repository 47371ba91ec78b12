"""Request fields that the dialects share: sampling parameters of OpenAI's APIs and of vLLM's."""

from __future__ import annotations

import re
import time
import uuid
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec.structs import replace

from nanocore.client import SamplingParams, StructuredOutputsParams
from nanocore.http.http_errors import bad_request
from nanocore.protocol.errors import InvalidRequestError, quoted
from nanocore.protocol.fields import MAX_EXACT_INT, MAX_INT32
from nanocore.protocol.sampling import EngineSamplingParams, RepetitionDetectionParams

_TOKEN_ID: Final = re.compile("[0-9]{1,10}")
_MAX_ID_CHARS: Final = 200
_SUFFIX_CHARS: Final = 8
Priority: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
"""Not negative over HTTP: only administrators may use negative priorities, on the wire."""


class StreamOptions(msgspec.Struct):
    """include_usage: a last chunk with the usage. continuous_usage_stats: usage in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """Base of generation requests. None: the model's recommended value.

    Ranges are checked by `SamplingParams` and the engine. Beyond them, top_p=0 is greedy, a seed
    may be any int64 (-1 has the engine draw one, as in vLLM), and max_tokens has no upper limit.
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
    repetition_detection: RepetitionDetectionParams | None = None
    priority: Priority | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    use_beam_search: bool | None = None

    def sampling_params(
        self, recommended: EngineSamplingParams, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """Return the parameters: the given ones over the recommended ones.

        Raises:
            HttpError, InvalidRequestError: a value is out of range or not supported.
        """
        if self.use_beam_search:
            raise bad_request("beam search is not supported: leave use_beam_search out")
        given = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        if self.logit_bias:
            given["logit_bias"] = _logit_bias(self.logit_bias)
        if self.structured_outputs is not None:
            given["structured_outputs"] = _structured_outputs(self.structured_outputs)
        # The engine's top_p is above 0; OpenAI's 0 means the most likely token.
        if given.get("top_p") == 0:
            given |= {"top_p": 1.0, "temperature": 0.0}
        if self.seed is not None:
            given["seed"] = _seed(self.seed)
        if max_tokens is not None:
            given["max_tokens"] = min(max_tokens, MAX_INT32)
        if logprobs is not None:
            given["logprobs"] = logprobs
        return replace(SamplingParams.from_engine(recommended), **given)

    def refuse(self, *names: str) -> None:
        """Raise HttpError if one of these fields is given, because it is not supported."""
        for name in names:
            if getattr(self, name) is not None:
                raise bad_request(f"{name} is not supported: leave it out", name)


_SAME: Final = {*SamplingFields.__struct_fields__} & {*SamplingParams.__struct_fields__} - {
    "logit_bias", "structured_outputs",
}  # fmt: skip
"""Fields that `SamplingParams` has under the same name and with the same type; None if absent."""


class ResponseId:
    """The id of a response, which is also the request's in the engine's traces and log.

    So `nanocore explain` finds it. An id chosen by the client gets a suffix in the engine, where
    ids are unique, because another client may choose the same.

    Args:
        prefix: of the kind of response.
        given: the client's id, or None.
        header: its x-request-id, or None; an id made of it has the suffix everywhere.
    """

    def __init__(self, prefix: str, given: str | None, header: str | None = None) -> None:
        made = uuid.uuid4().hex
        if header is not None:
            made = f"{header}-{made[:_SUFFIX_CHARS]}"
        self.text = f"{prefix}{given or made}"
        self._is_given = bool(given)

    def head(self, kind: str, model: str, fingerprint: str | None) -> dict[str, Any]:
        """Return the first fields of OpenAI's completions of either kind.

        fingerprint: if equal, equal requests get equal responses.
        """
        return {
            "id": self.text,
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def engine_id(self, index: int | None = None) -> str:
        """Return the request's id in the engine. index: of the prompt, if there are several."""
        name = self.text
        if self._is_given:
            name = f"{name[:_MAX_ID_CHARS]}-{uuid.uuid4().hex[:_SUFFIX_CHARS]}"
        return name if index is None else f"{name}-{index}"


def _seed(given: int) -> int | None:
    if not -(2**63) <= given < 2**63:
        raise bad_request(f"seed={quoted(given)} is out of range: it is an int64", "seed")
    return None if given == -1 else given & MAX_EXACT_INT  # the engine's seeds have fewer bits


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
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
    known = {name: value for name, value in given.items() if value is not None}
    try:
        return StructuredOutputsParams(**known)
    except TypeError as error:
        raise InvalidRequestError(f"structured_outputs: {error}") from None
