"""The `nanocore` command: its subcommands, each of which is imported when it is asked for."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper
from typing import Final, NoReturn

from nanocore import __version__
from nanocore.system import standard_streams

_SUBCOMMANDS: Final = {
    "serve": ("nanocore.cli.serve", "serve a model over HTTP"),
    "chat": ("nanocore.cli.chat.command", "chat with a model in the terminal"),
    "top": ("nanocore.cli.top.command", "watch what an engine does"),
    "metrics": ("nanocore.cli.metrics", "print an engine's metrics, or serve them to Prometheus"),
    "bench": ("nanocore.cli.bench", "measure an engine or a server"),
    "batch": ("nanocore.cli.batch.command", "answer requests from a file"),
    "trace": ("nanocore.cli.trace", "summarize a step trace, or draw it for Perfetto"),
    "explain": ("nanocore.cli.explain", "why a request of a step trace took its time"),
}
"""name: (the module whose `run(arguments)` it is, what it does)."""

_SILENT: Final = ("serve", "batch")
"""What these are for is not on standard output, which may be closed."""

_USAGE: Final = """\
usage: nanocore COMMAND [arguments]

commands:
{commands}

`nanocore COMMAND --help` says more, `nanocore --version` which version this is. The engine alone is
`nanocore-engine`.
"""


def _help() -> str:
    lines = [f"  {name:<8} {text}" for name, (_, text) in _SUBCOMMANDS.items()]
    return _USAGE.format(commands="\n".join(lines))


def _run(arguments: list[str]) -> int:
    name = arguments[0] if arguments else ""
    if name in ("--help", "-h", "help"):
        print(_help(), end="")
        return 0
    if name in ("--version", "-V"):
        print(f"nanocore {__version__}")
        return 0
    if name not in _SUBCOMMANDS:
        near = get_close_matches(name, _SUBCOMMANDS, n=1)
        problem = f"there is no command {name!r}" if name else "which command?"
        hint = f"; did you mean {near[0]}?" if near else " (nanocore --help lists them)"
        print(f"nanocore: {problem}{hint}", file=sys.stderr)
        return 2
    if sys.stdout is None and name not in _SILENT:
        standard_streams.open_missing()
        standard_streams.complain(f"nanocore {name}: standard output is closed: open it")
        return 2
    exit_code: int = import_module(_SUBCOMMANDS[name][0]).run(arguments[1:])
    return exit_code


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a subcommand; exits with its code."""
    if isinstance(sys.stdout, TextIOWrapper):  # of a terminal that knows ASCII alone
        sys.stdout.reconfigure(errors="replace")
    try:
        exit_code = _run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        exit_code = 130
    except BrokenPipeError:  # nobody reads what is printed: `| head`
        exit_code = standard_streams.BROKEN_PIPE
        standard_streams.flush_or_drop()
    except OSError as error:  # a full disk, say, behind what is printed
        standard_streams.complain(f"nanocore: {error.strerror or error}")
        exit_code = 1
        standard_streams.flush_or_drop()
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
