"""OpenTelemetry spans by its conventions for generative AI: one for each request, at its end.

Imported only if spans are enabled. The SDK's own thread exports them and drops those that its queue
cannot hold. The SDK's environment variables apply, such as OTEL_SERVICE_NAME.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
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
            attributes=_attributes(record, server, end_s),
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
) -> dict[str, AttributeValue]:
    usage = record.usage
    host, port = (None, None) if server is None else server
    found: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.id": record.request_id,
        "gen_ai.latency.e2e": end_s - record.start_s,
        "server.address": host,
        "server.port": port,
        "http.response.status_code": record.status or None,
        "error.type": record.error,
        "gen_ai.request.model": record.request_model,
        "gen_ai.response.model": record.response_model,
    }
    if record.params is not None:
        found |= {"gen_ai.request.stream": record.is_stream, **_params(record.params)}
    if record.first_token_s is not None:
        time_to_first_s = record.first_token_s - record.start_s
        found["gen_ai.response.time_to_first_chunk"] = time_to_first_s
        found["gen_ai.latency.time_to_first_token"] = time_to_first_s
    if usage.num_prompt_tokens:
        found["gen_ai.usage.input_tokens"] = usage.num_prompt_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = usage.num_cached_tokens
    if record.finish_reasons:
        found["gen_ai.usage.output_tokens"] = usage.num_output_tokens
        found["gen_ai.usage.reasoning.output_tokens"] = usage.num_reasoning_tokens
        found["gen_ai.response.finish_reasons"] = record.finish_reasons
    return {name: value for name, value in found.items() if value is not None}


def _params(params: SamplingParams) -> dict[str, float | None]:
    return {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.choice.count": params.n if params.n != 1 else None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
    }
