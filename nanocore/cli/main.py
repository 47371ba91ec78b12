"""The `nanocore` command. Subcommands are imported when they are called."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper
from typing import Final, NoReturn

from nanocore import __version__
from nanocore.system import standard_streams

Subcommands = Mapping[str, tuple[str, str]]
"""name: (module:function of a list of arguments, help)."""
_SUBCOMMANDS: Final[Subcommands] = {
    "serve": ("nanocore.cli.serve.command:run", "serve a model over HTTP"),
    "chat": ("nanocore.cli.chat.command:run", "chat with a model in the terminal"),
    "run": ("nanocore.cli.chat.command:run_model", "the same, or ask: run MODEL [QUESTION]"),
    "ps": ("nanocore.cli.inventory:run_ps", "list running engines and servers"),
    "list": ("nanocore.cli.inventory:run_list", "list models in the Hugging Face hub's cache"),
    "pull": ("nanocore.cli.inventory:run_pull", "download a model from the Hugging Face hub"),
    "cache": ("nanocore.cli.inventory:run_cache", "list or delete what starts have cached"),
    "top": ("nanocore.cli.top.command:run", "show the live load of an engine or a server"),
    "metrics": ("nanocore.cli.metrics:run", "print metrics, or serve them to Prometheus"),
    "bench": ("nanocore.cli.main:run_bench", "measure an engine or a server"),
    "batch": ("nanocore.cli.batch.command:run", "run requests from a file"),
    "trace": ("nanocore.cli.trace:run", "summarize a step trace"),
    "explain": ("nanocore.cli.trace:run_explain", "explain the latency of a traced request"),
}
_BENCHMARKS: Final[Subcommands] = {
    "serve": ("nanocore.bench.serve:run", "a running engine or server: TTFT, TPOT, ITL, goodput"),
    "throughput": ("nanocore.bench.offline:run_throughput", "its own engine: all requests at once"),
    "latency": ("nanocore.bench.offline:run_latency", "its own engine: one batch, repeatedly"),
}
_SILENT: Final = ("serve", "batch")
"""Commands that work with a closed standard output."""
_WITH_ENGINE: Final = ("serve", "chat", "run", "batch")
"""Commands that may launch an engine."""
_VERSION_FLAGS: Final = ("--version", "-V", "-v")
_USAGE: Final = """\
usage: nanocore COMMAND [arguments]

commands:
{commands}

See `nanocore COMMAND --help`, and `nanocore --version`. The engine alone is `nanocore-engine`.
"""
_BENCH_USAGE: Final = """\
usage: nanocore bench BENCHMARK [flags]

benchmarks:
{commands}

Flags and JSON keys are those of `vllm bench`; see `nanocore bench BENCHMARK --help`.
exit codes: 0 measured, 1 no request succeeded, 2 usage or configuration, 3 model files, 4 memory,
70 internal error or engine failure, 130 interrupted
"""


def _informs(name: str, usage: str, commands: Subcommands) -> bool:
    """Print the help or the version; return whether `name` asks for one of them."""
    if name in ("--help", "-h", "help"):
        width = max(map(len, commands))
        lines = [f"  {one:<{width}} {text}" for one, (_, text) in commands.items()]
        print(usage.format(commands="\n".join(lines)), end="")
    elif name in _VERSION_FLAGS:
        print(f"nanocore {__version__}")
    else:
        return False
    return True


def _call(target: str, arguments: list[str]) -> int:
    module, _, function = target.partition(":")
    exit_code: int = getattr(import_module(module), function)(arguments)
    return exit_code


def _run(arguments: list[str]) -> int:
    name = arguments[0] if arguments else ""
    if name == "help" and arguments[1:]:
        return _run([*arguments[1:], "--help"])
    if _informs(name, _USAGE, _SUBCOMMANDS):
        return 0
    if name not in _SUBCOMMANDS:
        near = get_close_matches(name, _SUBCOMMANDS, n=1)
        problem = f"unknown command {name!r}" if name else "which command?"
        hint = f"; did you mean {near[0]}?" if near else " (nanocore --help lists them)"
        print(f"nanocore: {problem}{hint}", file=sys.stderr)
        return 2
    if sys.stdout is None and name not in _SILENT:
        standard_streams.open_missing()
        standard_streams.complain(f"nanocore {name}: standard output is closed: open it")
        return 2
    from nanocore.cli.command import run_command

    benchmark = [one for one in arguments[1:2] if name == "bench" and one in _BENCHMARKS]
    return run_command(
        " ".join(["nanocore", name, *benchmark]),
        lambda: _call(_SUBCOMMANDS[name][0], arguments[1:]),
        "--start-timeout" if name in _WITH_ENGINE else "--timeout",
    )


def run_bench(arguments: list[str]) -> int:
    """Run a benchmark; return the exit code. Raises ConfigError if there is no such benchmark."""
    from nanocore.cli.command import require
    from nanocore.protocol.errors import ConfigError

    name = arguments[0] if arguments else ""
    if _informs(name, _BENCH_USAGE, _BENCHMARKS):
        return 0
    if name not in _BENCHMARKS:
        near = get_close_matches(name, _BENCHMARKS, n=1)
        problem = f"unknown benchmark {name!r};" if name else "which benchmark?"
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_BENCHMARKS)}"
        if name.startswith("-"):
            hint += "; it comes first: nanocore bench latency --model MODEL"
        raise ConfigError(f"{problem} {hint}")
    require(("numpy",), "measuring needs", "pip install '.[bench]'")
    return _call(_BENCHMARKS[name][0], arguments[1:])


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a subcommand; exits with its code."""
    if isinstance(sys.stdout, TextIOWrapper):  # the terminal may know ASCII only
        sys.stdout.reconfigure(errors="replace")
    try:
        exit_code = _run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        exit_code = 130
    except BrokenPipeError:  # the reader has closed the pipe: `| head`
        exit_code = standard_streams.BROKEN_PIPE
        standard_streams.flush_or_drop()
    except OSError as error:  # e.g. a full disk behind standard output
        standard_streams.complain(f"nanocore: {error.strerror or error}")
        exit_code = 1
        standard_streams.flush_or_drop()
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
