"""The engine's metrics by name; names, labels and buckets are vLLM's where it has them.

Counters are without `_total`, which Prometheus' formats add.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from nanocore.protocol.metrics import MetricType

LATENCY_BOUNDS: Final = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
FIRST_TOKEN_BOUNDS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
TOKEN_BOUNDS: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
STEP_TOKENS_BOUNDS: Final = tuple(2**i for i in range(15) if i not in (1, 2))
NUM_SAMPLES_BOUNDS: Final = (1, 2, 5, 10, 20)
PREEMPTIONS_BOUNDS: Final = (1, 2, 3, 4, 5, 10, 20)

GAUGES: Final = {
    "num_requests_running": "Running requests.",
    "num_requests_waiting": "Waiting requests.",
    "kv_cache_usage_perc": "Share of KV cache blocks in use, from 0 to 1.",
    "num_blocks": "Blocks of the KV cache.",
    "num_free_blocks": "Free blocks of the KV cache.",
    "num_clients": "Open sessions.",
    "client_backlog_bytes": "Bytes of output that clients have not read.",
    "engine_draining": "1 while the engine drains and refuses new requests, else 0.",
}
COUNTERS: Final = {
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
    "num_preemptions": "Preemptions: a running request lost its row and blocks.",
    "prompt_tokens": "Prompt tokens computed or found in the prefix cache.",
    "prompt_tokens_cached": "Prompt tokens found in the prefix cache by started requests.",
    "generation_tokens": "Generated tokens.",
    "num_steps": "Steps.",
    "num_aborts": "Requests ended by their client or by their timeout.",
    "num_protocol_errors": "Messages that violated the protocol.",
}
BY_LABEL: Final[dict[str, tuple[MetricType, str]]] = {
    "num_requests_waiting_by_reason": (
        "gauge",
        "Waiting requests: 'capacity' for the scheduler, 'deferred' for their grammar.",
    ),
    "prompt_tokens_by_source": ("counter", "Prompt tokens by the source of their KV."),
    "prompt_tokens_cached_by_source": (
        "counter",
        "Cached prompt tokens by the location of the cache.",
    ),
    "request_success": ("counter", "Finished requests by reason."),
    "admission_rejections": ("counter", "Requests refused because the queue was full, by limit."),
    "sessions_closed": ("counter", "Closed sessions by reason."),
    "cache_config_info": ("gauge", "Configuration of the KV cache, in labels."),
}


STEPS: Final[dict[str, tuple[MetricType, str, str]]] = {
    "steps": ("counter", "steps", "Steps; prefill if a prompt is computed, else decode."),
    "step_tokens": ("counter", "tokens", "Tokens computed by steps."),
    "step_seconds": ("counter", "seconds", "Seconds spent in steps."),
    "step_read_bytes": ("counter", "bytes", "Bytes of weights and KV cache read by steps."),
    "step_flops": ("counter", "flops", "Floating point operations of matrix products in steps."),
    "machine_bytes_per_second": (
        "gauge", "peak_bytes_per_second", "Measured bandwidth for steps of this size.",
    ),
    "machine_flops_per_second": (
        "gauge", "peak_flops_per_second", "Measured arithmetic throughput of the machine.",
    ),
}  # fmt: skip
"""Metrics by kind of step, "decode" or "prefill", with their names in `Utilisation.totals`."""


def histograms(max_model_len: int) -> dict[str, tuple[str, tuple[float, ...]]]:
    """(help, bounds) by name; times are in seconds, a request's since its SUBMIT."""
    tokens = tuple(_one_two_five(max_model_len))
    return {
        "time_to_first_token_seconds": ("Time to a request's first token.", FIRST_TOKEN_BOUNDS),
        "inter_token_latency_seconds": ("Time between two outputs of a request.", TOKEN_BOUNDS),
        "request_time_per_output_token_seconds": (
            "A request's time after its first token, divided by its further tokens.",
            TOKEN_BOUNDS,
        ),
        "e2e_request_latency_seconds": ("Time to a request's end.", LATENCY_BOUNDS),
        "request_queue_time_seconds": ("Time in the queue until first admitted.", LATENCY_BOUNDS),
        "request_inference_time_seconds": (
            "Time from admission to the last token.",
            LATENCY_BOUNDS,
        ),
        "request_prefill_time_seconds": ("Time from admission to the first token.", LATENCY_BOUNDS),
        "request_decode_time_seconds": ("Time from the first token to the last.", LATENCY_BOUNDS),
        "iteration_tokens_total": ("Tokens computed by a step.", STEP_TOKENS_BOUNDS),
        "request_prompt_tokens": ("Prompt tokens of a request.", tokens),
        "request_generation_tokens": ("Tokens generated for a request.", tokens),
        "request_max_num_generation_tokens": ("Tokens of a request's longest sample.", tokens),
        "request_params_max_tokens": ("Limit of output tokens of a request (max_tokens).", tokens),
        "request_params_n": ("Samples of a request (n).", NUM_SAMPLES_BOUNDS),
        "request_num_preemptions": ("Preemptions of a request.", PREEMPTIONS_BOUNDS),
        "request_prefill_kv_computed_tokens": ("Uncached prompt tokens of a request.", tokens),
    }


def _one_two_five(most: int) -> Iterator[int]:
    """Yield 1, 2, 5, 10, 20, 50 and so on."""
    unit = 1
    while True:
        for factor in (1, 2, 5):
            if factor * unit > most:
                return
            yield factor * unit
        unit *= 10
