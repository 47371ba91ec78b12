"""`nanocore serve`: from the command line to a server, and from errors to exit codes.

What is wrong with flags, keys, addresses and files of TLS is said before an engine is launched.
Nothing heavy is imported before the flags are known to be right.
"""

from __future__ import annotations

import os
import socket
from functools import partial
from typing import Final

from nanocore.cli.command import require, require_engine, run_command
from nanocore.cli.serve_flags import parse
from nanocore.cli.serve_options import ServeOptions, raise_descriptor_limit
from nanocore.system.logs import start_log

_PACKAGES: Final = ("uvicorn", "httptools", "uvloop", "prometheus_client")

_OTEL_PACKAGES: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def run(arguments: list[str]) -> int:
    """Serve until told to stop; returns the exit code."""
    return run_command("nanocore serve", partial(parse, arguments, os.environ), _serve)


def _serve(options: ServeOptions) -> int:
    extras = "server" if options.engine.endpoints else "engine,server"
    require(_PACKAGES, "serving HTTP needs", f"pip install '.[{extras}]'")
    require_engine(options.engine)
    if options.app.otlp_traces_endpoint is not None:
        require(_OTEL_PACKAGES, "--otlp-traces-endpoint needs", "pip install '.[otel]'")
    start_log("serve", options.log_format)
    raise_descriptor_limit()
    from nanocore.cli.supervisor import Supervisor  # imports uvicorn

    sockets = _listen(options)
    try:
        return Supervisor(options, sockets).run()
    finally:
        _release(options, sockets)


def _listen(options: ServeOptions) -> list[list[socket.socket]]:
    """The sockets of each process."""
    from nanocore.http.server.listening import listen, listen_unix, resolve

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
