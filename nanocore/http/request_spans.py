"""OpenTelemetry spans by its conventions for generative AI: one for each request, at its end.

Imported only if spans are enabled. The SDK's own thread exports them and drops those that its queue
cannot hold. The SDK's environment variables apply, such as OTEL_SERVICE_NAME.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from nanocore import __version__
from nanocore.client import SamplingParams
from nanocore.http.request_record import RequestRecord

PROVIDER: Final = "nanocore"
CLOSE_TIMEOUT_S: Final = 5.0
"""Limit for sending the last spans."""


class SpanWriter:
    """Writes records as spans of a provider. clock: the records' monotonic clock."""

    def __init__(
        self, provider: TracerProvider, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(PROVIDER, __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._clock = clock

    def write(
        self, record: RequestRecord, server: tuple[str, int] | None, parent: Mapping[str, str]
    ) -> None:
        """Write the span of a finished request.

        Args:
            record: the request's.
            server: host and port.
            parent: headers `traceparent` and `tracestate`.
        """
        end_s = self._clock()
        span = self._tracer.start_span(
            " ".join(filter(None, (record.operation, record.request_model))),
            context=self._propagator.extract(parent),
            kind=SpanKind.SERVER,
            attributes=dict(_attributes(record, server, end_s)),
            start_time=record.start_ns,
        )
        if record.status >= 500 or "error" in record.finish_reasons:
            span.set_status(StatusCode.ERROR)
        span.end(record.start_ns + round((end_s - record.start_s) * 1e9))

    async def close(self) -> None:
        """Send the remaining spans, within `CLOSE_TIMEOUT_S`."""
        # In a daemon thread: shutdown may hang on a collector that does not respond.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSE_TIMEOUT_S)


def otlp_spans(endpoint: str) -> SpanWriter:
    """Return a writer that sends spans to this URL, by OTLP over HTTP."""
    named = Resource({"service.name": PROVIDER, "service.version": __version__})
    resource = named.merge(OTELResourceDetector().detect())  # the environment takes precedence
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return SpanWriter(provider)


def _attributes(
    record: RequestRecord, server: tuple[str, int] | None, end_s: float
) -> Iterator[tuple[str, AttributeValue]]:
    yield "gen_ai.operation.name", record.operation or ""
    yield "gen_ai.provider.name", PROVIDER
    yield "gen_ai.request.id", record.request_id
    yield "gen_ai.latency.e2e", end_s - record.start_s
    if server is not None:
        yield "server.address", server[0]
        yield "server.port", server[1]
    if record.status:
        yield "http.response.status_code", record.status
    if record.error is not None:
        yield "error.type", record.error
    if record.request_model is not None:
        yield "gen_ai.request.model", record.request_model
    if record.response_model is not None:
        yield "gen_ai.response.model", record.response_model
    if record.params is not None:
        yield "gen_ai.request.stream", record.is_stream
        yield from _params(record.params)
    if record.first_token_s is not None:
        time_to_first_s = record.first_token_s - record.start_s
        yield "gen_ai.response.time_to_first_chunk", time_to_first_s
        yield "gen_ai.latency.time_to_first_token", time_to_first_s
    if record.usage.num_prompt_tokens:
        yield "gen_ai.usage.input_tokens", record.usage.num_prompt_tokens
        yield "gen_ai.usage.cache_read.input_tokens", record.usage.num_cached_tokens
    if record.finish_reasons:
        yield "gen_ai.usage.output_tokens", record.usage.num_output_tokens
        yield "gen_ai.usage.reasoning.output_tokens", record.usage.num_reasoning_tokens
        yield "gen_ai.response.finish_reasons", record.finish_reasons


def _params(params: SamplingParams) -> Iterator[tuple[str, AttributeValue]]:
    yield "gen_ai.request.temperature", params.temperature
    yield "gen_ai.request.top_p", params.top_p
    if params.top_k > 0:
        yield "gen_ai.request.top_k", params.top_k
    if params.max_tokens is not None:
        yield "gen_ai.request.max_tokens", params.max_tokens
    if params.seed is not None:
        yield "gen_ai.request.seed", params.seed
    if params.n != 1:
        yield "gen_ai.request.choice.count", params.n
    if params.presence_penalty:
        yield "gen_ai.request.presence_penalty", params.presence_penalty
    if params.frequency_penalty:
        yield "gen_ai.request.frequency_penalty", params.frequency_penalty
