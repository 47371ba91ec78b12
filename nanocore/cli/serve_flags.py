"""The flags of `nanocore serve`: those of HTTP are ours, all others are the engine's.

Spelled as `vllm serve` spells them, where it has them. Which flags an engine has only the engine
knows: it refuses what is none when it starts, in its own words; what was near to one of ours is
said beside.
"""

from __future__ import annotations

import argparse
import math
import ssl
from collections.abc import Callable, MutableMapping
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from nanocore import __version__
from nanocore.cli.api_keys import api_keys
from nanocore.cli.serve_options import (
    JOIN_TIMEOUT_S,
    LAUNCH_TIMEOUT_S,
    MAX_RESTARTS,
    SHUTDOWN_TIMEOUT_S,
    ServeOptions,
    connection_limit,
)
from nanocore.cli.sites import read_hosts, read_origin
from nanocore.http.server_settings import ConnectionLimits, ServerSettings
from nanocore.http.settings import KEEP_ALIVE_S, MAX_BODY_BYTES, STORED_RESPONSES_BYTES, AppSettings
from nanocore.protocol.errors import ConfigError, InvalidRequestError

MAX_HTTP_WORKERS: Final = 256
DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8000
_EXIT_CODES: Final = """\
exit codes: 0 ended by SIGTERM, 2 usage or configuration, 3 model files, 4 memory, 5 address in use,
70 internal error or the engine's end, 130 interrupted"""
_NOT_OURS: Final = {
    "--listen": "the engine that `nanocore serve` launches listens where only its server looks; "
    "for one that others join, start `nanocore-engine --listen ENDPOINT`, and serve it with "
    "--endpoint ENDPOINT",
    "--check": "run `nanocore-engine --check`",
    "--parent-fd": "it is the launcher's own",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = message.replace("ignored explicit argument", "takes no value, and was given")
        raise ConfigError(f"{message} (nanocore serve --help lists the flags)")


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
    joined = bool(given.endpoint)
    hint = _check_others(parser, others, joined, model)
    if joined and model is not None:
        raise ConfigError(
            f"--endpoint {given.endpoint[0]} joins an engine that runs, with the model that it "
            f"has: leave {model} out"
        )
    if joined and (given.max_restarts, given.standby) != (None, None):
        raise ConfigError(
            "--max-restarts and --standby are for an engine that is launched, not with --endpoint"
        )
    if not joined and given.curve_dir is not None:
        raise ConfigError(f"--curve-dir {given.curve_dir}: keys are for --endpoint tcp://HOST:PORT")
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
    _check_tokenizer(given.tokenizer)
    keys = api_keys(given.api_key, given.api_key_file, environment)
    return _options(given, model, others, hint, keys)


def _check_tokenizer(folder: str | None) -> None:
    if folder is None:
        return
    if not Path(folder).is_dir():
        raise ConfigError(f"--tokenizer {folder}: there is no such folder")
    from nanocore.client.tokenizer import Tokenizer

    try:
        Tokenizer.from_folder(Path(folder)).close()
    except InvalidRequestError as error:
        raise ConfigError(f"--tokenizer {folder}: {error}") from None


def _model(named: str | None, flag: str | None) -> str | None:
    if named is not None and flag is not None and named != flag:
        raise ConfigError(f"two models, {named} and --model {flag}: one of them is served")
    return flag if named is None else named


def _check_others(
    parser: argparse.ArgumentParser, others: list[str], joined: bool, model: str | None
) -> str:
    """Refuse what no engine is launched with; what may have been meant with the rest, or ''."""
    for other in others:
        if reason := _NOT_OURS.get(other.partition("=")[0]):
            raise ConfigError(f"{other} is no flag of a server: {reason}")
    if model is None and others and not others[0].startswith("-") and not joined:
        raise ConfigError(f"{others[0]}: MODEL comes first: nanocore serve {others[0]} [flags]")
    hints = [
        f"`nanocore serve` has {near}, and {other} went to the engine"
        for other in others
        if (near := _near_match(parser, other))
    ]
    values = [not other.startswith("-") for other in others]
    if model is None and any(map(all, pairwise(values))):  # no flag takes two
        hints.append("MODEL comes first: nanocore serve MODEL [flags]")
    if others and joined:
        near = _near_match(parser, others[0])
        raise ConfigError(
            f"unknown: {' '.join(others)}"
            + (f"; did you mean {near}?" if near else "")
            + " (with --endpoint the engine runs already, and takes no flags)"
        )
    return "; ".join(hints)


def _near_match(parser: argparse.ArgumentParser, argument: str) -> str | None:
    if not argument.startswith("--"):
        return None
    known = [flag for action in parser._actions for flag in action.option_strings]
    near = get_close_matches(argument.partition("=")[0], known, n=1, cutoff=0.8)
    return near[0] if near else None


def _options(
    given: argparse.Namespace, model: str | None, others: list[str], hint: str, keys: list[str]
) -> ServeOptions:
    _check_answers(given)
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
        tool_parser=_none_if("none", given.tool_call_parser),
        reasoning_parser=_none_if("none", given.reasoning_parser),
        default_chat_template_kwargs=given.default_chat_template_kwargs,
        allowed_template_kwargs=tuple(given.allowed_chat_template_kwargs),
        keep_alive_s=given.comment_interval,
        stored_responses_bytes=STORED_RESPONSES_BYTES if stored_bytes is None else stored_bytes,
        allowed_origins=tuple(map(read_origin, given.allowed_origins)),
        allowed_hosts=read_hosts(given.host, given.allowed_hosts) if given.uds is None else None,
    )
    launched = not given.endpoint
    return ServeOptions(
        app=app,
        server=_server_settings(given),
        host=DEFAULT_HOST if given.host is None else given.host,
        port=DEFAULT_PORT if given.port is None else given.port,
        uds=given.uds,
        engine_flags=(*(() if model is None else (f"--model={model}",)), *others),
        hint=hint,
        max_restarts=MAX_RESTARTS if given.max_restarts is None else given.max_restarts,
        standby=bool(given.standby),
        endpoints=tuple(given.endpoint),
        curve_dir=given.curve_dir,
        tokenizer=given.tokenizer,
        start_timeout_s=given.start_timeout or (LAUNCH_TIMEOUT_S if launched else JOIN_TIMEOUT_S),
        http_workers=given.http_workers,
        shutdown_timeout_s=given.shutdown_timeout,
    )


def _check_answers(given: argparse.Namespace) -> None:
    """Raises ConfigError for values that would fail each request, or could never be of use."""
    from nanocore.client.chat.parsing.formats import REASONING_PARSERS, TOOL_PARSERS
    from nanocore.client.chat.template_kwargs import read_template_kwargs

    for flag, name, known in (
        ("--tool-call-parser", given.tool_call_parser, TOOL_PARSERS),
        ("--reasoning-parser", given.reasoning_parser, REASONING_PARSERS),
    ):
        if name not in ("auto", "none", *known):
            raise ConfigError(f"{flag} {name}: there are auto, none, {', '.join(sorted(known))}")
    for flag, names in (
        ("--default-chat-template-kwargs", given.default_chat_template_kwargs),
        ("--allowed-chat-template-kwargs", given.allowed_chat_template_kwargs),
    ):
        try:
            read_template_kwargs(dict.fromkeys(names), frozenset(names), ())
        except InvalidRequestError as error:
            raise ConfigError(f"{flag}: {error}") from None
    if "" in given.served_model_name:
        raise ConfigError("--served-model-name '': a name has at least one character")


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


def _none_if(word: str, text: str) -> str | None:
    return None if text.lower() == word else text


def build_parser() -> argparse.ArgumentParser:
    """The flags that are ours."""
    parser = _Parser(
        prog="nanocore serve",
        usage="nanocore serve [MODEL] [flags] [flags of nanocore-engine]",
        description="Serve a model over HTTP, in the dialects of OpenAI's and Anthropic's APIs. "
        "An engine is launched, and ends with the server; flags that are not listed here are its, "
        "as `nanocore-engine --help` lists them. MODEL, a folder or an id on the hub, comes first; "
        "without one the bundled demo model is served.",
        epilog=_EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"nanocore {__version__}")
    _add_engine(parser.add_argument_group("engine"))
    _add_address(parser.add_argument_group("address"))
    _add_keys(parser.add_argument_group("keys and TLS"))
    _add_limits(parser.add_argument_group("limits"))
    _add_answers(parser.add_argument_group("answers"))
    return parser


def _add_engine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", help="the same as MODEL")
    add("--endpoint", action="append", default=[],
        help="join the engine that runs there (ipc:// or tcp://), and launch none; repeat it for "
        "engines of the same model, of which one is used as long as it serves")  # fmt: skip
    add("--curve-dir", metavar="DIR", help="with --endpoint tcp://: keys of nanocore-keygen")
    add("--tokenizer", metavar="DIR", help="folder of the tokenizer (default: the engine's)")
    add(
        "--start-timeout",
        type=_seconds,
        metavar="S",
        help=f"seconds that the engine may take to load (default: {LAUNCH_TIMEOUT_S:g}, and "
        f"{JOIN_TIMEOUT_S:g} to answer with --endpoint)",
    )
    add("--max-restarts", type=_at_least(0), metavar="N",
        help="of an engine that dies, in a row; then, and with 0, the server ends with it "
        f"(default: {MAX_RESTARTS})")  # fmt: skip
    add("--standby", action=argparse.BooleanOptionalAction,
        help="keep a second engine loaded, which takes over at once (default: no)")  # fmt: skip
    add("--http-workers", type=_at_least(1, MAX_HTTP_WORKERS), default=1, metavar="N",
        help=f"processes that share the port, {MAX_HTTP_WORKERS} at most (default: 1)")  # fmt: skip


def _add_address(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", help="address or name; others than loopback need an API key "
        "(default: 127.0.0.1)")  # fmt: skip
    add("--port", type=_port, help="0 is any that is free (default: 8000)")
    add("--uds", metavar="PATH", help="listen at a Unix socket, and at no port")


def _add_keys(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--api-key", nargs="+", action="extend", default=[], metavar="KEY",
        help="keys that let clients in; others see them in the list of processes: rather "
        "--api-key-file, or NANOCORE_API_KEY in the environment")  # fmt: skip
    add("--api-key-file", metavar="FILE", help="a key per line, in a file that is yours alone")
    add("--ssl-certfile", metavar="FILE", help="serve TLS with this certificate (PEM)")
    add("--ssl-keyfile", metavar="FILE", help="its key, if it is in a file of its own")
    add("--ssl-keyfile-password", metavar="TEXT", help="of that file")
    add("--ssl-ca-certs", metavar="FILE", help="clients need certificates of these authorities")
    add("--ssl-cert-reqs", type=int, choices=(0, 1, 2), help="whether they do: no, may, must "
        "(default: 2 with --ssl-ca-certs, else 0)")  # fmt: skip


def _add_limits(group: argparse._ArgumentGroup) -> None:
    def add(flag: str, kind: Callable[[str], float], default: float | None, help: str) -> None:
        shown = "as many as descriptors allow" if default is None else f"{default:g}"
        if isinstance(default, int):
            shown = str(default)
        metavar = "S" if kind is _seconds else "N"
        text = f"{help} (default: {shown})"
        group.add_argument(flag, type=kind, default=default, metavar=metavar, help=text)

    add("--max-body-bytes", _at_least(1), MAX_BODY_BYTES, "of a request")
    add("--max-header-bytes", _at_least(256), 64 * 1024, "request line, headers and trailers")
    add("--header-timeout", _seconds, 10.0, "seconds for a request's headers to come")
    add("--body-timeout", _seconds, 60.0, "seconds for a request's body to come")
    add("--send-timeout", _seconds, 600.0, "seconds a client may take nothing of its answer")
    add("--timeout-keep-alive", _seconds, 75.0, "seconds a connection may rest between requests")
    add("--limit-concurrency", _at_least(1), None, "connections of a process; others get a 503")
    add("--shutdown-timeout", _seconds_or_none, SHUTDOWN_TIMEOUT_S,
        "seconds for responses that run to come to their end after SIGTERM or Ctrl-C")  # fmt: skip
    add("--stored-responses-bytes", _at_least(0), None, "that /v1/responses keeps in memory")
    group._group_actions[-1].help = (
        f"room for answers that /v1/responses keeps (default: {STORED_RESPONSES_BYTES}, and 0 with "
        "several --http-workers)"
    )


def _add_answers(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--served-model-name", nargs="+", action="extend", default=[], metavar="NAME",
        help="what clients may call the model; the first is its name in answers")  # fmt: skip
    add("--tool-call-parser", default="auto", metavar="NAME", help="or none (default: auto)")
    add("--reasoning-parser", default="auto", metavar="NAME", help="or none (default: auto)")
    add("--default-chat-template-kwargs", type=_json_object, default={}, metavar="JSON",
        help="for the chat template, where a request says nothing else")  # fmt: skip
    add("--allowed-chat-template-kwargs", nargs="+", action="extend", default=[], metavar="NAME",
        help="names that requests may set beside the usual ones")  # fmt: skip
    add("--comment-interval", type=_seconds, default=KEEP_ALIVE_S, metavar="S",
        help=f"silence until a stream sends a comment (default: {KEEP_ALIVE_S:g})")  # fmt: skip
    add("--allowed-origins", nargs="+", action="extend", default=[], metavar="ORIGIN",
        help="of web pages that may call from other hosts")  # fmt: skip
    add("--allowed-hosts", nargs="+", action="extend", default=[], metavar="NAME",
        help="by which a server without keys may be asked, beside localhost; * is any")  # fmt: skip
    add("--enable-access-log", dest="access_log", action="store_true", default=False,
        help="a line per request on stderr")  # fmt: skip
    add("--disable-access-log", dest="access_log", action="store_false", help="(the default)")


def _at_least(least: int, most: int = 10**18) -> Callable[[str], int]:
    def number(text: str) -> int:
        if text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most:
            return int(text)
        limits = f"from {least} on" if most == 10**18 else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number {limits}")

    return number


def _port(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text[:6]) <= 65535:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no port from 0 to 65535")


def _seconds(text: str) -> float:
    seconds = _seconds_or_none(text)
    if not seconds:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


def _seconds_or_none(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if 0 <= seconds < 1e8:
        return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
