"""Python arguments as flags of `nanocore-engine`: max_num_seqs=8 is --max-num-seqs=8.

True is --flag, False is --no-flag, a dict is its JSON, and None leaves it out. What a value of
Python cannot be said as is refused here, before a process starts; which flags there are, and in
which range, only the engine knows: it refuses them when it starts, in its own words.
"""

from __future__ import annotations

import json
import operator
import os
import reprlib
from collections.abc import Mapping
from typing import Any, Final, SupportsIndex, TypeAlias

from nanocore.protocol.errors import ConfigError

EngineArgument: TypeAlias = (
    str | os.PathLike[str] | SupportsIndex | float | bool | dict[str, Any] | None
)
_NOT_OURS: Final = {
    "listen": "it listens where only its client looks; for an engine that others join, start "
    "`nanocore-engine --listen ENDPOINT` and use connect()",
    "curve_dir": "keys are for TCP; start `nanocore-engine --listen tcp://ADDRESS:PORT "
    "--curve-dir DIR` and use connect()",
    "check": "there would be nothing to join; run `nanocore-engine --check`",
    "parent_fd": "it is the launcher's own",
    "version": "run `nanocore-engine --version`",
    "help": "run `nanocore-engine --help`",
}


def engine_flags(arguments: Mapping[str, EngineArgument]) -> list[str]:
    """The flags of an engine that a client launches.

    Raises:
        ConfigError: an argument that is no flag, or not one of a launched engine.
    """
    flags = []
    for name, value in arguments.items():
        if value is None:
            continue
        if not name.isidentifier():
            raise ConfigError(f"{name!r} is no name of an argument: write max_num_seqs=8")
        if name in _NOT_OURS:
            raise ConfigError(
                f"{name}={value!r} is no argument of a launched engine: {_NOT_OURS[name]}"
            )
        flag = name.replace("_", "-")
        if value is True:
            flags.append(f"--{flag}")
        elif value is False:
            flags.append(f"--no-{flag}")
        else:
            flags.append(f"--{flag}={_text(name, value)}")
    return flags


def _text(name: str, value: object) -> str:
    if isinstance(value, (str, os.PathLike)):
        text = os.fspath(value)
    elif isinstance(value, float):
        return repr(float(value))
    elif isinstance(value, dict):
        text = _json(value)
    else:
        try:
            return str(operator.index(value))  # type: ignore[arg-type]
        except TypeError:
            text = None
    try:
        if isinstance(text, str) and b"\0" not in os.fsencode(text):
            return text
    except UnicodeEncodeError:
        pass
    raise ConfigError(
        f"{name}={reprlib.repr(value)}: an engine's argument is a str without zeros, a Path, a "
        "number, True, False, a dict that JSON can say, or None for its default"
    )


def _json(value: dict[Any, Any]) -> str | None:
    """None: JSON cannot say it."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None
