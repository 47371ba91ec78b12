"""EngineChoice: the engine of a command, launched from a model, or joined.

Flags that are not the command's own go to the launched engine. If the engine does not know one, a
hint names the command's flag that may have been meant.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec

from nanocore.protocol.errors import ConfigError
from nanocore.system.flags import FlagParser, at_least, seconds
from nanocore.system.running import Running, find_one

if TYPE_CHECKING:
    from nanocore.client import AsyncEngineClient
    from nanocore.client.connection.engine_supervisor import EngineSupervisor

LAUNCH_TIMEOUT_S: Final = 600.0
JOIN_TIMEOUT_S: Final = 10.0
MAX_RESTARTS: Final = 5
_ENGINE_FLAGS: Final = (
    "endpoint", "curve_dir", "tokenizer", "chat_template", "start_timeout", "max_restarts",
)  # fmt: skip
_NOT_OURS: Final = {
    "--listen": "the engine launched here is private to this command; to share one, start "
    "`nanocore-engine --listen ENDPOINT`, and join it with --endpoint ENDPOINT",
    "--check": "run `nanocore-engine --check`",
    "--parent-fd": "only launchers set it",
}


class EngineChoice(msgspec.Struct, frozen=True, kw_only=True):
    """flags, max_restarts: of a launched engine, see `EngineSupervisor`. hint: added to its refusal
    of flags, or ''. endpoints, curve_dir: of engines to join; without endpoints one is launched.
    tokenizer: a folder; None: the engine's. notices: what was done with other engines' flags.
    found: what is joined although no flag names it.
    """

    flags: tuple[str, ...]
    hint: str
    max_restarts: int
    endpoints: tuple[str, ...]
    curve_dir: str | None
    tokenizer: str | None
    start_timeout_s: float
    notices: tuple[str, ...] = ()
    found: Running | None = None

    @property
    def model(self) -> str | None:
        """Model of a launched engine as the user has named it; None: the demo model."""
        first = self.flags[0] if self.flags else ""
        return first.removeprefix("--model=") if first.startswith("--model=") else None


def engine_command_parser(
    prog: str, usage: str, description: str, epilog: str, main_flags: Sequence[str] = ()
) -> FlagParser:
    """Return the parser of a command that launches an engine.

    main_flags: its own and the engine's that --help shows, --help=all shows all; none: all its own.
    """
    parser = FlagParser(
        prog,
        f"{description} An engine that is launched ends with the command; flags that are not "
        "listed here are passed to it, see `nanocore-engine --help`.",
        usage=f"{prog} {usage} [flags] [flags of nanocore-engine]",
        epilog=epilog,
        has_engine=True,
        add_help=not main_flags,
    )
    if main_flags:
        parser.add_argument(
            "-h", "--help", nargs="?", const="", metavar="all", action=_Help, main_flags=main_flags,
            help="show the main flags, or all of them, and exit",
        )  # fmt: skip
    return parser


class _Help(argparse.Action):
    """Prints the main flags of a command and its engine, or with the value `all` every one."""

    def __init__(self, *args: Any, main_flags: Sequence[str], **others: Any) -> None:
        super().__init__(*args, **others)
        self._main_flags = main_flags

    def __call__(
        self, parser: argparse.ArgumentParser, _: object, value: object, *__: object
    ) -> NoReturn:
        from nanocore.engine_core.cli import build_parser

        engine = build_parser()
        if value == "all":
            print(f"{parser.format_help()}\nflags of the engine:\n")
            print(engine.format_help().partition("\n\n")[2], end="")
            parser.exit()
        if value:
            parser.error(f"--help={value}: nothing or all")
        about = (parser.description or "").partition(" An engine is launched")[0]
        more = f"`{parser.prog} --help=all` shows all flags, those of the engine too."
        shown = argparse.ArgumentParser(
            parser.prog, parser.usage, about, epilog=more, add_help=False
        )
        for flag in self._main_flags:
            found = parser._option_string_actions.get(flag) or engine._option_string_actions[flag]
            shown._add_action(found)
        shown.print_help()
        parser.exit()


def add_engine_flags(
    group: argparse._ArgumentGroup,
    bare_endpoint: str | None = None,
    after_restarts: str = "0: exit when the engine dies",
) -> None:
    """Add the flags of every command that has an engine.

    bare_endpoint: meaning of --endpoint without a value; None: it needs one.
    """
    add = group.add_argument
    add("--model", "-m", "-hf", "--hf-repo", help="the same as MODEL")
    add("--endpoint", action="append", default=[],
        nargs=None if bare_endpoint is None else "?", const=bare_endpoint,
        help="join the engine at this endpoint (ipc:// or tcp://) instead of launching one; repeat "
        "it for several engines with the same model, of which one is used while it serves"
        + ("" if bare_endpoint is None else "; without a value: this user's default"))  # fmt: skip
    add("--curve-dir", metavar="DIR", help="with --endpoint tcp://: keys of nanocore-keygen")
    add("--tokenizer", metavar="DIR", help="folder of the tokenizer (default: the engine's)")
    add("--start-timeout", type=seconds, metavar="S",
        help=f"seconds for the engine to load (default: {LAUNCH_TIMEOUT_S:g}, and "
        f"{JOIN_TIMEOUT_S:g} to connect with --endpoint)")  # fmt: skip
    add("--max-restarts", type=at_least(0), metavar="N",
        help=f"consecutive engine restarts before giving up; {after_restarts} "
        f"(default: {MAX_RESTARTS})")  # fmt: skip


def parse_with_model(
    parser: FlagParser, arguments: list[str]
) -> tuple[argparse.Namespace, str | None, list[str]]:
    """Return (known flags, the model, the engine's flags) of `[MODEL] [flags]`.

    Raises:
        ConfigError: an invalid flag or value, or two models.
        SystemExit: --help or --version.
    """
    named = arguments[0] if arguments and not arguments[0].startswith("-") else None
    given, others = parser.split(arguments[named is not None :])
    if named is not None and given.model not in (None, named):
        raise ConfigError(f"two models, {named} and --model {given.model}: name one")
    return given, given.model if named is None else named, others


def check_url_alone(
    parser: FlagParser,
    given: argparse.Namespace,
    model: str | None,
    others: list[str],
    hint: str = "",
) -> None:
    """Raise ConfigError if flags of an engine, or unknown ones, stand beside --url."""
    names = [name for name in _ENGINE_FLAGS if getattr(given, name) not in (None, [])]
    flags = [f"--{name.replace('_', '-')}" for name in names]
    if others and parser.near_match(others[0]):
        raise ConfigError(parser.unknown(others[:1]))
    for wrong in (*(() if model is None else (model,)), *flags, *others):
        raise ConfigError(
            f"--url connects to a running server with its own models: leave {wrong} out{hint}"
        )


def find_engine(
    given: argparse.Namespace, model: str | None, others: list[str], by_name: bool = False
) -> Running | None:
    """Return the running engine to join if the flags name neither a model nor an engine.

    by_name: a model's id may be named, too; an engine that serves it is joined.

    Raises:
        ConfigError: several run.
    """
    flags = given.endpoint, given.curve_dir, given.max_restarts, *others
    if any(flag not in (None, []) for flag in flags):
        return None
    if model is None:
        return find_one()
    if by_name and not os.path.exists(model):  # a path may be another file than the engine's
        return find_one(model)
    return None


def choose_engine(
    parser: FlagParser,
    given: argparse.Namespace,
    model: str | None,
    others: list[str],
    model_is_first: bool = True,
    found: Running | None = None,
) -> EngineChoice:
    """others: flags that are not the command's. model_is_first: MODEL precedes the flags. found: by
    `find_engine`.

    Raises:
        ConfigError: the flags contradict each other.
    """
    joined = bool(given.endpoint)
    hint = _check_others(parser, others, joined, model_is_first and model is None)
    if joined and model is not None:
        raise ConfigError(
            f"--endpoint {given.endpoint[0]} joins a running engine, which has its model: leave "
            f"{model} out"
        )
    if joined and given.max_restarts is not None:
        raise ConfigError("--max-restarts is for a launched engine, not for --endpoint")
    if not joined and given.curve_dir is not None:
        raise ConfigError(f"--curve-dir {given.curve_dir}: keys are for --endpoint tcp://HOST:PORT")
    endpoints = given.endpoint if found is None else found.endpoints
    return EngineChoice(
        flags=(*(() if model is None else (f"--model={model}",)), *others),
        hint=hint,
        max_restarts=MAX_RESTARTS if given.max_restarts is None else given.max_restarts,
        endpoints=tuple(endpoints),
        curve_dir=given.curve_dir if found is None else found.curve_dir,
        tokenizer=given.tokenizer or (None if found is None else found.tokenizer),
        notices=parser.notices,
        start_timeout_s=given.start_timeout or (JOIN_TIMEOUT_S if endpoints else LAUNCH_TIMEOUT_S),
        found=found,
    )


def _check_others(parser: FlagParser, others: list[str], joined: bool, lacks_model: bool) -> str:
    """Refuse what no engine can be launched with; return the hint for the rest, or ''."""
    for other in others:
        if reason := _NOT_OURS.get(other.partition("=")[0]):
            raise ConfigError(f"{other} is not a flag of {parser.prog}: {reason}")
    if lacks_model and others and not others[0].startswith("-") and not joined:
        raise ConfigError(f"{others[0]}: MODEL comes first: {parser.prog} {others[0]} [flags]")
    hint = parser.launch_hint(others, _engine_flags() if others else ())
    hints = [hint] if hint else []
    values = [not other.startswith("-") for other in others]
    if lacks_model and any(map(all, pairwise(values))):  # no flag takes two values
        hints.append(f"MODEL comes first: {parser.prog} MODEL [flags]")
    if others and joined:
        raise ConfigError(
            parser.unknown(others)
            + "".join(f"; {notice}" for notice in parser.notices)
            + " (with --endpoint the engine runs already, and takes no flags)"
        )
    return "; ".join(hints)


def _engine_flags() -> Collection[str]:
    from nanocore.engine_core.cli import build_parser

    return build_parser()._option_string_actions


def engine_client(
    choice: EngineChoice, new_supervisor: Callable[[], EngineSupervisor] | None = None
) -> AsyncEngineClient:
    """Return a client that is not connected yet. Requests survive the death of their engine.

    new_supervisor: makes the supervisor of a launched engine; None: one with the choice's flags.
    """
    from nanocore.client import AsyncEngineClient
    from nanocore.client.connection.engine_supervisor import EngineSupervisor

    if choice.endpoints:
        return AsyncEngineClient.connect(
            choice.endpoints,
            curve_dir=choice.curve_dir,
            tokenizer=choice.tokenizer,
            timeout_s=choice.start_timeout_s,
        )
    return AsyncEngineClient(
        endpoints=(),
        tokenizer=choice.tokenizer,
        timeout_s=choice.start_timeout_s,
        resume_timeout_s=choice.start_timeout_s,
        new_supervisor=new_supervisor
        or (lambda: EngineSupervisor(choice.flags, choice.max_restarts)),
    )
