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
    "num_requests_running": "Requests that run.",
    "num_requests_waiting": "Requests that wait to run.",
    "kv_cache_usage_perc": "Share of the KV cache's blocks that are in use; 1 is all of them.",
    "num_blocks": "Blocks of the KV cache.",
    "num_free_blocks": "Blocks of the KV cache that are free.",
    "num_clients": "Sessions with the engine.",
    "client_backlog_bytes": "Bytes that wait for clients that do not read them.",
    "engine_draining": "1 while the engine takes no new requests because it is to end, else 0.",
}
COUNTERS: Final = {
    "prefix_cache_queries": "Tokens that were looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens that were found in the prefix cache.",
    "num_preemptions": "Times that a running request lost its row and blocks.",
    "prompt_tokens": "Prompt tokens, as they are computed, or found in the prefix cache.",
    "prompt_tokens_cached": "Prompt tokens found in the prefix cache by requests that have begun.",
    "generation_tokens": "Tokens that were generated.",
    "num_steps": "Steps.",
    "num_aborts": "Requests that were ended by their clients, or by their time.",
    "num_protocol_errors": "Messages that broke the protocol.",
}
BY_LABEL: Final[dict[str, tuple[MetricType, str]]] = {
    "num_requests_waiting_by_reason": (
        "gauge",
        "Requests that wait: 'capacity' to be scheduled, 'deferred' for their structured output.",
    ),
    "prompt_tokens_by_source": ("counter", "Prompt tokens by where their KV came from."),
    "prompt_tokens_cached_by_source": ("counter", "Prompt tokens found in a cache, by its place."),
    "request_success": ("counter", "Requests that have ended, by how."),
    "admission_rejections": ("counter", "Requests that the waiting queue had no room for, by why."),
    "sessions_closed": ("counter", "Sessions that have ended, by how."),
    "cache_config_info": ("gauge", "The KV cache, in labels."),
}


STEPS: Final[dict[str, tuple[MetricType, str, str]]] = {
    "steps": ("counter", "steps", "Steps, by whether all rows decode or a prompt is computed."),
    "step_tokens": ("counter", "tokens", "Tokens that steps computed."),
    "step_seconds": ("counter", "seconds", "Seconds that the step loop was busy with steps."),
    "step_read_bytes": ("counter", "bytes", "Bytes of weights and KV cache that steps read."),
    "step_flops": ("counter", "flops", "Floating point operations of steps' matrices."),
    "machine_bytes_per_second": (
        "gauge", "peak_bytes_per_second", "What memory and caches give to steps of this size.",
    ),
    "machine_flops_per_second": (
        "gauge", "peak_flops_per_second", "What the machine multiplies, as measured.",
    ),
}  # fmt: skip
"""Metrics by kind of step, "decode" or "prefill", with their names in `Utilisation.totals`."""


def histograms(max_model_len: int) -> dict[str, tuple[str, tuple[float, ...]]]:
    """(help, bounds) by name; times are in seconds, a request's since its SUBMIT."""
    tokens = tuple(_one_two_five(max_model_len))
    return {
        "time_to_first_token_seconds": ("Until a request's first token.", FIRST_TOKEN_BOUNDS),
        "inter_token_latency_seconds": ("Between two results of a request.", TOKEN_BOUNDS),
        "request_time_per_output_token_seconds": (
            "A request's time after its first token, by the tokens that came then.",
            TOKEN_BOUNDS,
        ),
        "e2e_request_latency_seconds": ("Until a request's end.", LATENCY_BOUNDS),
        "request_queue_time_seconds": ("In the queue, until first admitted.", LATENCY_BOUNDS),
        "request_inference_time_seconds": ("From admission to the last token.", LATENCY_BOUNDS),
        "request_prefill_time_seconds": ("From admission to the first token.", LATENCY_BOUNDS),
        "request_decode_time_seconds": ("From the first token to the last.", LATENCY_BOUNDS),
        "iteration_tokens_total": ("Tokens that a step computed.", STEP_TOKENS_BOUNDS),
        "request_prompt_tokens": ("Prompt tokens of a request.", tokens),
        "request_generation_tokens": ("Tokens generated for a request.", tokens),
        "request_max_num_generation_tokens": ("Tokens of a request's longest sample.", tokens),
        "request_params_max_tokens": ("Tokens that a request might have had.", tokens),
        "request_params_n": ("Samples that a request was to have.", NUM_SAMPLES_BOUNDS),
        "request_num_preemptions": ("Preemptions of a request.", PREEMPTIONS_BOUNDS),
        "request_prefill_kv_computed_tokens": (
            "Prompt tokens of a request that were not cached.",
            tokens,
        ),
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
