"""`nanocore serve`: from the command line to a server, and from errors to exit codes.

What is wrong with flags, keys, addresses and files of TLS is said before an engine is launched.
Nothing heavy is imported before the flags are known to be right.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final

from nanocore.cli.serve_flags import parse
from nanocore.cli.serve_options import ServeOptions, raise_descriptor_limit
from nanocore.protocol.errors import (
    ConfigError,
    EngineStartError,
    NanocoreError,
    StartError,
)
from nanocore.system import standard_streams

logger = logging.getLogger(__name__)

_PACKAGES: Final = ("uvicorn", "httptools", "uvloop", "prometheus_client")
_ENGINE_PACKAGES: Final = (
    "torch", "numpy", "llguidance", "safetensors", "huggingface_hub", "xxhash",
)  # fmt: skip
_INTERRUPTED: Final = 130


def run(arguments: list[str]) -> int:
    """Serve until told to stop; returns the exit code."""
    standard_streams.open_missing()
    options = None
    try:
        options = parse(arguments, os.environ)
        return _serve(options)
    except KeyboardInterrupt:  # before there is anything to end in order
        return _INTERRUPTED
    except NanocoreError as error:
        text = re.sub(r"\b(start_)?timeout_s\b", "--start-timeout", str(error))
        exit_code = StartError.exit_code
        if isinstance(error, StartError):
            exit_code = error.exit_code
        elif isinstance(error, EngineStartError) and (error.exit_code or 0) > 0:
            exit_code = error.exit_code or exit_code
            if options is not None and options.hint and exit_code == ConfigError.exit_code:
                text += f"; {options.hint}"
        standard_streams.complain(f"nanocore serve: {text}")
        return exit_code
    except Exception:
        logger.exception("internal error")
        return StartError.exit_code
    finally:
        standard_streams.flush_or_drop()


def log_to_stderr(name: str) -> None:
    """Send this process's log to stderr, whatever becomes of that. name: the process's."""
    logging.basicConfig(
        level=logging.INFO,
        handlers=[standard_streams.LogHandler()],
        format=f"({name} pid={os.getpid()}) %(message)s",
    )


def _serve(options: ServeOptions) -> int:
    _require(_PACKAGES, "serving HTTP needs", "pip install '.[server]'")
    if not options.endpoints:
        _require(
            _ENGINE_PACKAGES,
            "an engine needs",
            "pip install '.[engine,server]', or join an engine with --endpoint",
        )
    log_to_stderr("serve")
    raise_descriptor_limit()
    from nanocore.cli.supervisor import Supervisor  # imports uvicorn

    sockets = _listen(options)
    try:
        return Supervisor(options, sockets).run()
    finally:
        _release(options, sockets)


def _require(packages: Sequence[str], need: str, remedy: str) -> None:
    """Raises ConfigError unless they are installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{need} {', '.join(missing)}: in the repository, {remedy}")


def _listen(options: ServeOptions) -> list[list[socket.socket]]:
    """The sockets of each process."""
    from nanocore.http.listening import listen, listen_unix, resolve

    has_keys = bool(options.app.api_keys)
    if options.uds is not None:
        return listen_unix(options.uds, has_keys, options.http_workers)
    addresses = resolve(options.host, has_keys)
    return listen(addresses, options.port, options.http_workers)


def _release(options: ServeOptions, sockets: list[list[socket.socket]]) -> None:
    for of_process in sockets:
        for sock in of_process:
            sock.close()
    if options.uds is not None and os.path.exists(options.uds):
        os.unlink(options.uds)
