"""Sampling parameters: what a request asks of the sampler and of the stop checks.

`EngineSamplingParams` is what crosses the wire. `SamplingParams` is what users write: it adds what
only a client can do, because it needs text. Field names, defaults and ranges are vLLM's where vLLM
has them. Both validate on construction and on decoding, so the engine repeats every check for
clients written in other languages.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, get_type_hints

import msgspec

from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.fields import (
    MAX_INT32,
    MAX_STOP_TOKEN_IDS,
    Seed,
    limited,
    since,
)
from nanocore.protocol.limits import check_limits

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow (vLLM's threshold)."""

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256


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

    temperature: Annotated[float, limited("0 is greedy", minimum=0)] = 1.0
    top_p: Annotated[float, limited("1 is off", exclusiveMinimum=0, maximum=1)] = 1.0
    top_k: Annotated[int, limited("0 or -1 for all", minimum=-1, maximum=MAX_INT32)] = 0
    min_p: Annotated[float, limited("0 is off", minimum=0, maximum=1)] = 0.0
    seed: Seed | None = None
    max_tokens: (
        Annotated[int, limited("absent: as many as fit", minimum=1, maximum=MAX_INT32)] | None
    ) = None
    stop_token_ids: Annotated[list[int], limited(maxItems=MAX_STOP_TOKEN_IDS)] = []
    ignore_eos: bool = False
    skip_reading_prefix_cache: Annotated[bool, since(1)] = False

    def __post_init__(self) -> None:
        check_limits(self)

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
        if len(stops) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"len(stop)={len(stops)} is out of range: at most {MAX_STOP_STRINGS} strings"
            )
        for text in stops:
            if not 0 < len(text) <= MAX_STOP_STRING_CHARS:
                raise InvalidRequestError(
                    f"stop={text!r} is out of range: each string must have 1 to "
                    f"{MAX_STOP_STRING_CHARS} characters"
                )
        if stops and not self.detokenize:
            raise InvalidRequestError("stop strings need text: use them with detokenize=True")

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings, always as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @classmethod
    def from_engine(cls, params: EngineSamplingParams) -> SamplingParams:
        """What an engine recommends, with the client's own parameters at their defaults."""
        return cls(**{name: getattr(params, name) for name in params.__struct_fields__})

    def for_engine(self) -> EngineSamplingParams:
        """Without what only a client can do: what SUBMIT holds."""
        return EngineSamplingParams(
            **{name: getattr(self, name) for name in EngineSamplingParams.__struct_fields__}
        )


@cache
def _user_types() -> dict[str, Any]:
    """Of each parameter, without the ranges: what they are is checked with words of its own."""
    return get_type_hints(SamplingParams)
