"""Sampling parameters: what a request asks of the sampler and of the stop checks.

`EngineSamplingParams` is what crosses the wire. `SamplingParams` is what users write: it adds what
only a client can do, because it needs text. Field names, defaults and ranges are vLLM's where vLLM
has them. Both validate on construction and on decoding, so the engine repeats every check for
clients written in other languages.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Annotated, Any, get_type_hints

import msgspec

from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.fields import (
    MAX_EXACT_INT,
    MAX_INT32,
    MAX_STOP_TOKEN_IDS,
    Seed,
    limited,
    since,
)

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow (vLLM's threshold)."""

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256


def _require(ok: bool, name: str, value: object, limit: str) -> None:
    if not ok:
        raise InvalidRequestError(f"{name}={value!r} is out of range: {limit}")


class EngineSamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The part of the sampling parameters that the engine obeys.

    temperature: 0 is greedy; otherwise logits are divided by it.
    top_k: keep the k most likely tokens; 0 or -1 keeps all.
    top_p: keep the smallest set of tokens whose probability reaches top_p, in (0, 1].
    min_p: drop tokens less likely than min_p times the most likely one, in [0, 1].
    seed: the request's noise is a function of (seed, position) only; None lets the engine draw.
    max_tokens: output tokens at most; None means until EOS or the model's length.
    stop_token_ids: end, with finish_reason "stop", after any of these.
    ignore_eos: do not end at the model's EOS tokens.
    skip_reading_prefix_cache: compute the whole prompt, although a prefix of it may be cached; the
    request's own blocks are cached for others all the same.
    """

    temperature: Annotated[float, limited(minimum=0)] = 1.0
    top_p: Annotated[float, limited(exclusiveMinimum=0, maximum=1)] = 1.0
    top_k: Annotated[int, limited(minimum=-1, maximum=MAX_INT32)] = 0
    min_p: Annotated[float, limited(minimum=0, maximum=1)] = 0.0
    seed: Seed | None = None
    max_tokens: Annotated[int, limited(minimum=1, maximum=MAX_INT32)] | None = None
    stop_token_ids: Annotated[list[int], limited(maxItems=MAX_STOP_TOKEN_IDS)] = []
    ignore_eos: bool = False
    skip_reading_prefix_cache: Annotated[bool, since(1)] = False

    def __post_init__(self) -> None:
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0.0,
            "temperature",
            self.temperature,
            "it must be finite and at least 0 (0 is greedy)",
        )
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "it must be in (0, 1]; 1 is off")
        _require(
            -1 <= self.top_k <= MAX_INT32,
            "top_k",
            self.top_k,
            "it must be at least 1 and below 2**31, or 0 or -1 for all",
        )
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "it must be in [0, 1]; 0 is off")
        if self.seed is not None:
            _require(
                0 <= self.seed <= MAX_EXACT_INT,
                "seed",
                self.seed,
                f"it must be in [0, {MAX_EXACT_INT}]",
            )
        if self.max_tokens is not None:
            _require(
                1 <= self.max_tokens <= MAX_INT32,
                "max_tokens",
                self.max_tokens,
                "it must be at least 1 and below 2**31, or absent for as many as fit",
            )
        _require(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "len(stop_token_ids)",
            len(self.stop_token_ids),
            f"at most {MAX_STOP_TOKEN_IDS} ids",
        )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE


class DefaultSampling(EngineSamplingParams, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """What an engine recommends. A later one may recommend what this client does not know."""


class SamplingParams(EngineSamplingParams, frozen=True, kw_only=True):
    """What users write: the engine's parameters and those that need text.

    stop: end before any of these strings appears in the text.
    include_stop_str_in_output: keep the stop string at the end of the text.
    skip_special_tokens: leave tokens such as <|im_end|> out of the text.
    detokenize: produce text at all; False saves the work when only token_ids are wanted.
    """

    stop: str | list[str] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        for name, kind in _user_types().items():
            try:
                msgspec.convert(getattr(self, name), kind)
            except msgspec.ValidationError as error:
                value = getattr(self, name)
                raise InvalidRequestError(
                    f"{name}={value!r} is of the wrong type: {error}"
                ) from None
        EngineSamplingParams.__post_init__(self)
        stops = self.stop_strings
        _require(
            len(stops) <= MAX_STOP_STRINGS,
            "len(stop)",
            len(stops),
            f"at most {MAX_STOP_STRINGS} strings",
        )
        for text in stops:
            _require(
                0 < len(text) <= MAX_STOP_STRING_CHARS,
                "stop",
                text,
                f"each string must have 1 to {MAX_STOP_STRING_CHARS} characters",
            )
        if stops and not self.detokenize:
            raise InvalidRequestError("stop strings need text: use them with detokenize=True")

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings, always as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @classmethod
    def from_engine(cls, params: EngineSamplingParams) -> SamplingParams:
        """The same, for a client to use."""
        return cls(**{name: getattr(params, name) for name in params.__struct_fields__})

    def for_engine(self) -> EngineSamplingParams:
        """The part that is sent."""
        return EngineSamplingParams(
            **{name: getattr(self, name) for name in EngineSamplingParams.__struct_fields__}
        )


@cache
def _user_types() -> dict[str, Any]:
    """Of each parameter, without the ranges: what they are is checked with words of its own."""
    return get_type_hints(SamplingParams)
