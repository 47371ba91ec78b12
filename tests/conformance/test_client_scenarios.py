"""The scenarios for clients: a healthy client passes them all, and each defect is found."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanocore.protocol.sockets.engine_socket import EngineSocket, bind_engine_socket
from nanocore_conformance.client_scenarios import CLIENT_SCENARIOS
from nanocore_conformance.client_under_test import ClientUnderTest
from tests.conformance import stream_client

PATIENCE_S = 60.0
SHORT_PATIENCE_S = 3.0
"""For clients that owe something: it never comes, however long one waits."""
SILENCE_S = 1.0
"""What stands for the protocol's 10 s here, and never decides for a client that is right."""
LONG_SILENCE_S = 1000.0
SCENARIOS = {scenario.name: scenario for scenario in CLIENT_SCENARIOS.all}


@pytest.fixture
def endpoint(short_path: Path) -> str:
    return f"ipc://{short_path}/engine.sock"


@pytest.fixture
def socket(endpoint: str) -> Iterator[EngineSocket]:
    socket = bind_engine_socket(endpoint)
    yield socket
    socket.close()


def under_test(
    socket: EngineSocket,
    endpoint: str,
    defect: str = "",
    patience_s: float = PATIENCE_S,
    silence_s: float = LONG_SILENCE_S,
) -> ClientUnderTest:
    command = [sys.executable, stream_client.__file__, "{endpoint}", "{prompt}", "{max_tokens}"]
    return ClientUnderTest(
        socket, endpoint, [*command, str(silence_s), defect], patience_s, silence_s=SILENCE_S
    )


@pytest.mark.parametrize("name", [name for name, s in SCENARIOS.items() if not s.slow])
def test_a_healthy_client_passes(socket: EngineSocket, endpoint: str, name: str) -> None:
    result = under_test(socket, endpoint).run(SCENARIOS[name])
    assert result.outcome == "pass", str(result)


def test_a_healthy_client_gives_up_after_silence(socket: EngineSocket, endpoint: str) -> None:
    one = under_test(socket, endpoint, silence_s=SILENCE_S)
    result = one.run(SCENARIOS["silence-is-death"])
    assert result.outcome == "pass", str(result)


def test_a_healthy_client_lives_as_long_as_there_are_pings(
    socket: EngineSocket, endpoint: str
) -> None:
    # A minute for the client, against PINGs every tenth of a second: slow machines do not matter.
    result = under_test(socket, endpoint, silence_s=60.0).run(SCENARIOS["pings-are-signs-of-life"])
    assert result.outcome == "pass", str(result)


DEFECTS = {
    "no-hello": ("tokens-are-printed-as-they-arrive", "as the first message"),
    "unknown-field": ("tokens-are-printed-as-they-arrive", "unknown field `clientt`"),
    "list-prompt": ("tokens-are-printed-as-they-arrive", "prompt_token_ids"),
    "wrong-prompt": ("tokens-are-printed-as-they-arrive", "the prompt [1, 2, 3] [3, 2, 1]"),
    "not-greedy": ("tokens-are-printed-as-they-arrive", "temperature 0"),
    "late-print": ("tokens-are-printed-as-they-arrive", "on stdout, at once"),
    "no-reason": ("tokens-are-printed-as-they-arrive", "finish_reason: length"),
    "no-bye": ("tokens-are-printed-as-they-arrive", "BYE its exit with 0"),
    "after-bye": ("tokens-are-printed-as-they-arrive", "nothing after BYE"),
    "wrong-exit": ("tokens-are-printed-as-they-arrive", "exit code 0 3"),
    "ignores-counts": ("merged-tokens-are-told-apart-by-counts", "from line"),
    "events-first": ("tokens-and-end-may-be-one-message", "from line 1"),
    "first-event-only": ("start-and-end-may-be-one-event", "BYE nothing within"),
    "one-thing-per-event": ("start-and-end-may-be-one-event", "BYE nothing within"),
    "zero-is-one": ("count-of-zero-is-no-tokens", "from line 1"),
    "errors-are-failures": ("every-finish-reason-is-told", "BYE"),
    "end-needs-tokens": ("end-may-come-without-tokens", "BYE nothing within"),
    "always-length": ("stop-ends-before-max-tokens", "finish_reason: stop"),
    "strict": ("unknown-fields-are-ignored", "an unknown field"),
    "needs-1.3": ("older-engine-is-understood", "too old"),
    "all-handles": ("foreign-handles-are-ignored", "from line 1"),
    "knows-1.4-only": ("log-probabilities-nobody-asked-for-are-ignored", "an unknown field"),
    "all-samples": ("samples-of-others-are-ignored", "from line"),
    "first-answer": ("answers-are-matched-by-request-id", "from line 1"),
    "any-error": ("answers-are-matched-by-request-id", "BYE its exit with 1"),
    "code-only": ("place-in-a-schema-is-said", "/properties/age/type"),
    "no-zero": ("handles-may-be-the-smallest-and-the-largest", "BYE nothing within"),
    "no-pong": ("ping-is-answered-at-any-time", "PONG nothing within"),
    "short-nonce": ("ping-is-answered-at-any-time", "PONG with nonce 4294967296"),
    "replies-confuse": ("unasked-answers-are-ignored", "unexpected"),
    "small-memory": ("many-small-messages-and-a-huge-one", "from line 2001"),
    "silent-refusal": ("refusal-ends-the-client", "a line on stderr"),
    "ignores-errors": ("refused-request-ends-the-client", "exit none within"),
    "fails-with-0": ("dead-engine-ends-the-client", "exit code 1 0"),
    "silent": ("dead-engine-ends-the-client", "engine_dead"),
    "ignores-bye": ("engines-bye-ends-the-client", "exit none within"),
    "tolerant": ("malformed-messages-end-the-session", "for vector engine-one-frame"),
}
"""Which scenario must find which defect of the client, and words of what it must say."""


@pytest.mark.campaign
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_found_by_its_scenario(
    socket: EngineSocket, endpoint: str, defect: str
) -> None:
    name, words = DEFECTS[defect]
    result = under_test(socket, endpoint, defect, SHORT_PATIENCE_S).run(SCENARIOS[name])
    assert result.outcome == "fail"
    said = f"{result.expected} {result.got}"
    assert words in said


def test_a_client_that_never_gives_up_is_found(socket: EngineSocket, endpoint: str) -> None:
    one = under_test(socket, endpoint, patience_s=0.5, silence_s=LONG_SILENCE_S)
    assert one.run(SCENARIOS["silence-is-death"]).outcome == "fail"


def test_a_client_that_gives_up_early_is_found(socket: EngineSocket, endpoint: str) -> None:
    one = under_test(socket, endpoint, silence_s=0.2)
    result = one.run(SCENARIOS["silence-is-death"])
    assert (result.outcome, result.expected) == ("fail", "patience of 0.5 s")


def test_a_client_for_which_pings_do_not_count_is_found(
    socket: EngineSocket, endpoint: str
) -> None:
    one = under_test(socket, endpoint, "pings-do-not-count", silence_s=0.5)
    assert one.run(SCENARIOS["pings-are-signs-of-life"]).outcome == "fail"
