"""`nanocore serve`: checks flags, keys, addresses and TLS files before it launches an engine."""

from __future__ import annotations

import logging
import os
import socket
from typing import Final

from nanocore.cli.command import require, require_engine
from nanocore.cli.serve.flags import ServeOptions, parse, raise_descriptor_limit
from nanocore.system.logs import start_log

logger = logging.getLogger(__name__)

_PACKAGES: Final = ("uvicorn", "httptools", "uvloop", "prometheus_client")
_OTEL_PACKAGES: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def run(arguments: list[str]) -> int:
    options = parse(arguments, os.environ)
    extras = "server" if options.engine.endpoints else "engine,server"
    require(_PACKAGES, "serving HTTP needs", f"pip install '.[{extras}]'")
    require_engine(options.engine)
    if options.app.otlp_traces_endpoint is not None:
        require(_OTEL_PACKAGES, "--otlp-traces-endpoint needs", "pip install '.[otel]'")
    start_log("serve", options.log_format)
    for notice in options.engine.notices:
        logger.info("%s", notice)
    raise_descriptor_limit()
    from nanocore.cli.serve.supervisor import Supervisor  # imports asyncio

    sockets = _listen(options)
    try:
        return Supervisor(options, sockets).run()
    finally:
        for sock in (sock for of_process in sockets for sock in of_process):
            sock.close()
        if options.uds is not None and os.path.exists(options.uds):
            os.unlink(options.uds)


def _listen(options: ServeOptions) -> list[list[socket.socket]]:
    """Return the listening sockets of each process."""
    from nanocore.http.server.listening import listen, listen_unix, resolve

    has_keys = bool(options.app.api_keys)
    if options.uds is not None:
        return listen_unix(options.uds, has_keys, options.http_workers)
    addresses = resolve(options.host, has_keys)
    return listen(addresses, options.port, options.http_workers)
