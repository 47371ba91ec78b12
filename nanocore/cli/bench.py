"""`nanocore bench`: from the command line to a benchmark, and from errors to exit codes."""

from __future__ import annotations

import logging
from difflib import get_close_matches
from importlib import import_module
from typing import Final

from nanocore.bench.packages import require
from nanocore.protocol.errors import ConfigError, EngineStartError, NanocoreError, StartError
from nanocore.system import standard_streams

logger = logging.getLogger(__name__)

_BENCHMARKS: Final = {
    "serve": ("nanocore.bench.serve", "an engine or a server that runs: TTFT, TPOT, ITL, goodput"),
    "throughput": ("nanocore.bench.throughput", "an engine of its own: many requests at once"),
    "latency": ("nanocore.bench.latency", "an engine of its own: one batch"),
    "startup": ("nanocore.bench.startup", "how long an engine takes to start"),
}
"""name: (the module whose `run(arguments)` it is, what it measures)."""
_INTERRUPTED: Final = 130
_USAGE: Final = """\
usage: nanocore bench BENCHMARK [flags]

benchmarks:
{benchmarks}

Flags and JSON keys are those of `vllm bench`; `nanocore bench BENCHMARK --help` lists them.
exit codes: 0 measured, 1 no request succeeded, 2 usage or configuration, 3 model files, 4 memory,
70 internal error or the engine's end, 130 interrupted
"""


def run(arguments: list[str]) -> int:
    """Run a benchmark; returns the exit code."""
    standard_streams.open_missing()
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        standard_streams.complain("nanocore bench: interrupted")
        return _INTERRUPTED
    except NanocoreError as error:
        standard_streams.complain(f"nanocore bench: {error}")
        return _exit_code(error)
    except BrokenPipeError:
        raise  # nobody reads what it prints
    except Exception:
        logger.exception("internal error")
        return StartError.exit_code
    finally:
        standard_streams.flush_or_drop()


def _run(arguments: list[str]) -> int:
    name = arguments[0] if arguments else ""
    if name in ("--help", "-h", "help"):
        lines = [f"  {name:<11} {text}" for name, (_, text) in _BENCHMARKS.items()]
        print(_USAGE.format(benchmarks="\n".join(lines)), end="")
        return 0
    if name not in _BENCHMARKS:
        near = get_close_matches(name, _BENCHMARKS, n=1)
        problem = f"there is no benchmark {name!r}" if name else "which benchmark?"
        hint = f"; did you mean {near[0]}?" if near else f" There are {', '.join(_BENCHMARKS)}"
        raise ConfigError(problem + hint)
    require("numpy", "measuring")
    exit_code: int = import_module(_BENCHMARKS[name][0]).run(arguments[1:])
    return exit_code


def _exit_code(error: NanocoreError) -> int:
    if isinstance(error, StartError):
        return error.exit_code
    if isinstance(error, EngineStartError) and (error.exit_code or 0) > 0:
        return error.exit_code or StartError.exit_code
    return ConfigError.exit_code if isinstance(error, ValueError) else StartError.exit_code
