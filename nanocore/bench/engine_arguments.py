"""Flags of an engine that a benchmark launches, as arguments of `LLM`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nanocore.protocol.errors import ConfigError


def engine_arguments(flags: Sequence[str]) -> dict[str, str | bool]:
    """max_num_seqs="8" of --max-num-seqs 8. Which flags there are the engine says when it starts.

    Raises:
        ConfigError: what is no flag that begins with two dashes.
    """
    arguments: dict[str, str | bool] = {}
    for flag, value in _split(flags):
        if not flag.startswith("--") or not flag[2:].replace("-", "_").isidentifier():
            raise ConfigError(
                f"{flag} is no flag: an engine's are written out, as --max-num-seqs 8"
            )
        arguments[flag[2:].replace("-", "_")] = value
    return arguments


def _split(flags: Sequence[str]) -> Iterator[tuple[str, str | bool]]:
    ahead = list(flags)
    while ahead:
        flag, has_value, value = ahead.pop(0).partition("=")
        if has_value:
            yield flag, value
        elif ahead and not ahead[0].startswith("--"):
            yield flag, ahead.pop(0)
        else:
            yield flag, True
