"""Sampling parameters: what a request wants of the sampler and of the stop checks.

`EngineSamplingParams` is what crosses the wire. `SamplingParams` is what users write: it adds what
only a client can do, because it needs text. Field names, defaults and ranges are vLLM's where vLLM
has them. Both validate on construction and on decoding, so the engine repeats every check for
clients written in other languages.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, get_args

import msgspec

from nanocore.protocol.errors import InvalidRequestError, shorten
from nanocore.protocol.fields import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_BAD_WORDS_TOKENS,
    MAX_INT32,
    MAX_LOGIT_BIASES,
    MAX_NUM_SAMPLES,
    MAX_PATTERN_COUNT,
    MAX_PATTERN_SIZE,
    MAX_STOP_TOKEN_IDS,
    Seed,
    check_limits,
    check_types,
    limited,
    since,
)
from nanocore.protocol.structured_outputs import StructuredOutputs, StructuredOutputsParams

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow (vLLM's threshold)."""

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_LOGIT_BIAS = 100

Pooling = Literal["last", "mean"]
_BESIDE_POOLING: Final = frozenset(
    {
        "pooling",
        "max_tokens",
        "skip_reading_prefix_cache",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "detokenize",
    }
)
"""Parameters that say nothing of sampling."""


class RepetitionDetectionParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Repetition that ends a request: the same pattern of tokens, min_count times in a row.

    max_pattern_size, min_pattern_size: tokens of the pattern; 0 is 1.
    """

    max_pattern_size: Annotated[
        int,
        limited(
            "leave repetition_detection out to switch it off", minimum=1, maximum=MAX_PATTERN_SIZE
        ),
    ]
    min_pattern_size: Annotated[int, limited("0 is 1", minimum=0, maximum=MAX_PATTERN_SIZE)] = 0
    min_count: Annotated[
        int, limited("a pattern is repeated from 2 on", minimum=2, maximum=MAX_PATTERN_COUNT)
    ]

    def __post_init__(self) -> None:
        check_types(self, "repetition_detection.")
        check_limits(self)
        if self.min_pattern_size > self.max_pattern_size:
            raise InvalidRequestError(
                f"min_pattern_size={self.min_pattern_size} is out of range: at most "
                f"max_pattern_size, which is {self.max_pattern_size}"
            )


class CommonSamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Parameters that users write and the engine obeys alike.

    A step changes a row's logits in this order: structured_outputs, allowed_token_ids, logit_bias,
    min_tokens, bad words, repetition, frequency and presence penalty, temperature, min_p, top_k,
    top_p.

    temperature: 0 is greedy; otherwise logits are divided by it.
    top_k: keep the k most likely tokens; 0 or -1 keeps all.
    top_p: keep the smallest set of tokens whose probability reaches top_p, in (0, 1].
    min_p: drop tokens less likely than min_p times the most likely one, in [0, 1].
    seed: the request's noise is a function of (seed, position) only; None lets the engine draw one.
    max_tokens: limit of output tokens; None means until EOS or the context length.
    stop_token_ids: end, with finish_reason "stop", after any of these.
    ignore_eos: do not end at the model's EOS tokens.
    skip_reading_prefix_cache: compute the whole prompt even if a prefix of it is cached; the
    request's own blocks are still cached for others.
    n: parallel samples of the same prompt; the i-th one's seed is (seed + i) modulo 2**53.
    min_tokens: output tokens before EOS (unless ignored) or one of stop_token_ids can be sampled.
    presence_penalty: subtracted from the logits of tokens in the output (OpenAI's).
    frequency_penalty: the same, once per occurrence (OpenAI's).
    repetition_penalty: positive logits of tokens in prompt or output are divided by it, others are
    multiplied (CTRL: Keskar et al. 2019).
    allowed_token_ids: sample no other tokens.
    logprobs: return each token's log probability and rank, and those of the k most likely tokens;
    -1 for all. They are those of the model's own logits, before any other parameter.
    prompt_logprobs: the same for each prompt token except the first. The prompt is computed whole.
    pooling: return an embedding and no token: the hidden state after the last norm, of the prompt's
    last token or the mean of all. max_tokens may be 1; other sampling parameters are refused.
    repetition_detection: end, with finish_reason and stop_reason "stop" and "repetition", when the
    output ends with min_count times the same min_pattern_size to max_pattern_size tokens; or a dict
    of these.
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
    n: Annotated[int, since(5), limited(minimum=1, maximum=MAX_NUM_SAMPLES)] = 1
    min_tokens: Annotated[int, since(5), limited(minimum=0, maximum=MAX_INT32)] = 0
    presence_penalty: Annotated[float, since(5), limited("0 is off", minimum=-2, maximum=2)] = 0.0
    frequency_penalty: Annotated[float, since(5), limited("0 is off", minimum=-2, maximum=2)] = 0.0
    repetition_penalty: Annotated[
        float, since(5), limited("1 is off", minimum=0.01, maximum=100)
    ] = 1.0
    allowed_token_ids: (
        Annotated[
            list[int],
            since(5),
            limited("absent for all", minItems=1, maxItems=MAX_ALLOWED_TOKEN_IDS),
        ]
        | None
    ) = None
    logprobs: (
        Annotated[int, since(5), limited("-1 for all", minimum=-1, maximum=MAX_INT32)] | None
    ) = None
    prompt_logprobs: (
        Annotated[int, since(5), limited("-1 for all", minimum=-1, maximum=MAX_INT32)] | None
    ) = None
    pooling: Annotated[str, since(7), limited(enum=get_args(Pooling))] | None = None
    repetition_detection: Annotated[RepetitionDetectionParams | None, since(14)] = None

    def __post_init__(self) -> None:
        check_limits(self)
        if self.pooling is not None:
            _check_pooling(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens={self.min_tokens} is out of range: at most max_tokens, which is "
                f"{self.max_tokens}"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE


class EngineSamplingParams(CommonSamplingParams, frozen=True, kw_only=True):
    """Sampling parameters as the engine gets them.

    logit_bias: (token id, what is added to its logit) pairs, each token once.
    bad_words_token_ids: sequences of tokens that the output never holds: after the others, the last
    token of one is not sampled.
    structured_outputs: what the output must be; before anything above, tokens that it cannot go on
    with are forbidden.
    """

    logit_bias: Annotated[
        list[tuple[int, float]], since(5), limited(maxItems=MAX_LOGIT_BIASES)
    ] = []
    bad_words_token_ids: Annotated[list[list[int]], since(5), limited(maxItems=MAX_BAD_WORDS)] = []
    structured_outputs: Annotated[StructuredOutputs | None, since(6)] = None

    def __post_init__(self) -> None:
        CommonSamplingParams.__post_init__(self)
        if self.logit_bias:
            _check_logit_bias(self.logit_bias)
        if self.bad_words_token_ids:
            _check_bad_words(self.bad_words_token_ids)


class DefaultSampling(EngineSamplingParams, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Sampling defaults that an engine recommends; a later engine's may have fields unknown
    here.
    """


class SamplingParams(CommonSamplingParams, frozen=True, kw_only=True):
    """Parameters that users write: the engine's, and those that need text.

    logit_bias: biases added to logits, by token id; in [-100, 100].
    bad_words: texts that the output never contains, as the tokenizer writes them.
    structured_outputs: constrains the output, for example to a JSON Schema.
    stop: end before any of these strings appears in the text.
    include_stop_str_in_output: keep the stop string at the end of the text.
    skip_special_tokens: leave tokens such as <|im_end|> out of the text.
    detokenize: produce text; False saves the work when only token_ids are needed.
    """

    logit_bias: dict[int, float] | None = None
    bad_words: list[str] = []
    structured_outputs: StructuredOutputsParams | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.repetition_detection, dict):
            detection = _repetition_detection(self.repetition_detection)
            msgspec.structs.force_setattr(self, "repetition_detection", detection)
        check_types(self)
        if isinstance(self.structured_outputs, dict):
            raise InvalidRequestError(
                "structured_outputs is a dict: write StructuredOutputsParams(json=...)"
            )
        CommonSamplingParams.__post_init__(self)
        _check_logit_bias([*(self.logit_bias or {}).items()])
        _check_strings("bad_words", self.bad_words, MAX_BAD_WORDS // 2)
        stops = self.stop_strings
        _check_strings("stop", stops, MAX_STOP_STRINGS)
        if stops and not self.detokenize:
            raise InvalidRequestError("stop strings need text: use them with detokenize=True")

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings, always as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @classmethod
    def from_engine(cls, params: EngineSamplingParams) -> SamplingParams:
        """Make parameters of an engine's defaults, with the client's own at theirs."""
        return cls(
            logit_bias=dict(params.logit_bias) or None,
            **{name: getattr(params, name) for name in CommonSamplingParams.__struct_fields__},
        )

    def for_engine(
        self, bad_words_token_ids: list[list[int]] | None = None
    ) -> EngineSamplingParams:
        """Return what SUBMIT holds, without parameters of the client.

        bad_words_token_ids: the bad words', as the tokenizer has them.
        """
        return EngineSamplingParams(
            logit_bias=[*(self.logit_bias or {}).items()],
            bad_words_token_ids=bad_words_token_ids or [],
            structured_outputs=(
                None if self.structured_outputs is None else self.structured_outputs.for_engine()
            ),
            **{name: getattr(self, name) for name in CommonSamplingParams.__struct_fields__},
        )


def _repetition_detection(given: dict[str, Any]) -> RepetitionDetectionParams:
    try:
        return RepetitionDetectionParams(**given)
    except TypeError as error:
        raise InvalidRequestError(f"repetition_detection: {error}") from None


def _check_pooling(params: CommonSamplingParams) -> None:
    """Refuse sampling parameters with pooling, which samples nothing."""
    if params.pooling not in get_args(Pooling):
        kinds = " or ".join(map(repr, get_args(Pooling)))
        raise InvalidRequestError(
            f"pooling={shorten(repr(params.pooling))} is unknown: it must be {kinds}, or absent"
        )
    if params.max_tokens not in (None, 1):
        raise InvalidRequestError(
            f"pooling={params.pooling!r} with max_tokens={params.max_tokens}: an embedding has no "
            "output tokens; leave max_tokens out, or at 1"
        )
    defaults = type(params)()
    for name in params.__struct_fields__:
        value = getattr(params, name)
        if name not in _BESIDE_POOLING and value != getattr(defaults, name):
            raise InvalidRequestError(
                f"pooling={params.pooling!r} with {name}={shorten(repr(value))}: an embedding has "
                f"no output tokens; leave {name} out"
            )


def _check_logit_bias(pairs: list[tuple[int, float]]) -> None:
    if len(pairs) > MAX_LOGIT_BIASES:
        raise InvalidRequestError(
            f"len(logit_bias)={len(pairs)} is out of range: at most {MAX_LOGIT_BIASES}"
        )
    for token_id, bias in pairs:
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:  # NaN is not
            raise InvalidRequestError(
                f"logit_bias of token {token_id} is {bias!r}, which is out of range: it must be in "
                f"[-{MAX_LOGIT_BIAS}, {MAX_LOGIT_BIAS}]; to forbid a token use bad words"
            )
    if len({token_id for token_id, _ in pairs}) < len(pairs):
        raise InvalidRequestError("logit_bias has a token id twice: add the two up")


def _check_bad_words(words: list[list[int]]) -> None:
    num_tokens = sum(map(len, words))
    if num_tokens > MAX_BAD_WORDS_TOKENS:
        raise InvalidRequestError(
            f"bad_words_token_ids has {num_tokens} token ids in all: at most {MAX_BAD_WORDS_TOKENS}"
        )
    if not all(words):
        raise InvalidRequestError("bad_words_token_ids has an empty sequence: leave it out")


def _check_strings(name: str, texts: list[str], most: int) -> None:
    if len(texts) > most:
        raise InvalidRequestError(
            f"len({name})={len(texts)} is out of range: at most {most} strings"
        )
    for text in texts:
        if not 0 < len(text) <= MAX_STOP_STRING_CHARS:
            raise InvalidRequestError(
                f"{name}={text!r} is out of range: each string must have 1 to "
                f"{MAX_STOP_STRING_CHARS} characters"
            )
