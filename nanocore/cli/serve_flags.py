"""The flags of `nanocore serve`: those of HTTP are ours, all others are the engine's.

Spelled as `vllm serve` spells them, where it has them. `engine_choice` says what becomes of those
that are the engine's.
"""

from __future__ import annotations

import argparse
import ssl
from collections.abc import Callable, MutableMapping
from typing import Final, get_args

from nanocore import __version__
from nanocore.cli.answer_flags import (
    add_answer_flags,
    check_answer_flags,
    check_tokenizer,
    parser_name,
)
from nanocore.cli.api_keys import api_keys
from nanocore.cli.engine_choice import (
    CommandParser,
    EngineChoice,
    add_engine_flags,
    choose_engine,
)
from nanocore.cli.flag_types import (
    DEFAULT_NAMESPACE,
    at_least,
    metrics_namespace,
    otlp_url,
    port,
    seconds,
    seconds_or_none,
)
from nanocore.cli.serve_options import SHUTDOWN_TIMEOUT_S, ServeOptions, connection_limit
from nanocore.cli.sites import read_hosts, read_origin
from nanocore.http.server_settings import (
    KEEP_ALIVE_S,
    MAX_BODY_BYTES,
    STORED_RESPONSES_BYTES,
    AppSettings,
    ConnectionLimits,
    ServerSettings,
)
from nanocore.protocol.errors import ConfigError
from nanocore.system.logs import LogFormat

MAX_HTTP_WORKERS: Final = 256
DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8000
DEFAULT_LOG_FORMAT: Final = "text"
_EXIT_CODES: Final = """\
exit codes: 0 ended by SIGTERM, 2 usage or configuration, 3 model files, 4 memory, 5 address in use,
70 internal error or the engine's end, 130 interrupted"""


def parse(arguments: list[str], environment: MutableMapping[str, str]) -> ServeOptions:
    """What the command line and the environment ask for.

    Raises:
        ConfigError: a flag or a value that cannot be.
        SystemExit: --help or --version.
    """
    parser = build_parser()
    named = arguments[0] if arguments and not arguments[0].startswith("-") else None
    given, others = parser.parse_known_args(arguments[named is not None :])
    model = _model(named, given.model)
    if given.endpoint and given.standby is not None:
        raise ConfigError("--standby is for an engine that is launched, not with --endpoint")
    if given.log_format != DEFAULT_LOG_FORMAT and not given.endpoint:
        others.append(f"--log-format={given.log_format}")
    engine = choose_engine(parser, given, model, others)
    for name in ("keyfile", "keyfile_password", "ca_certs", "cert_reqs"):
        if getattr(given, f"ssl_{name}") is not None and given.ssl_certfile is None:
            raise ConfigError(f"--ssl-{name.replace('_', '-')} needs --ssl-certfile, too")
    if given.uds is not None and (given.host, given.port) != (None, None):
        raise ConfigError(f"--uds {given.uds} listens at no port: leave --host and --port out")
    if given.ssl_cert_reqs not in (None, ssl.CERT_NONE) and given.ssl_ca_certs is None:
        raise ConfigError(
            "--ssl-cert-reqs needs --ssl-ca-certs, or no client's certificate is good"
        )
    if given.uds == "":
        raise ConfigError("--uds: a path is needed")
    check_tokenizer(given.tokenizer)
    keys = api_keys(given.api_key, given.api_key_file, environment)
    return _options(given, engine, keys)


def _model(named: str | None, flag: str | None) -> str | None:
    if named is not None and flag is not None and named != flag:
        raise ConfigError(f"two models, {named} and --model {flag}: one of them is served")
    return flag if named is None else named


def _options(given: argparse.Namespace, engine: EngineChoice, keys: list[str]) -> ServeOptions:
    check_answer_flags(given)
    stored_bytes = given.stored_responses_bytes
    if given.http_workers > 1:
        if stored_bytes:
            raise ConfigError(
                f"--stored-responses-bytes {stored_bytes}: with --http-workers "
                f"{given.http_workers} an answer that one process keeps is not found by another; "
                "leave it out, or have one process"
            )
        stored_bytes = 0
    app = AppSettings(
        served_model_names=tuple(given.served_model_name),
        api_keys=tuple(keys),
        max_body_bytes=given.max_body_bytes,
        tool_parser=parser_name(given.tool_call_parser),
        reasoning_parser=parser_name(given.reasoning_parser),
        default_chat_template_kwargs=given.default_chat_template_kwargs,
        allowed_template_kwargs=tuple(given.allowed_chat_template_kwargs),
        keep_alive_s=given.comment_interval,
        stored_responses_bytes=STORED_RESPONSES_BYTES if stored_bytes is None else stored_bytes,
        allowed_origins=tuple(map(read_origin, given.allowed_origins)),
        allowed_hosts=read_hosts(given.host, given.allowed_hosts) if given.uds is None else None,
        otlp_traces_endpoint=given.otlp_traces_endpoint,
        metrics_namespace=given.metrics_namespace,
    )
    return ServeOptions(
        app=app,
        server=_server_settings(given),
        host=DEFAULT_HOST if given.host is None else given.host,
        port=DEFAULT_PORT if given.port is None else given.port,
        uds=given.uds,
        engine=engine,
        standby=bool(given.standby),
        http_workers=given.http_workers,
        log_format=given.log_format,
        shutdown_timeout_s=given.shutdown_timeout,
    )


def _server_settings(given: argparse.Namespace) -> ServerSettings:
    default_reqs = ssl.CERT_NONE if given.ssl_ca_certs is None else ssl.CERT_REQUIRED
    return ServerSettings(
        limits=ConnectionLimits(
            max_header_bytes=given.max_header_bytes,
            header_timeout_s=given.header_timeout,
            body_timeout_s=given.body_timeout,
            send_timeout_s=given.send_timeout,
            keep_alive_timeout_s=given.timeout_keep_alive,
            max_connections=connection_limit(given.limit_concurrency),
        ),
        ssl_keyfile=given.ssl_keyfile,
        ssl_certfile=given.ssl_certfile,
        ssl_keyfile_password=given.ssl_keyfile_password,
        ssl_ca_certs=given.ssl_ca_certs,
        ssl_cert_reqs=default_reqs if given.ssl_cert_reqs is None else given.ssl_cert_reqs,
        access_log=given.access_log,
    )


def build_parser() -> CommandParser:
    """The flags that are ours."""
    parser = CommandParser(
        prog="nanocore serve",
        usage="nanocore serve [MODEL] [flags] [flags of nanocore-engine]",
        description="Serve a model over HTTP, in the dialects of OpenAI's and Anthropic's APIs. "
        "An engine is launched, and ends with the server; flags that are not listed here are its, "
        "as `nanocore-engine --help` lists them. MODEL, a folder or an id on the hub, comes first; "
        "without one the demo model is served.",
        epilog=_EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"nanocore {__version__}")
    _add_engine(parser.add_argument_group("engine"))
    _add_address(parser.add_argument_group("address"))
    _add_keys(parser.add_argument_group("keys and TLS"))
    _add_limits(parser.add_argument_group("limits"))
    _add_answers(parser.add_argument_group("answers"))
    _add_watching(parser.add_argument_group("what can be watched"))
    return parser


def _add_engine(group: argparse._ArgumentGroup) -> None:
    add_engine_flags(group)
    add = group.add_argument
    add("--standby", action=argparse.BooleanOptionalAction,
        help="keep a second engine loaded, which takes over at once (default: no)")  # fmt: skip
    add("--http-workers", type=at_least(1, MAX_HTTP_WORKERS), default=1, metavar="N",
        help=f"processes that share the port, {MAX_HTTP_WORKERS} at most (default: 1)")  # fmt: skip


def _add_address(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", help="address or name to listen at; others than loopback need an API key "
        "(default: 127.0.0.1)")  # fmt: skip
    add("--port", type=port, help="port to listen at; 0 is any that is free (default: 8000)")
    add("--uds", metavar="PATH", help="listen at a Unix socket, and at no port")


def _add_keys(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--api-key", nargs="+", action="extend", default=[], metavar="KEY",
        help="keys that let clients in; others see them in the list of processes: rather "
        "--api-key-file, or NANOCORE_API_KEY in the environment")  # fmt: skip
    add("--api-key-file", metavar="FILE", help="a key per line, in a file that is yours alone")
    add("--ssl-certfile", metavar="FILE", help="serve TLS with this certificate (PEM)")
    add("--ssl-keyfile", metavar="FILE", help="its key, if it is in a file of its own")
    add("--ssl-keyfile-password", metavar="TEXT", help="what opens the key's file")
    add("--ssl-ca-certs", metavar="FILE", help="clients need certificates of these authorities")
    add("--ssl-cert-reqs", type=int, choices=(0, 1, 2), help="whether they do: no, may, must "
        "(default: 2 with --ssl-ca-certs, else 0)")  # fmt: skip


def _add_limits(group: argparse._ArgumentGroup) -> None:
    def add(flag: str, kind: Callable[[str], float], default: float | None, help: str) -> None:
        shown = "as many as descriptors allow" if default is None else f"{default:g}"
        if isinstance(default, int):
            shown = str(default)
        metavar = "S" if kind in (seconds, seconds_or_none) else "N"
        text = f"{help} (default: {shown})"
        group.add_argument(flag, type=kind, default=default, metavar=metavar, help=text)

    add("--max-body-bytes", at_least(1), MAX_BODY_BYTES, "bytes of a request's body")
    add(
        "--max-header-bytes",
        at_least(256),
        64 * 1024,
        "bytes of request line, headers and trailers",
    )
    add("--header-timeout", seconds, 10.0, "seconds for a request's headers to come")
    add("--body-timeout", seconds, 60.0, "seconds for a request's body to come")
    add("--send-timeout", seconds, 600.0, "seconds a client may take nothing of its answer")
    add("--timeout-keep-alive", seconds, 75.0, "seconds a connection may rest between requests")
    add("--limit-concurrency", at_least(1), None, "connections of a process; others get a 503")
    add("--shutdown-timeout", seconds_or_none, SHUTDOWN_TIMEOUT_S,
        "seconds for responses that run to come to their end after SIGTERM or Ctrl-C")  # fmt: skip
    add("--stored-responses-bytes", at_least(0), None, "that /v1/responses keeps in memory")
    group._group_actions[-1].help = (
        f"room for answers that /v1/responses keeps (default: {STORED_RESPONSES_BYTES}, and 0 with "
        "several --http-workers)"
    )


def _add_answers(group: argparse._ArgumentGroup) -> None:
    add_answer_flags(group)
    add = group.add_argument
    add("--comment-interval", type=seconds, default=KEEP_ALIVE_S, metavar="S",
        help=f"silence until a stream sends a comment (default: {KEEP_ALIVE_S:g})")  # fmt: skip
    add("--allowed-origins", nargs="+", action="extend", default=[], metavar="ORIGIN",
        help="of web pages that may call from other hosts")  # fmt: skip
    add("--allowed-hosts", nargs="+", action="extend", default=[], metavar="NAME",
        help="by which a server without keys may be asked, beside localhost; * is any")  # fmt: skip


def _add_watching(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--enable-access-log", dest="access_log", action="store_true", default=False,
        help="a line per request on stderr")  # fmt: skip
    add(
        "--disable-access-log",
        dest="access_log",
        action="store_false",
        help="no line per request (the default)",
    )
    add("--log-format", choices=get_args(LogFormat), default=DEFAULT_LOG_FORMAT,
        help="json: each line of the log an object, the engine's too (default: text)")  # fmt: skip
    add("--metrics-namespace", type=metrics_namespace, default=DEFAULT_NAMESPACE, metavar="NAME",
        help="names of metrics begin with it; vllm: as vLLM's (default: %(default)s)")  # fmt: skip
    add("--otlp-traces-endpoint", type=otlp_url, metavar="URL",
        help="send a span per request there, by OTLP over HTTP (default: none)")  # fmt: skip
