"""`nanocore serve` outlives the engine that it launched: streams go on, and probes tell."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator

import pytest

from tests.cli.served import DEMO, Descendants, Served, answered, serving_forked
from tests.cli.test_serve_launching import directory_of
from tests.end_to_end import forked

NUM_TOKENS = 600
KINDS = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.5, "seed": 11},
    "logprobs": {"temperature": 1.0, "seed": 12, "logprobs": True, "top_logprobs": 2},
}


def choices_of(connection: http.client.HTTPConnection) -> Iterator[dict[str, object]]:
    """Those of a stream's events, which must end as it should."""
    answer = connection.getresponse()
    assert answer.status == 200
    last = b""
    for line in answer:
        if line.startswith(b"data: "):
            last = line.removeprefix(b"data: ").strip()
            if last != b"[DONE]":
                event = json.loads(last)
                assert "error" not in event, event
                yield from event["choices"]
    assert last == b"[DONE]"
    connection.close()


def whole(choices: Iterator[dict[str, object]]) -> tuple[str, list[object], object]:
    """Text, log probabilities and how it ended, however they were cut."""
    text, logprobs, reason = "", [], None
    for choice in choices:
        text += choice["delta"].get("content") or ""  # type: ignore[attr-defined]
        logprobs += (choice.get("logprobs") or {}).get("content") or []  # type: ignore[attr-defined]
        reason = choice["finish_reason"] or reason
    return text, logprobs, reason


def stream(server: Served, kind: str) -> Iterator[dict[str, object]]:
    return choices_of(server.ask(NUM_TOKENS, stream=True, **KINDS[kind]))


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--standby"],
        pytest.param(["--http-workers", "2"], marks=pytest.mark.campaign),
    ],
)
def test_streams_go_on_when_the_engine_is_killed_below_them(flags: list[str]) -> None:
    with serving_forked(*flags) as server:
        server.line("ready: ")
        undisturbed = {kind: whole(stream(server, kind)) for kind in KINDS}
        if "--standby" in flags:
            server.wait_until_logged("standing by")
        streams = {kind: stream(server, kind) for kind in KINDS}
        first = {kind: next(stream) for kind, stream in streams.items()}
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        for kind, rest in streams.items():
            assert whole(iter([first[kind], *rest])) == undisturbed[kind]
        assert "serving again" in server.line("ready: ")
        assert server.get("/readyz")[0] == 200
        below = Descendants(server.pid, *server.engine_pids())
        server.signal(signal.SIGTERM)
        assert server.exit() == 0
        below.wait_until_all_end()
        assert not directory_of(server.log).exists()
        assert "Traceback" not in "".join(server.log)


def test_a_server_of_two_engines_goes_on_with_the_second_when_the_first_is_killed() -> None:
    with (
        forked.engine(DEMO) as first,
        forked.engine(DEMO) as second,
        serving_forked("--endpoint", first.endpoint, "--endpoint", second.endpoint) as server,
    ):
        assert f"{first.endpoint}, {second.endpoint}" in server.line("ready: ")
        undisturbed = whole(stream(server, "seeded"))
        rest = stream(server, "seeded")
        start = next(rest)
        os.kill(first.pid, signal.SIGKILL)
        assert whole(iter([start, *rest])) == undisturbed
        assert answered(server.ask())[0] == 200


def test_a_server_whose_engine_dies_is_ready_again_until_it_dies_again_and_again() -> None:
    with serving_forked("--max-restarts", "1") as server:
        server.line("ready: ")
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        server.line("restart 1 of at most 1 in a row")
        while (status := server.get("/readyz")[0]) == 503:
            assert server.get("/livez")[0] == 200
        assert status == 200
        server.line("serving again")
        (engine,) = server.engine_pids()
        below = Descendants(server.pid, engine)
        os.kill(engine, signal.SIGKILL)
        assert server.exit() == 70
        below.wait_until_all_end()
        assert "exited with code -9, after 1 restart in a row" in server.log[-1]
        assert not directory_of(server.log).exists()


def test_a_server_ends_with_an_engine_that_was_told_to() -> None:
    with serving_forked("--standby") as server:
        server.line("ready: ")
        server.wait_until_logged("standing by")
        serving, standby = server.engine_pids()
        below = Descendants(server.pid, serving, standby)
        os.kill(serving, signal.SIGTERM)
        assert server.exit() == 70
        below.wait_until_all_end()
        assert "the engine process exited with code 0" in server.log[-1]
