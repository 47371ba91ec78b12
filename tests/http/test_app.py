"""The application: routing, keys, origins, bodies, and errors as responses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import pytest

from nanocore.client import SamplingParams
from nanocore.http.app import App
from nanocore.http.http_errors import DRAINING, ENGINE_GONE, anthropic_body, http_error, openai_body
from nanocore.http.routes import ROUTES
from nanocore.http.server_settings import AppSettings
from nanocore.protocol.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineDrainingError,
    EngineOverloadedError,
    InvalidRequestError,
    NanocoreError,
    ProtocolError,
)
from tests.client.fake_engine import connected
from tests.client.running import run
from tests.end_to_end import forked
from tests.http.asgi import Connection, app_of, scope
from tests.http.conftest import DEMO_MODEL

CHAT = "/v1/chat/completions"


def ask(
    app: App,
    method: str,
    path: str,
    *pieces: bytes,
    connection: Connection | None = None,
    **headers: str,
) -> Connection:
    """One request's answer."""
    connection = connection or Connection(*pieces)
    run(app(scope(method, path, **headers), connection.receive, connection.send))
    return connection


@pytest.fixture
def app() -> App:
    return App(AppSettings())


def test_probes_answer_while_the_model_is_being_loaded(app: App) -> None:
    assert ask(app, "GET", "/livez").status == 200
    assert ask(app, "HEAD", "/").status == 200
    for path in ("/readyz", "/health", "/metrics", "/v1/models"):
        loading = ask(app, "GET", path)
        assert (loading.status, loading.headers[b"retry-after"]) == (503, b"5")


async def test_probes_tell_a_server_that_drains_from_one_that_serves(endpoint: str) -> None:
    async with connected(endpoint) as (_, client):
        app = App(AppSettings(served_model_names=("one", "two")))
        app.state.client = client
        statuses = {}
        for app.state.is_draining in (False, True):
            for path in ("/livez", "/readyz", "/v1/models", CHAT):
                connection = Connection()
                method = "POST" if path == CHAT else "GET"
                await app(scope(method, path), connection.receive, connection.send)
                statuses[path, app.state.is_draining] = connection.status
        assert statuses == {
            ("/livez", False): 200, ("/livez", True): 200,
            ("/readyz", False): 200, ("/readyz", True): 503,
            ("/v1/models", False): 200, ("/v1/models", True): 200,
            (CHAT, False): 400, (CHAT, True): 503,
        }  # fmt: skip


async def test_models_go_by_all_their_names(endpoint: str) -> None:
    async with connected(endpoint) as (_, client):
        app = App(AppSettings(served_model_names=("one", "org/two")))
        app.state.client = client
        answers = {}
        for path in ("/v1/models", "/v1/models/org/two", "/v1/models/three"):
            connection = Connection()
            await app(scope("GET", path), connection.receive, connection.send)
            answers[path] = connection
        ids = [model["id"] for model in answers["/v1/models"].json["data"]]
        assert ids == ["one", "org/two"]
        assert answers["/v1/models/org/two"].json["id"] == "org/two"
        missing = answers["/v1/models/three"]
        assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found")


def test_a_wrong_path_or_method_names_the_right_ones(app: App) -> None:
    answer = ask(app, "GET", "/v1/audio")
    assert answer.status == 404
    assert "/v1/chat/completions" in answer.json["error"]["message"]

    answer = ask(app, "GET", CHAT)
    assert (answer.status, answer.headers[b"allow"]) == (405, b"POST")


def test_anthropics_clients_get_errors_in_their_shape_on_every_path(app: App) -> None:
    for path in ("/v1/messages/batches", "/v1/models"):
        answer = ask(app, "GET", path, anthropic_version="2023-06-01")
        assert answer.status >= 400
        assert (answer.json["type"], answer.json["error"].keys()) == ("error", {"type", "message"})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic right"},
        {"authorization": "right"},
        {"x_api_key": "wrong"},
        {"x_api_key": ""},
    ],
)
def test_without_a_valid_key_nothing_but_probes_is_served(headers: dict[str, str]) -> None:
    app = App(AppSettings(api_keys=("right", "other")))
    for route in ROUTES:
        path = route.path.replace("{id}", "x")
        status = ask(app, route.method, path, **headers).status
        assert (status == 401) is not route.is_open, path
    assert {route.path for route in ROUTES if route.is_open} >= {"/", "/livez", "/readyz"}


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer right"},
        {"authorization": "bearer other"},
        {"x_api_key": "other"},
        {"x_api_key": "other "},
        {"x_api_key": "wrong", "authorization": "Bearer right"},
    ],
)
def test_any_of_the_keys_opens(headers: dict[str, str]) -> None:
    app = App(AppSettings(api_keys=("right", "other")))
    assert ask(app, "GET", "/v1/models", **headers).status == 503  # nothing is loaded


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"", 400, "cannot be read as JSON"),
        (b"{", 400, "cannot be read as JSON"),
        (b"[]", 400, "JSON object"),
        (b"\xff{}", 400, "cannot be read as JSON"),
        (b'{"a": "\xff"}', 400, "cannot be read as JSON"),
        (b'{"a": NaN}', 400, "cannot be read as JSON"),
        (b"[" * 50_000, 400, "nested too deep"),
        (b"[" * 100_000, 413, "100000 lists and objects"),
        (b'{"messages": 1}', 400, "messages must be a list, not 1"),
        (b'{"messages": [1]}', 400, "messages[0] must be an object, not 1"),
        (b'{"messages": [], "temperature": "hot"}', 400, "temperature must be a number, not 'hot'"),
        (b"{" + b" " * 2000, 413, "1000 bytes"),
        (json.dumps({str(i): 1 for i in range(300)}).encode(), 400, "300 fields"),
    ],
)
def test_bodies_that_are_none_are_told_why(body: bytes, status: int, says: str) -> None:
    app = App(AppSettings(max_body_bytes=1000 if "bytes" in says else 2**20))
    answer = ask(app, "POST", CHAT, body[:10], body[10:])
    assert answer.status == status
    assert says in answer.json["error"]["message"]


def test_a_body_whose_announced_length_is_too_large_is_not_read() -> None:
    app = App(AppSettings(max_body_bytes=1000))
    connection = Connection(b"x")
    ask(app, "POST", CHAT, connection=connection, content_length="1001")
    assert connection.status == 413
    assert connection._incoming == [b"x"]


@pytest.mark.parametrize("headers", [{"content_type": "text/plain"}, {"content_encoding": "gzip"}])
def test_other_kinds_of_bodies_are_refused(app: App, headers: dict[str, str]) -> None:
    assert ask(app, "POST", CHAT, b"{}", **headers).status == 415


def test_a_curl_without_a_header_is_told_which(app: App) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    refused = ask(app, "POST", CHAT, b"{}", **form)
    assert refused.status == 415
    assert "(curl: -H 'content-type: application/json')" in refused.json["error"]["message"]


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/models", "did you mean /v1/models?"),
        ("/v1/models/", "did you mean /v1/models?"),
        ("/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("/chat/completions/", "did you mean /v1/chat/completions?"),
        ("/responses/x", "did you mean /v1/responses/x?"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/api/chat", "Ollama's API is not served here: use /v1/chat/completions"),
        ("/v1/audio/speech", "the main ones are /v1/chat/completions, "),
        ("/" + "a" * 5000, "the main ones are"),
        ("//", "the main ones are"),
    ],
)
def test_an_unknown_path_is_told_what_may_have_been_meant(app: App, path: str, hint: str) -> None:
    refused = ask(app, "GET", path)
    assert refused.status == 404
    assert f": {hint}" in refused.json["error"]["message"]
    assert len(refused.json["error"]["message"]) < 400


def test_a_client_that_leaves_before_its_body_is_there_gets_nothing(app: App) -> None:
    connection = Connection(b"{", b"")
    connection._incoming.pop()
    connection.leave()
    ask(app, "POST", CHAT, connection=connection)
    assert connection.start is None


def test_unknown_fields_are_named_in_a_header(app: App) -> None:
    body: dict[str, Any] = {"messages": [], "frobnicate": 1, "b\u00e4d\r\n": 2}
    answer = ask(app, "POST", CHAT, json.dumps(body).encode())
    assert answer.headers[b"nanocore-ignored"] == b"b?d??, frobnicate"


@pytest.mark.parametrize(("given", "kept"), [("abc-1", True), ("two words", False), ("", False)])
def test_a_request_keeps_its_id_if_that_can_be_one(app: App, given: str, kept: bool) -> None:
    answer = ask(app, "GET", "/livez", x_request_id=given)
    assert (answer.headers[b"x-request-id"] == given.encode()) is kept


def test_pages_of_other_hosts_may_call_if_they_are_allowed_to() -> None:
    app = App(AppSettings(allowed_origins=("https://a.example",)))
    allowed = ask(app, "OPTIONS", CHAT, origin="https://a.example")
    assert (allowed.status, allowed.body) == (204, b"")
    assert allowed.headers[b"access-control-allow-origin"] == b"https://a.example"
    other = ask(app, "GET", "/livez", origin="https://b.example")
    assert b"access-control-allow-origin" not in other.headers
    assert ask(app, "OPTIONS", CHAT, origin="https://b.example").status == 405
    assert ask(App(AppSettings()), "OPTIONS", CHAT, origin="https://a.example").status == 405


def test_a_bug_is_a_status_and_not_a_dropped_connection(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def break_down() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(app, "_check", lambda *_: break_down())
    answer = ask(app, "GET", "/livez")
    assert (answer.status, answer.json["error"]["type"]) == (500, "server_error")
    assert "GET /livez" in caplog.text
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    ("host", "origin", "allowed"),
    [
        ("localhost:8000", None, True),
        ("LOCALHOST", None, True),
        ("a.localhost:1", None, True),
        ("127.0.0.1:8000", "http://127.0.0.1:8000", True),
        ("[::1]:8000", "https://[::1]:8000", True),
        ("mine.example:8000", None, True),
        ("localhost:8000", "https://page.example", True),
        ("evil.example:8000", None, False),
        ("evil.example:8000", "http://evil.example:8000", False),
        ("127.0.0.1:8000", "http://evil.example", False),
        ("127.0.0.1:8000", "http://127.0.0.1:9000", False),
        ("127.0.0.1:8000", "null", False),
        ("127.0.0.1.evil.example", None, False),
        ("", None, False),
        ("::1", None, None),
        ("[::1", None, None),
        ("[::1]evil.example", None, None),
        ("localhost:abc", None, None),
        ("localhost:80:80", None, None),
        ("user@localhost", None, None),
        ("localhost, evil.example", None, None),  # as two Host lines are
    ],
)
def test_without_keys_only_pages_of_its_own_may_use_a_server(
    host: str, origin: str | None, allowed: bool | None
) -> None:
    """allowed: None for a Host that is none."""
    names = {"allowed_hosts": ("mine.example",), "allowed_origins": ("https://page.example",)}
    headers = {"host": host} | ({} if origin is None else {"origin": origin})
    for settings, expected in (
        # 503: nothing is loaded.
        (AppSettings(**names), {True: 503, False: 403, None: 400}[allowed]),
        (AppSettings(**names, api_keys=("k",)), 401),
        (AppSettings(allowed_hosts=None), 503),
    ):
        assert ask(App(settings), "GET", "/v1/models", **headers).status == expected
        assert ask(App(settings), "GET", "/livez", **headers).status == 200


def test_a_server_whose_engine_drains_is_not_ready() -> None:
    async def scenario(pid: int, endpoint: str) -> None:
        async with app_of(endpoint) as (app, http):
            client = app.state.client
            assert client is not None
            assert (await http.get("/readyz")).status_code == 200
            params = SamplingParams(n=64, max_tokens=2000, ignore_eos=True)  # for long enough
            request = client.generate([5], params)
            await anext(request)
            os.kill(pid, signal.SIGTERM)
            while not client.is_draining:
                await asyncio.sleep(0)
            for path in ("/readyz", "/health"):
                answer = await http.get(path)
                assert answer.status_code == 503
                assert "takes no new requests" in answer.text
            await request.aclose()

    with forked.engine(DEMO_MODEL) as running:
        run(scenario(running.pid, running.endpoint))


@pytest.mark.parametrize(
    ("error", "status", "retry", "of_openai", "of_anthropic"),
    [
        (InvalidRequestError("no"), 400, None, "invalid_request_error", "invalid_request_error"),
        (EngineOverloadedError("no", 0.2), 429, b"1", "rate_limit_error", "rate_limit_error"),
        (EngineOverloadedError("no", 7.1), 429, b"8", "rate_limit_error", "rate_limit_error"),
        (EngineDrainingError("no", 3.0), 503, b"5", "server_error", "overloaded_error"),
        (EngineDeadError("no"), 503, b"1", "server_error", "overloaded_error"),
        (ProtocolError("no"), 500, None, "server_error", "api_error"),
    ],
)
def test_errors_of_the_client_have_a_status_and_a_kind(
    error: NanocoreError, status: int, retry: bytes | None, of_openai: str, of_anthropic: str
) -> None:
    found = http_error(error)
    assert (found.status, found.headers.get(b"retry-after")) == (status, retry)
    body = json.loads(openai_body(found))["error"]
    # What is said of sockets and engines is not for clients, who cannot help it.
    message = {EngineDeadError: ENGINE_GONE, EngineDrainingError: DRAINING}.get(type(error), "no")
    assert (body["type"], body["message"]) == (of_openai, message)
    whole = json.loads(anthropic_body(found))
    assert whole == {"type": "error", "error": {"type": of_anthropic, "message": message}}


def test_what_became_of_the_engine_is_for_the_log(caplog: pytest.LogCaptureFixture) -> None:
    found = http_error(EngineDeadError("nobody listens at ipc:///private/engine.sock"))
    assert "private" not in found.message
    assert caplog.messages == ["request failed: nobody listens at ipc:///private/engine.sock"]


def test_a_prompt_that_is_too_long_is_known_by_what_clients_look_for() -> None:
    """OpenAI's code, litellm's words, and Claude Code's."""
    found = http_error(ContextLengthError("the prompt has 9 tokens, which is too long"))
    body = json.loads(openai_body(found))["error"]
    assert (found.status, body["code"]) == (400, "context_length_exceeded")
    assert "this model's maximum context length is" in body["message"].lower()
    assert json.loads(anthropic_body(found))["error"]["message"].startswith("prompt is too long: ")
