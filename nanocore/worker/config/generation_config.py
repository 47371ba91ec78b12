"""generation_config.json: the sampling its makers recommend, as defaults for requests.

As with vLLM's `--generation-config auto`, the values count whether or not `do_sample` is set. What
the file asks for and nanocore cannot do is listed, so that it can be logged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from nanocore.protocol.errors import ConfigError, InvalidRequestError, ModelFileError, shorten
from nanocore.protocol.sampling import DefaultSampling
from nanocore.worker.config.json_settings import Settings

_HARMLESS = {
    "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "max_length",
    "max_time", "transformers_version", "use_cache", "cache_implementation", "cache_config",
    "disable_compile", "return_dict_in_generate", "return_legacy_cache", "prompt_lookup_num_tokens",
}  # fmt: skip
"""Ids, bookkeeping and speed: none of these changes which tokens are likely."""

_USED: dict[str, type] = {
    field.name: type(field.default)
    for field in msgspec.structs.fields(DefaultSampling)
    if type(field.default) in (int, float)
}
"""Sampling parameters that are numbers: they have the names that transformers has, if it does."""

_NEUTRAL: dict[str, Any] = {
    "do_sample": True, "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0,
    "length_penalty": 1.0, "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1,
    "typical_p": 1.0, "guidance_scale": 1.0,
}  # fmt: skip
"""Values that ask for nothing; those of other settings are 0, false, null and empty."""


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters for requests that do not set them.

    given: what the file sets, by name. ignored: "name = value" of what cannot be honoured.
    """

    given: dict[str, Any] = msgspec.field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def sampling(self) -> DefaultSampling:
        """The sampling parameters of requests that bring none.

        Raises InvalidRequestError: a value out of its range.
        """
        return DefaultSampling(**self.given)


def read_generation_defaults(settings: Settings) -> GenerationDefaults:
    """The sampling defaults of a generation_config.json.

    Raises ModelFileError: a value of the wrong type or out of its range.
    """
    values: dict[str, Any] = {
        name: settings.nullable(name, kind, None) for name, kind in _USED.items()
    }
    defaults = GenerationDefaults(
        given={name: value for name, value in values.items() if value is not None},
        ignored=_ignored(settings),
    )
    try:
        defaults.sampling()
    except InvalidRequestError as error:
        raise ModelFileError(f"{settings.source}: {error}") from None
    return defaults


def override_generation(
    defaults: GenerationDefaults, overrides: Mapping[str, Any]
) -> GenerationDefaults:
    """Return the defaults with other values; None removes one.

    Raises:
        ConfigError: an unknown name, or a value of the wrong type or out of its range.
    """
    flag = "--override-generation-config"
    if unknown := overrides.keys() - _USED.keys():
        raise ConfigError(f"{flag}: unknown: {min(unknown)}; known: {', '.join(_USED)}")
    try:
        given = read_generation_defaults(Settings(flag, {**overrides})).given
    except ModelFileError as error:
        raise ConfigError(str(error)) from None
    kept = {name: value for name, value in defaults.given.items() if name not in overrides}
    return replace(defaults, given=kept | given)


def _ignored(settings: Settings) -> tuple[str, ...]:
    used = _HARMLESS | _USED.keys()
    return tuple(
        shorten(f"{name} = {value}")
        for name, value in sorted(settings.values.items())
        if name not in used and not name.startswith(("_", "output_"))
        if (value != _NEUTRAL[name] if name in _NEUTRAL else value not in (None, 0, [], {}, ""))
        if value is not None
    )
