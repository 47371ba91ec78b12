"""Values of --hf-overrides in place of config.json's, read and checked as if they stood there.

As in vLLM a value replaces the file's whole value of that name; those of `text_config`, an object
that some families keep all their settings in, one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from nanocore.protocol.errors import ConfigError, shorten
from nanocore.worker.config.settings import Settings

FLAG = "--hf-overrides"
_TEXT = "text_config"
_BASE = ("rope_theta", "partial_rotary_factor")
"""What `rope_parameters` holds beside the stretching that `rope_scaling` replaces."""


def override(settings: Settings, overrides: Mapping[str, Any]) -> Settings:
    """config.json with these values; errors then name the flag beside the file."""
    if not overrides:
        return settings
    values = _replaced(settings.values, overrides)
    ours, theirs = overrides.get(_TEXT), settings.values.get(_TEXT)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        values[_TEXT] = _replaced(theirs, ours)
    return Settings(f"{settings.source} with {FLAG}", values)


def check_all_read(settings: Settings, overrides: Mapping[str, Any]) -> None:
    """Refuse values that no part of the configuration has asked for: most are misspelled.

    Raises:
        ConfigError: there is one.
    """
    names = list(overrides)
    if isinstance(text := overrides.get(_TEXT), dict):
        names += [f"{_TEXT}.{name}" for name in text]
    for name in names:
        if name.rpartition(".")[2] == "quantization_config":
            raise ConfigError(
                f"{FLAG}: {name} says how files store weights, and is read from config.json alone"
            )
        if name not in settings.read_names:
            near = _elsewhere(name, settings) or get_close_matches(name, settings.read_names, n=1)
            raise ConfigError(
                f"{FLAG}: {shorten(name)} is no setting that this model reads"
                + (f", the nearest is {near[0]}" if near else "; remove it")
            )


def _elsewhere(name: str, settings: Settings) -> list[str]:
    """Where a setting of this name is read, if in another object of the file."""
    last = name.rpartition(".")[2]
    return sorted(read for read in settings.read_names if read.rpartition(".")[2] == last)


def _replaced(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The two schemas of rotary settings exclude each other: what is given is what counts."""
    result = {**values, **overrides}
    if "rope_parameters" in overrides:
        return result if "rope_scaling" in overrides else _without(result, "rope_scaling")
    ropes = values.get("rope_parameters")
    if not isinstance(ropes, dict):
        return result
    nested = ropes.get("full_attention")  # Gemma 3, whose old schema speaks of these layers
    rope = _without(nested if isinstance(nested, dict) else ropes, *overrides)
    if "rope_scaling" in overrides:
        rope = {name: rope[name] for name in _BASE if name in rope}
        if isinstance(overrides["rope_scaling"], dict):
            result["rope_scaling"] = rope | overrides["rope_scaling"]
    result["rope_parameters"] = ropes | {"full_attention": rope} if nested is not None else rope
    return result


def _without(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}
