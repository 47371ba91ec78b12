"""Spans of OpenTelemetry: one for each request at its end, and nothing unless it is asked for."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import httpx2 as httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from nanocore.client.chat.events import Finished, Usage
from nanocore.http import request_spans as spans
from nanocore.http.app import App
from nanocore.http.request_record import RequestRecord
from nanocore.http.request_spans import SpanWriter, otlp_spans
from nanocore.http.server.service import HttpService
from nanocore.http.server_settings import AppSettings, ServerSettings
from tests.client.running import run
from tests.http.asgi import Connection, app_of, scope

SECRET: Final = "marzipan"
MESSAGES: Final = [{"role": "user", "content": f"Is {SECRET} 1 + 2?"}]
CHAT: Final = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 5}
TRACE_ID: Final = 0x0AF7651916CD43DD8448EB211C80319C
PARENT: Final = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


def recorded(
    endpoint: str, calls: Callable[[App, httpx.AsyncClient], Awaitable[Any]]
) -> list[ReadableSpan]:
    """The spans of these calls, in the order of their ends."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def call() -> None:
        async with app_of(endpoint, served_model_names=("demo",)) as (app, http):
            app.state.spans = SpanWriter(provider)
            await calls(app, http)

    run(call())
    return list(exporter.get_finished_spans())


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_request_is_one_span_by_the_conventions_with_its_callers_as_parent(
    demo_endpoint: str,
) -> None:
    answers: list[Any] = []

    async def calls(_: App, http: httpx.AsyncClient) -> None:
        headers = PARENT | {"x-request-id": "mine"}
        body = CHAT | {"top_p": 0.5, "ignore_eos": True}
        answer = await http.post("/v1/chat/completions", json=body, headers=headers)
        answers.append(answer.json())

    (span,) = recorded(demo_endpoint, calls)
    assert (span.name, span.kind) == ("chat demo", SpanKind.SERVER)
    assert span.context is not None
    assert span.parent is not None
    assert (span.context.trace_id, span.parent.span_id) == (TRACE_ID, 0xB7AD6B7169203331)
    assert span.status.status_code is StatusCode.UNSET
    found = attributes(span)
    first_s, whole_s = found.pop("gen_ai.latency.time_to_first_token"), found["gen_ai.latency.e2e"]
    assert found.pop("gen_ai.response.time_to_first_chunk") == first_s
    assert 0 < first_s <= found.pop("gen_ai.latency.e2e")
    assert span.start_time is not None
    assert span.end_time == span.start_time + round(whole_s * 1e9)
    usage = answers[0]["usage"]
    cached = found.pop("gen_ai.usage.cache_read.input_tokens")
    assert cached == usage["prompt_tokens_details"]["cached_tokens"]
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "nanocore",
        "gen_ai.request.id": "mine",
        "gen_ai.request.model": "demo",
        "gen_ai.response.model": "demo",
        "gen_ai.request.stream": False,
        "gen_ai.request.temperature": 0,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.reasoning.output_tokens": 0,
        "gen_ai.response.finish_reasons": ("length",),
        "http.response.status_code": 200,
        "server.address": "test",
    }


@pytest.mark.parametrize(
    ("path", "body", "name", "num_finished"),
    [
        ("/v1/chat/completions", CHAT | {"stream": True}, "chat demo", 1),
        ("/v1/completions", {"model": "demo", "prompt": [SECRET, "7 8"], "n": 2, "max_tokens": 3},
         "text_completion demo", 4),
        ("/v1/responses", {"input": SECRET, "max_output_tokens": 3}, "chat", 1),
        ("/v1/messages", {"model": "demo", "messages": MESSAGES, "max_tokens": 3}, "chat demo", 1),
        ("/v1/embeddings", {"model": "demo", "input": [SECRET, "b"]}, "embeddings demo", 0),
    ],
)  # fmt: skip
def test_every_endpoint_that_generates_has_spans_and_none_says_what_was_said(
    demo_endpoint: str, path: str, body: dict[str, Any], name: str, num_finished: int
) -> None:
    async def calls(_: App, http: httpx.AsyncClient) -> None:
        assert (await http.post(path, json=body)).status_code == 200

    (span,) = recorded(demo_endpoint, calls)
    found = attributes(span)
    assert span.name == name
    assert found["gen_ai.response.model"] == "demo"
    assert found["gen_ai.usage.input_tokens"] > 1
    assert len(found.get("gen_ai.response.finish_reasons", ())) == num_finished
    assert ("gen_ai.usage.output_tokens" in found) == (num_finished > 0)
    assert found.get("gen_ai.request.choice.count") == body.get("n")
    assert SECRET not in span.to_json()


def test_a_refusal_has_its_error_and_other_requests_have_no_span(demo_endpoint: str) -> None:
    async def calls(_: App, http: httpx.AsyncClient) -> None:
        await http.post("/v1/chat/completions", json=CHAT | {"model": "other"})
        await http.post("/v1/completions", content=b"{")
        await http.post("/v1/completions", json={"prompt": [1] * 3000, "max_tokens": 1})
        await http.post("/tokenize", json={"prompt": "a"})
        await http.get("/v1/models")
        await http.get("/nowhere")

    found = [(span.name, attributes(span)) for span in recorded(demo_endpoint, calls)]
    assert [
        (name, of["error.type"], of["http.response.status_code"]) for name, of in found
    ] == [
        ("chat other", "model_not_found", 404),
        ("text_completion", "400", 400),
        ("text_completion", "context_length_exceeded", 400),
    ]  # fmt: skip
    assert all("gen_ai.usage.input_tokens" not in of for _, of in found)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_told_of_too(demo_endpoint: str, stream: bool) -> None:
    async def calls(app: App, _: httpx.AsyncClient) -> None:
        body = CHAT | {"stream": stream, "max_tokens": 1500, "ignore_eos": True}
        connection = Connection(json.dumps(body).encode())
        request = scope("POST", "/v1/chat/completions", content_type="application/json")
        running = asyncio.create_task(app(request, connection.receive, connection.send))
        while not app.state.deliveries.is_busy:
            await asyncio.sleep(0)
        connection.leave()
        await running

    (span,) = recorded(demo_endpoint, calls)
    assert attributes(span)["error.type"] == "disconnected"
    assert span.status.status_code is StatusCode.UNSET


def test_a_failure_of_ours_is_an_error_of_the_span() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    writer = SpanWriter(provider)
    unavailable, died = RequestRecord("a"), RequestRecord("b")
    unavailable.status = 503
    died.note_events([Finished("error", Usage(3, 0, 2, 0), None, "rank 1 died")], _Answer())
    for record in (unavailable, died):
        writer.write(record, ("::1", 80), {"traceparent": "nonsense"})
    for span in exporter.get_finished_spans():
        assert span.status.status_code is StatusCode.ERROR
        assert span.parent is None
        assert "rank 1" not in span.to_json()


class _Answer:
    first_token_s = None


class _Collector(BaseHTTPRequestHandler):
    """Keeps what is posted."""

    received: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        type(self).received.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    received: list[tuple[str, bytes]] = []
    handler = type("Collector", (_Collector,), {"received": received})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", received
        finally:
            server.shutdown()
            thread.join()


def test_spans_that_wait_at_the_end_reach_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")

    async def serve(url: str) -> None:
        settings = AppSettings(otlp_traces_endpoint=f"{url}/v1/traces")
        service = HttpService(settings, ServerSettings())
        await service.start([])
        state = service._app.state
        assert state.spans is not None
        record = RequestRecord("r")
        record.operation = "chat"
        state.spans.write(record, None, {})
        await service.close()
        assert state.spans is None

    with collector() as (url, received):
        run(serve(url))
    ((path, body),) = received
    assert path == "/v1/traces"
    (of_resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    named = {a.key: a.value.string_value for a in of_resource.resource.attributes}
    assert named["service.name"] == "ours"
    assert [span.name for span in of_resource.scope_spans[0].spans] == ["chat"]


def test_a_collector_that_does_not_answer_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "CLOSE_TIMEOUT_S", 0.01)
    writer = otlp_spans("http://127.0.0.1:9/v1/traces")
    answered = threading.Event()
    monkeypatch.setattr(writer._provider, "shutdown", answered.wait)
    try:
        run(writer.close())
    finally:
        answered.set()


def test_nothing_of_opentelemetry_is_imported_unless_it_is_asked_for() -> None:
    script = (
        "import sys, asyncio\n"
        "from nanocore.http.server.service import HttpService\n"
        "from nanocore.http.server_settings import ServerSettings\n"
        "from nanocore.http.server_settings import AppSettings\n"
        "import nanocore.cli.serve.supervisor, nanocore.cli.serve.http_worker\n"
        "async def serve():\n"
        "    service = HttpService(AppSettings(), ServerSettings())\n"
        "    await service.start([])\n"
        "    await service.close()\n"
        "asyncio.run(serve())\n"
        "print([name for name in sys.modules if 'opentelemetry' in name])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
