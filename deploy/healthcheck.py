#!/usr/bin/env python3
"""Docker's HEALTHCHECK: 0 if the server of this container lives and was ready once.

Whoever watches containers (Swarm, autoheal) waits for one that is not yet healthy, and kills one
that is not any more. So `/readyz` is asked until it was 200 once, and `/livez` from then on: who
drains, or replaces an engine, is no one to kill. Where to ask stands in the command line of the
process that the entry point started; proxies of the environment are not asked. Where clients need
certificates, a handshake is all that can be had. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import socket
import ssl
import sys
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Final

TIMEOUT_S: Final = 4.0
"""Of each wait; HEALTHCHECK's own is longer."""
LOOPBACK: Final = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
"""Where one asks who listens at all addresses."""


def served(command: list[str]) -> list[str] | None:
    """The arguments behind `nanocore serve`; None for another command."""
    for at, word in enumerate(command, 1):
        if Path(word).name == "nanocore" and command[at : at + 1] == ["serve"]:
            return command[at + 1 :]
    return None


def read_flags(arguments: list[str]) -> argparse.Namespace:
    """Those that say where a server listens."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    for flag in ("--uds", "--ssl-certfile", "--ssl-ca-certs"):
        parser.add_argument(flag)
    return parser.parse_known_args(arguments)[0]


def connected(given: argparse.Namespace) -> socket.socket:
    """To the server; over TLS, whoever its certificate names: it is asked here and nowhere else."""
    if given.uds is not None:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(TIMEOUT_S)
        connection.connect(given.uds)
    else:
        host = LOOPBACK.get(given.host, given.host)
        connection = socket.create_connection((host, given.port), TIMEOUT_S)
    if given.ssl_certfile is None:
        return connection
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3  # a client without certificate gets through
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(connection)


def problem(given: argparse.Namespace, path: str) -> str:
    """What speaks against it; nothing if all is well."""
    try:
        with connected(given) as connection:
            if given.ssl_ca_certs is not None:
                return ""
            http = HTTPConnection("localhost")
            http.sock = connection
            http.request("GET", path)
            with http.getresponse() as response:
                return "" if response.status == 200 else f"{path}: {response.status}"
    except (OSError, HTTPException) as error:
        return f"{path}: {error!r}"


def main() -> int:
    """See the module."""
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"nanocore-{os.getuid()}"
    try:
        command = Path("/proc", (folder / "pid").read_text().strip(), "cmdline").read_text()
    except OSError as error:
        print(f"the server is not there: {error}", file=sys.stderr)
        return 1
    arguments = served(command.split("\0"))
    if arguments is None:
        return 0  # a client, say, at which nobody can ask
    was_ready = folder / "was-ready"
    found = problem(read_flags(arguments), "/livez" if was_ready.exists() else "/readyz")
    if found:
        print(found, file=sys.stderr)
        return 1
    was_ready.touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
