"""nanocore-conformance: checks an engine or a client against PROTOCOL.md.

Exit codes: 0 it conforms, 1 it does not, 2 usage, or the endpoint does not work. It prints a line
per check as it ends, or with --json one report at the end.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

from nanocore.protocol.errors import ConfigError, StartError
from nanocore.protocol.sockets.curve import client_keys
from nanocore.protocol.sockets.engine_socket import bind_engine_socket
from nanocore.system.endpoint_lock import EndpointLock
from nanocore_conformance import __version__
from nanocore_conformance.client_scenarios import CLIENT_SCENARIOS
from nanocore_conformance.client_under_test import ClientUnderTest
from nanocore_conformance.engine_rules import ENGINE_RULES
from nanocore_conformance.engine_under_test import EngineUnderTest
from nanocore_conformance.peer_socket import PeerSocket
from nanocore_conformance.report import Check, Result, as_json, summary

Bench = TypeVar("Bench")
PATIENCE_S = 10.0
EPILOG = """\
The engine should serve no other clients: rules pause it, empty its prefix cache and read its
statistics. Its model needs a context of at least 256 tokens.

The client's command runs once per scenario, with {endpoint}, {prompt} (decimal token ids, separated
by commas: 1,2,3) and {max_tokens} replaced. It must submit one greedy request, print each token id
on its own line as it arrives, flushed, then print "finish_reason: REASON", send BYE and exit with
0. If the request has no end, it must print the reason on stderr and exit with 1, so it must not
continue with another engine. An example:

  nanocore-conformance --client -- node stream.js {endpoint} {prompt} {max_tokens}

exit codes: 0 it conforms, 1 it does not, 2 usage, or the endpoint does not work
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="nanocore-conformance",
        description="Check an engine or a client against the nanocore wire protocol (PROTOCOL.md).",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"nanocore-conformance {__version__}",
        help="print the version and exit",
    )
    peer = parser.add_mutually_exclusive_group(required=True)
    peer.add_argument("--engine", metavar="ENDPOINT", help="check the engine that listens here")
    peer.add_argument("--client", action="store_true", help="check the client that CMD starts")
    parser.add_argument("command", metavar="CMD", nargs="*", help="command of the client, after --")
    parser.add_argument(
        "--listen",
        metavar="ENDPOINT",
        help="with --client: endpoint of the test engine "
        "(default: an ipc endpoint in a temporary folder)",
    )
    parser.add_argument(
        "--curve-dir",
        metavar="FOLDER",
        help="with --engine tcp://HOST:PORT: folder of a client's keys",
    )
    parser.add_argument(
        "--rule", action="append", metavar="NAME", help="only this rule; repeatable"
    )
    parser.add_argument("--list", action="store_true", help="list all rules and exit")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--slow",
        action="store_true",
        help="also check rules with long timeouts; "
        "with --client, send every malformed vector instead of a sample",
    )
    parser.add_argument(
        "--drain",
        action="store_true",
        help="with --engine: finally check rules that end the engine",
    )
    parser.add_argument(
        "--patience-s",
        type=float,
        default=PATIENCE_S,
        metavar="SECONDS",
        help="seconds to wait for a reply (default: %(default)g)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Check a peer; exits with 0 if it conforms, 1 if not, or with the code of a StartError."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    try:
        conforms = _check_client(args) if args.client else _check_engine(args)
    except StartError as error:
        sys.stderr.write(f"nanocore-conformance: {error}\n")
        sys.exit(error.exit_code)
    sys.exit(0 if conforms else 1)


def _check_engine(args: argparse.Namespace) -> bool:
    if args.command or args.listen:
        raise ConfigError("CMD and --listen go with --client: --engine needs neither")
    rules = _chosen(ENGINE_RULES.all, args)
    if args.list:
        return _list(rules)
    keys = client_keys(args.engine, args.curve_dir)
    tested = EngineUnderTest(lambda: PeerSocket(args.engine, keys), args.patience_s)
    if not tested.answers():
        raise ConfigError(
            f"no engine answers at {args.engine} within {args.patience_s:g} s: start one there, "
            "or raise --patience-s"
        )
    return _report("engine", rules, tested.run, args)


def _check_client(args: argparse.Namespace) -> bool:
    scenarios = _chosen(CLIENT_SCENARIOS.all, args)
    if args.list:
        return _list(scenarios)
    if not any("{endpoint}" in word for word in args.command):
        raise ConfigError(
            "--client needs a command with {endpoint} in it: "
            "-- CMD {endpoint} {prompt} {max_tokens}"
        )
    if args.curve_dir:
        raise ConfigError("--curve-dir goes with --engine: a client is checked over ipc://")
    with _endpoint(args.listen) as endpoint:
        lock = EndpointLock(endpoint)
        socket = bind_engine_socket(endpoint)
        try:
            tested = ClientUnderTest(
                socket, endpoint, args.command, args.patience_s, thorough=args.slow
            )
            return _report("client", scenarios, tested.run, args)
        finally:
            socket.close()
            lock.release()


def _chosen(checks: list[Check[Bench]], args: argparse.Namespace) -> list[Check[Bench]]:
    names = [check.name for check in checks]
    for name in args.rule or ():
        if name not in names:
            near = get_close_matches(name, names, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"--rule {name}: unknown rule; {meant}--list lists all")
    if args.rule:
        return [check for check in checks if check.name in args.rule]
    if args.list:
        return checks
    checks = [check for check in checks if args.slow or not check.slow]
    usual = [check for check in checks if not check.flag]
    return usual + [check for check in checks if check.flag == "drain" and args.drain]


def _list(checks: list[Check[Bench]]) -> bool:
    for check in checks:
        flag = "slow" if check.slow else check.flag
        slow = f" (with --{flag})" if flag else ""
        print(f"{check.name}{slow}\n    {check.meaning}\n    PROTOCOL.md, {check.section}")
    return True


def _report(
    peer: str,
    checks: list[Check[Bench]],
    run: Callable[[Check[Bench]], Result],
    args: argparse.Namespace,
) -> bool:
    """Run the checks and print; whether all that could be run passed."""
    results = []
    for check in checks:
        result = run(check)
        results.append(result)
        if not args.json:
            print(result, flush=True)
    print(as_json(peer, results) if args.json else summary(results), flush=True)
    return all(result.outcome != "fail" for result in results)


@contextmanager
def _endpoint(listen: str | None) -> Iterator[str]:
    if listen:
        yield listen
        return
    with tempfile.TemporaryDirectory(prefix="nc-", dir="/tmp") as directory:
        yield f"ipc://{Path(directory) / 'played' / 'engine.sock'}"
