"""Arguments of SDK calls, checked before anything is sent; and flags of a launched engine.

Only values that would cost more than the one call are refused here: an ERROR that names no request
ends the session, and so would a SUBMIT whose id the engine cannot return. The engine checks the
rest.

Python arguments become flags of `nanocore-engine`: max_num_seqs=8 is --max-num-seqs=8, True is
--flag, False is --no-flag, a dict is its JSON, and None leaves the flag out. Only the engine knows
its flags and ranges: it refuses others when it starts.
"""

from __future__ import annotations

import json
import operator
import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, SupportsIndex, TypeAlias

from nanocore.protocol.errors import ConfigError, InvalidRequestError, quoted
from nanocore.protocol.fields import MAX_EXACT_INT
from nanocore.protocol.messages import MAX_TIMEOUT_S
from nanocore.protocol.sampling import SamplingParams


def check_request_id(request_id: object, max_chars: int) -> str:
    """Return the id; raises InvalidRequestError unless it is a str of 1 to max_chars characters."""
    if not isinstance(request_id, str):
        raise InvalidRequestError(f"a request_id is a str, not {type(request_id).__name__}")
    if not 0 < len(request_id) <= max_chars:
        raise InvalidRequestError(
            f"a request_id has 1 to {max_chars} characters; this one has {len(request_id)}"
        )
    if not request_id.isascii():
        try:
            request_id.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the request_id is no Unicode: {error}") from None
    return request_id


def check_sampling_params(params: object) -> None:
    """Raises InvalidRequestError unless they are SamplingParams."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(
            f"sampling_params are SamplingParams(...) or None, not {type(params).__name__}"
        )


def check_timeout(name: str, seconds: object) -> float:
    """Return the seconds; raises ConfigError unless they are a number above 0."""
    if isinstance(seconds, (int, float)) and seconds is not True and seconds > 0:  # nan is not
        return seconds
    raise ConfigError(f"{name}={seconds!r}: seconds above 0")


def check_request_timeout(seconds: object) -> None:
    """Raises InvalidRequestError unless it is None or a valid timeout of a request."""
    if seconds is None:
        return
    if isinstance(seconds, (int, float)) and seconds is not True and 0 < seconds <= MAX_TIMEOUT_S:
        return
    raise InvalidRequestError(f"timeout_s={seconds!r}: above 0, and at most {MAX_TIMEOUT_S:g}")


def check_after(number: object) -> int:
    """Return the number of a step, or 0; raises InvalidRequestError for anything else."""
    if type(number) is int and 0 <= number <= MAX_EXACT_INT:
        return number
    raise InvalidRequestError(f"after={quoted(number)}: the number of a step, 0 to 2**53 - 1")


def check_endpoints(endpoints: object) -> list[str]:
    """Return one or several endpoints as a list without duplicates; raises ConfigError."""
    if not (given := endpoints if isinstance(endpoints, (list, tuple)) else [endpoints]):
        raise ConfigError("endpoint=[]: name one or more, as in ipc:///path/engine.sock")
    for one in given:
        if not isinstance(one, str) or "\0" in one:  # where ZeroMQ stops
            raise ConfigError(f"endpoint={one!r}: a str, as in ipc:///path/engine.sock")
    return list(dict.fromkeys(given))


def check_count(name: str, number: object) -> int:
    """Return the number; raises ConfigError unless it is an int, 0 or more."""
    if isinstance(number, int) and not isinstance(number, bool) and number >= 0:
        return number
    raise ConfigError(f"{name}={number!r}: a whole number, 0 or more")


def folder_path(name: str, folder: object) -> Path:
    """Return the path of a folder; raises ConfigError unless it is a str or a path."""
    if isinstance(folder, (str, os.PathLike)) and isinstance(path := os.fspath(folder), str):
        return Path(path)
    raise ConfigError(f"{name}={folder!r}: a folder, as a str or a Path")


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
    """Return the flags for Python arguments of a launched engine; raises ConfigError."""
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


def _text(name: str, value: EngineArgument) -> str:
    try:
        if isinstance(value, (str, os.PathLike)):
            text = os.fspath(value)
        elif isinstance(value, float):
            text = repr(float(value))
        elif isinstance(value, dict):
            text = json.dumps(value, allow_nan=False)
        else:
            text = str(operator.index(value))  # type: ignore[arg-type]
        if isinstance(text, str) and b"\0" not in os.fsencode(text):
            return text
    except (TypeError, ValueError, RecursionError):
        pass
    raise ConfigError(
        f"{name}={reprlib.repr(value)}: an engine's argument is a str without zeros, a Path, a "
        "number, True, False, a dict that JSON can say, or None for its default"
    )
