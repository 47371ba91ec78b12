"""Which engine a command works with: one that it launches from a model, or one that runs.

Flags that are not the command's own go to the engine that it launches. Which flags an engine has
only the engine knows: it refuses what is none when it starts, in its own words; what was near to
one of the command's is said beside.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from typing import Final, NoReturn

import msgspec

from nanocore.cli.flag_types import at_least, seconds
from nanocore.protocol.errors import ConfigError
from nanocore.system.near_flags import near_flag

LAUNCH_TIMEOUT_S: Final = 600.0
JOIN_TIMEOUT_S: Final = 10.0
MAX_RESTARTS: Final = 5
_NOT_OURS: Final = {
    "--listen": "an engine that is launched here listens where only this command looks; for one "
    "that others join, start `nanocore-engine --listen ENDPOINT`, and join it with "
    "--endpoint ENDPOINT",
    "--check": "run `nanocore-engine --check`",
    "--parent-fd": "it is the launcher's own",
}


class CommandParser(argparse.ArgumentParser):
    """Of one command: what is wrong is raised as ConfigError."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        message = message.replace("ignored explicit argument", "takes no value, and was given")
        raise ConfigError(f"{message} ({self.prog} --help lists the flags)")


class EngineChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which one.

    flags, max_restarts: of a launched engine, see `EngineSupervisor`. hint: what to add if it
    refuses them, or ''. endpoints, curve_dir: of the engines to join; no endpoint: one is launched.
    tokenizer: a folder; None: the engine's.
    """

    flags: tuple[str, ...]
    hint: str
    max_restarts: int
    endpoints: tuple[str, ...]
    curve_dir: str | None
    tokenizer: str | None
    start_timeout_s: float


def add_engine_flags(group: argparse._ArgumentGroup, bare_endpoint: str | None = None) -> None:
    """Those of every command that has an engine.

    bare_endpoint: what --endpoint means without a value; None: it needs one.
    """
    add = group.add_argument
    add("--model", help="the same as MODEL")
    add("--endpoint", action="append", default=[],
        nargs=None if bare_endpoint is None else "?", const=bare_endpoint,
        help="join the engine that runs there (ipc:// or tcp://), and launch none; repeat it for "
        "engines of the same model, of which one is used as long as it serves"
        + ("" if bare_endpoint is None else "; without a value it is this user's own"))  # fmt: skip
    add("--curve-dir", metavar="DIR", help="with --endpoint tcp://: keys of nanocore-keygen")
    add("--tokenizer", metavar="DIR", help="folder of the tokenizer (default: the engine's)")
    add(
        "--start-timeout",
        type=seconds,
        metavar="S",
        help=f"seconds that the engine may take to load (default: {LAUNCH_TIMEOUT_S:g}, and "
        f"{JOIN_TIMEOUT_S:g} to answer with --endpoint)",
    )
    add("--max-restarts", type=at_least(0), metavar="N",
        help="of an engine that dies, in a row; then, and with 0, the command ends with it "
        f"(default: {MAX_RESTARTS})")  # fmt: skip


def choose_engine(
    parser: CommandParser,
    given: argparse.Namespace,
    model: str | None,
    others: list[str],
    model_is_first: bool = True,
) -> EngineChoice:
    """others: what is none of the command's flags. model_is_first: a MODEL stands before the flags.

    Raises:
        ConfigError: that cannot be.
    """
    joined = bool(given.endpoint)
    hint = _check_others(parser, others, joined, model_is_first and model is None)
    if joined and model is not None:
        raise ConfigError(
            f"--endpoint {given.endpoint[0]} joins an engine that runs, with the model that it "
            f"has: leave {model} out"
        )
    if joined and given.max_restarts is not None:
        raise ConfigError("--max-restarts is for an engine that is launched, not with --endpoint")
    if not joined and given.curve_dir is not None:
        raise ConfigError(f"--curve-dir {given.curve_dir}: keys are for --endpoint tcp://HOST:PORT")
    return EngineChoice(
        flags=(*(() if model is None else (f"--model={model}",)), *others),
        hint=hint,
        max_restarts=MAX_RESTARTS if given.max_restarts is None else given.max_restarts,
        endpoints=tuple(given.endpoint),
        curve_dir=given.curve_dir,
        tokenizer=given.tokenizer,
        start_timeout_s=given.start_timeout or (JOIN_TIMEOUT_S if joined else LAUNCH_TIMEOUT_S),
    )


def _check_others(parser: CommandParser, others: list[str], joined: bool, lacks_model: bool) -> str:
    """Refuse what no engine is launched with; what may have been meant with the rest, or ''."""
    for other in others:
        if reason := _NOT_OURS.get(other.partition("=")[0]):
            raise ConfigError(f"{other} is no flag of {parser.prog}: {reason}")
    if lacks_model and others and not others[0].startswith("-") and not joined:
        raise ConfigError(f"{others[0]}: MODEL comes first: {parser.prog} {others[0]} [flags]")
    hints = [
        f"`{parser.prog}` has {near}, and {other} went to the engine"
        for other in others
        if (near := near_match(parser, other))
    ]
    values = [not other.startswith("-") for other in others]
    if lacks_model and any(map(all, pairwise(values))):  # no flag takes two
        hints.append(f"MODEL comes first: {parser.prog} MODEL [flags]")
    if others and joined:
        near = near_match(parser, others[0])
        raise ConfigError(
            f"unknown: {' '.join(others)}"
            + (f"; did you mean {near}?" if near else "")
            + " (with --endpoint the engine runs already, and takes no flags)"
        )
    return "; ".join(hints)


def near_match(parser: CommandParser, argument: str) -> str | None:
    """The parser's flag that an argument may mean, if any."""
    known = [flag for action in parser._actions for flag in action.option_strings]
    return near_flag(argument, known, 0.8)
