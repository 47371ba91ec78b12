"""The flags of `nanocore serve`, spelled as in `vllm serve`; all others are the engine's."""

from __future__ import annotations

import argparse
import re
import resource
import ssl
from collections.abc import Callable, MutableMapping, Sequence
from typing import Final, TypeAlias, get_args

import msgspec

from nanocore.cli.engine_choice import (
    EngineChoice,
    add_engine_flags,
    choose_engine,
    engine_command_parser,
    parse_with_model,
)
from nanocore.cli.response_flags import add_response_flags, check_tokenizer, response_settings
from nanocore.cli.serve.api_keys import api_keys
from nanocore.http.host_check import is_address
from nanocore.http.server_settings import (
    KEEP_ALIVE_S,
    MAX_BODY_BYTES,
    STORED_RESPONSES_BYTES,
    AppSettings,
    ConnectionLimits,
    ServerSettings,
)
from nanocore.protocol.errors import ConfigError
from nanocore.system.flags import (
    DEFAULT_NAMESPACE,
    FlagParser,
    at_least,
    metrics_namespace,
    otlp_url,
    port,
    seconds,
    seconds_or_none,
    values_of,
)
from nanocore.system.logs import LogFormat

MAX_HTTP_WORKERS: Final = 256
DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8000
DEFAULT_LOG_FORMAT: Final = "text"
SHUTDOWN_TIMEOUT_S: Final = 25.0
"""Kubernetes gives a process 30 seconds; the engine ends in the remaining five."""
RESERVED_DESCRIPTORS: Final = 128
"""Descriptors of a process that are not clients' connections."""
_EXIT_CODES: Final = """\
exit codes: 0 ended by SIGTERM, 2 usage or configuration, 3 model files, 4 memory, 5 address in use,
70 internal error or engine failure, 130 interrupted"""
_MAIN_FLAGS: Final = (
    "--host", "--port", "--api-key", "--served-model-name", "--max-model-len", "--max-num-seqs",
    "--quantization", "--kv-cache-memory-bytes", "--gpu-memory-utilization",
    "--tensor-parallel-size",
)  # fmt: skip
_HOST: Final = re.compile(r"[^][:@/*\s]+")
_ORIGIN: Final = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[^][:@/*\s]+)(:[0-9]+)?/?")
_Kind: TypeAlias = Callable[[str], float]
_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """uds: replaces host and port. standby: of a launched engine, see `EngineSupervisor`."""

    app: AppSettings
    server: ServerSettings
    host: str
    port: int
    uds: str | None
    engine: EngineChoice
    standby: bool
    http_workers: int
    log_format: LogFormat
    shutdown_timeout_s: float


def parse(arguments: list[str], environment: MutableMapping[str, str]) -> ServeOptions:
    """Read the command line and the environment.

    Raises:
        ConfigError: an invalid flag or value.
        SystemExit: --help or --version.
    """
    parser = build_parser()
    given, model, others = parse_with_model(parser, arguments)
    if given.endpoint and given.standby is not None:
        raise ConfigError("--standby is for a launched engine, not for --endpoint")
    if given.log_format != DEFAULT_LOG_FORMAT and not given.endpoint:
        others.append(f"--log-format={given.log_format}")
    engine = choose_engine(parser, given, model, others)
    for name in ("keyfile", "keyfile_password", "ca_certs", "cert_reqs"):
        if getattr(given, f"ssl_{name}") is not None and given.ssl_certfile is None:
            raise ConfigError(f"--ssl-{name.replace('_', '-')} needs --ssl-certfile, too")
    if given.uds is not None and (given.host, given.port) != (None, None):
        raise ConfigError(f"--uds {given.uds} replaces --host and --port: leave them out")
    if given.ssl_cert_reqs not in (None, ssl.CERT_NONE) and given.ssl_ca_certs is None:
        raise ConfigError("--ssl-cert-reqs needs --ssl-ca-certs to verify client certificates")
    if given.uds == "":
        raise ConfigError("--uds: a path is needed")
    check_tokenizer(given.tokenizer)
    keys = api_keys(given.api_key, given.api_key_file, environment)
    values = values_of(ServeOptions, given) | {
        "host": DEFAULT_HOST if given.host is None else given.host,
        "port": DEFAULT_PORT if given.port is None else given.port,
        "standby": bool(given.standby),
    }
    app, server = _app_settings(given, keys), _server_settings(given)
    return ServeOptions(app=app, server=server, engine=engine, **values)


def _app_settings(given: argparse.Namespace, keys: list[str]) -> AppSettings:
    stored_bytes = given.stored_responses_bytes
    if given.http_workers > 1:
        if stored_bytes:
            raise ConfigError(
                f"--stored-responses-bytes {stored_bytes}: with --http-workers "
                f"{given.http_workers}, processes do not share stored responses; leave one of "
                "them out"
            )
        stored_bytes = 0
    values = values_of(AppSettings, given) | {
        **response_settings(given),
        "api_keys": tuple(keys),
        "stored_responses_bytes": STORED_RESPONSES_BYTES if stored_bytes is None else stored_bytes,
        "allowed_origins": tuple(map(read_origin, given.allowed_origins)),
        "allowed_hosts": read_hosts(given.host, given.allowed_hosts) if given.uds is None else None,
    }
    return AppSettings(**values)


def _server_settings(given: argparse.Namespace) -> ServerSettings:
    if given.ssl_cert_reqs is None:
        given.ssl_cert_reqs = ssl.CERT_NONE if given.ssl_ca_certs is None else ssl.CERT_REQUIRED
    given.max_connections = connection_limit(given.max_connections)
    limits = ConnectionLimits(**values_of(ConnectionLimits, given))
    return ServerSettings(limits=limits, **values_of(ServerSettings, given))


def connection_limit(asked: int | None) -> int:
    """Return the connections that a process may have, at most what descriptors allow."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2**20 if hard == resource.RLIM_INFINITY else max(1, hard - RESERVED_DESCRIPTORS)
    return most if asked is None else min(asked, most)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of descriptors to the hard one, for child processes, too."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def read_hosts(host: str | None, allowed: Sequence[str]) -> tuple[str, ...]:
    """Return accepted Host names in lower case. host: the value of --host.

    Raises:
        ConfigError: a name that no Host header can have.
    """
    for name in allowed:
        if name != "*" and not _HOST.fullmatch(name) and not is_address(name.strip("[]")):
            raise ConfigError(
                f"--allowed-hosts {name!r}: a name or an address, without scheme and port; or *"
            )
    named = [] if host is None else [host]
    return tuple(name.lower().strip("[]") for name in (*named, *allowed))


def read_origin(given: str) -> str:
    """Return an origin as browsers send it: in lower case, without its scheme's default port.

    Raises:
        ConfigError: it is not an origin.
    """
    if given == "*":
        return given
    parts = _ORIGIN.fullmatch(given.lower())
    if parts is None:
        raise ConfigError(
            f"--allowed-origins {given}: an origin is https://NAME or https://NAME:PORT, or *"
        )
    scheme, name, port = parts.groups()
    return f"{scheme}://{name}{'' if port in (None, _DEFAULT_PORTS.get(scheme)) else port}"


def build_parser() -> FlagParser:
    parser = engine_command_parser(
        "nanocore serve",
        "[MODEL]",
        "Serve a model over HTTP, in the dialects of OpenAI's and Anthropic's APIs. MODEL, a "
        "folder, a GGUF file or an id on the hub, comes first; the default is the demo model.",
        _EXIT_CODES,
        _MAIN_FLAGS,
    )
    _add_engine(parser.add_argument_group("engine"))
    _add_address(parser.add_argument_group("address"))
    _add_authentication(parser.add_argument_group("authentication and TLS"))
    _add_limits(parser.add_argument_group("limits"))
    _add_responses(parser.add_argument_group("responses"))
    _add_observability(parser.add_argument_group("observability"))
    return parser


def _add_engine(group: argparse._ArgumentGroup) -> None:
    add_engine_flags(group)
    add = group.add_argument
    add("--standby", action=argparse.BooleanOptionalAction,
        help="keep a second engine loaded that takes over at once (default: no)")  # fmt: skip
    add("--http-workers", type=at_least(1, MAX_HTTP_WORKERS), default=1, metavar="N",
        help=f"HTTP processes that share the port, at most {MAX_HTTP_WORKERS} "
        "(default: 1)")  # fmt: skip


def _add_address(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", help="address or name to listen on; any but loopback needs an API key "
        "(default: 127.0.0.1)")  # fmt: skip
    add("--port", type=port, help="port to listen on; 0: any free port (default: 8000)")
    add("--uds", metavar="PATH", help="listen on a Unix socket instead of a port")


def _add_authentication(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--api-key", nargs="+", action="extend", default=[], metavar="KEY",
        help="API keys of clients; visible to other users in the process list: prefer "
        "--api-key-file, or NANOCORE_API_KEY in the environment")  # fmt: skip
    add("--api-key-file", metavar="FILE", help="one key per line, in a file that only you can read")
    add("--ssl-certfile", metavar="FILE", help="serve TLS with this certificate (PEM)")
    add("--ssl-keyfile", metavar="FILE", help="private key, if it is in a separate file")
    add("--ssl-keyfile-password", metavar="TEXT", help="passphrase of the key file")
    add("--ssl-ca-certs", metavar="FILE", help="authorities of client certificates")
    add("--ssl-cert-reqs", type=int, choices=(0, 1, 2), help="client certificates: 0 none, "
        "1 optional, 2 required (default: 2 with --ssl-ca-certs, else 0)")  # fmt: skip


def _add_limits(group: argparse._ArgumentGroup) -> None:
    def add(
        flag: str, kind: _Kind, default: float | None, help: str, shown: str = "", dest: str = ""
    ) -> None:
        shown = shown or (str(default) if isinstance(default, int) else f"{default:g}")
        is_time = kind in (seconds, seconds_or_none)
        dest = dest or flag[2:].replace("-", "_") + "_s" * is_time
        group.add_argument(flag, type=kind, default=default, metavar="S" if is_time else "N",
            help=f"{help} (default: {shown})", dest=dest)  # fmt: skip

    add("--max-body-bytes", at_least(1), MAX_BODY_BYTES, "bytes of a request's body")
    add("--max-header-bytes", at_least(256), 64 * 1024,
        "bytes of request line, headers and trailers")  # fmt: skip
    add("--header-timeout", seconds, 10.0, "seconds to receive a request's headers")
    add("--body-timeout", seconds, 60.0, "seconds to receive a request's body")
    add("--send-timeout", seconds, 600.0, "seconds that a client may read nothing of its response")
    add("--timeout-keep-alive", seconds, 75.0, "seconds a connection may be idle between requests",
        dest="keep_alive_timeout_s")  # fmt: skip
    add("--limit-concurrency", at_least(1), None, "connections per process; others get a 503",
        "what descriptors allow", "max_connections")  # fmt: skip
    add("--shutdown-timeout", seconds_or_none, SHUTDOWN_TIMEOUT_S,
        "seconds for running responses to finish after SIGTERM or Ctrl-C")  # fmt: skip
    add("--stored-responses-bytes", at_least(0), None, "memory for stored /v1/responses",
        f"{STORED_RESPONSES_BYTES}, and 0 with several --http-workers")  # fmt: skip


def _add_responses(group: argparse._ArgumentGroup) -> None:
    add_response_flags(group)
    add = group.add_argument
    add("--comment-interval", dest="keep_alive_s", type=seconds, default=KEEP_ALIVE_S, metavar="S",
        help=f"seconds of silence before an SSE keep-alive comment (default: {KEEP_ALIVE_S:g})",
    )  # fmt: skip
    add("--allowed-origins", nargs="+", action="extend", default=[], metavar="ORIGIN",
        help="origins of web pages that may call the API (CORS)")  # fmt: skip
    add("--allowed-hosts", nargs="+", action="extend", default=[], metavar="NAME",
        help="Host headers accepted when no API key is set, in addition to localhost; "
        "* is any")  # fmt: skip


def _add_observability(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--enable-access-log", dest="access_log", action="store_true", default=False,
        help="log a line per request")  # fmt: skip
    add("--disable-access-log", dest="access_log", action="store_false",
        help="log no line per request (the default)")  # fmt: skip
    add("--log-format", choices=get_args(LogFormat), default=DEFAULT_LOG_FORMAT,
        help="json: one object per log line, also in the engine's log (default: text)")  # fmt: skip
    add("--metrics-namespace", type=metrics_namespace, default=DEFAULT_NAMESPACE, metavar="NAME",
        help="prefix of metric names; vllm: vLLM's names (default: %(default)s)")  # fmt: skip
    add("--otlp-traces-endpoint", type=otlp_url, metavar="URL",
        help="send a span per request to this OTLP/HTTP collector (default: none)")  # fmt: skip
