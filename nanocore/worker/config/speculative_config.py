"""Settings of speculative decoding, as --speculative-config has them, with vLLM's keys."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import Meta

from nanocore.protocol.errors import ConfigError, shorten

Method = Literal["ngram", "suffix", "draft_model", "mtp"]
METHODS: Final[tuple[Method, ...]] = get_args(Method)
WORKER_METHODS: Final[tuple[Method, ...]] = "draft_model", "mtp"
"""Methods whose drafts are guessed where the model runs, and are not in plans."""
MAX_DRAFTS: Final = 64
MAX_STEP_DRAFTS: Final = 256
"""Limit for all rows of a step: logits behind drafts take memory, and in a step of so many tokens
products take the time, so that drafts do not pay."""

_DEFAULT_DRAFTS: Final[dict[Method, int]] = {"ngram": 16, "suffix": 16, "draft_model": 5, "mtp": 3}
DEFAULT_LOOKUP: Final = 5
"""vLLM's default for both lengths of n-grams; where one of them is given, it is the other's."""

_FLAG: Final = "--speculative-config"
_OWNERS: Final = {"prompt_lookup": "ngram", "suffix_decoding": "suffix", "model": "draft_model"}
"""Methods by the beginnings of the keys that they alone have."""
_Count = Annotated[int, Meta(ge=1, le=1024)]


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What proposes drafts, and how many at most.

    num_speculative_tokens: drafts of a row in a step, at most. adaptive: fewer where they would not
    pay. model: folder or hub id of a draft model. prompt_lookup_*: tokens of an n-gram.
    suffix_decoding_*: see `SuffixProposer`.
    """

    method: Method
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=MAX_DRAFTS)]
    adaptive: bool = True
    model: str | None = None
    prompt_lookup_min: _Count = DEFAULT_LOOKUP
    prompt_lookup_max: _Count = DEFAULT_LOOKUP
    suffix_decoding_max_tree_depth: _Count = 24
    suffix_decoding_max_cached_requests: Annotated[int, Meta(ge=0, le=2**20)] = 10_000
    suffix_decoding_max_spec_factor: Annotated[float, Meta(gt=0, le=1024)] = 4.0
    suffix_decoding_min_token_prob: Annotated[float, Meta(ge=0, le=1)] = 0.1

    @classmethod
    def of(cls, given: dict[str, Any]) -> SpeculativeConfig | None:
        """Settings of a JSON object; None: it is empty, and nothing is drafted.

        Raises:
            ConfigError: a key or a value is none that is served.
        """
        if not given:
            return None
        values = {key: value for key, value in given.items() if value is not None}
        for key in values.keys() - set(cls.__struct_fields__):
            close = get_close_matches(key, cls.__struct_fields__, 1)
            instead = (
                f"did you mean {close[0]!r}?"
                if close
                else f"keys: {', '.join(cls.__struct_fields__)}"
            )
            raise ConfigError(f"{_FLAG}: {shorten(repr(key))} is no key here; {instead}")
        # As in vLLM a model that is named like a method, without one, means the method.
        method = values.setdefault("method", str(values.get("model", "")).strip("[]"))
        if "model" in values and method not in METHODS and "method" not in given:
            method = values["method"] = "draft_model"
        if method not in METHODS:
            raise ConfigError(
                f'{_FLAG}: "method" {shorten(repr(method))}: served are {", ".join(METHODS)}'
            )
        if method == str(values.get("model")).strip("[]"):
            del values["model"]
        for key in values:
            owner = next((own for name, own in _OWNERS.items() if key.startswith(name)), method)
            if owner != method:
                raise ConfigError(f"{_FLAG}: {key!r} is for the method {owner}, not for {method}")
        if method == "draft_model" and "model" not in values:
            raise ConfigError(f'{_FLAG}: "method" "draft_model" needs a "model", its folder')
        values.setdefault("num_speculative_tokens", _DEFAULT_DRAFTS[method])
        ends = "prompt_lookup_min", "prompt_lookup_max"
        for one, other in (ends, ends[::-1]):
            if one in values:
                values.setdefault(other, values[one])
        try:
            config = msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            limit, _, path = str(error).partition(" - at `$.")
            key = path.rstrip("`")
            found = f"{key!r} {shorten(repr(values.get(key)))}"
            raise ConfigError(f"{_FLAG}: {found}: {limit}") from None
        if config.prompt_lookup_min > config.prompt_lookup_max:
            raise ConfigError(
                f"{_FLAG}: 'prompt_lookup_min' {config.prompt_lookup_min} is above "
                f"'prompt_lookup_max' {config.prompt_lookup_max}"
            )
        return config


def step_drafts(num_rows: int, max_drafts: int) -> int:
    """Drafts of all rows in a step, at most."""
    return min(num_rows * max_drafts, MAX_STEP_DRAFTS)
