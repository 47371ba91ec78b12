"""What a server is told at its start, beside its app: how it listens, and what clients may take."""

from __future__ import annotations

import ssl

import msgspec


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What clients may take.

    max_header_bytes: request line, headers and trailers of one message. header_timeout_s: from a
    connection's begin, or a request's first byte, until its headers are complete. body_timeout_s:
    until its body is. send_timeout_s: for a client that takes nothing of its answer.
    keep_alive_timeout_s: between requests. max_connections: at once; others get a 503.
    """

    max_header_bytes: int = 64 * 1024
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    send_timeout_s: float = 600.0
    keep_alive_timeout_s: float = 75.0
    max_connections: int = 65536


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Of one server, all its processes alike; it travels to them as JSON.

    ssl_keyfile, ssl_certfile, ssl_keyfile_password: TLS, if there is a certificate. ssl_ca_certs:
    whose certificates clients may bring. ssl_cert_reqs: whether they must, as `ssl.VerifyMode`.
    """

    limits: ConnectionLimits = ConnectionLimits()
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = ssl.CERT_NONE
    access_log: bool = False

    @property
    def scheme(self) -> str:
        """Of the server's URL."""
        return "http" if self.ssl_certfile is None else "https"
