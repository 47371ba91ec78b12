"""The engine's metrics: a fold of the event log, and counters and gauges that are read when asked.

Names, labels and buckets are vLLM's where it has them; counters are without `_total`, which
Prometheus' formats add. Belongs to the io thread, which reads what the step loop writes; each
number is whole, and numbers of one moment may differ by the current step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, get_args

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from nanocore.engine_core.log.event_log import RequestEntry, StepEntry
from nanocore.engine_core.log.history import History, RequestLife
from nanocore.engine_core.log.utilisation import Utilisation
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.protocol.messages import FinishReason
from nanocore.protocol.metrics import (
    CacheGroupStats,
    Metric,
    MetricSample,
    MetricType,
    RecentSteps,
    Stats,
)

ByLabels = Mapping[tuple[tuple[str, str], ...], float]
"""Numbers by labels, which are (name, value) pairs."""


class IoCounts(msgspec.Struct):
    """Counts of the io thread.

    is_paused: a session holds a pause. closed: sessions by reason.
    """

    num_clients: int = 0
    num_protocol_errors: int = 0
    backlog_bytes: int = 0
    is_draining: bool = False
    is_paused: bool = False
    closed: Mapping[str, int] = msgspec.field(default_factory=dict)


def stats_of(scheduler: Scheduler, is_paused: bool) -> Stats:
    """Stats of a scheduler; `completed` adds the io thread's."""
    counters, kv_cache, drafts = scheduler.counters, scheduler.kv_cache, scheduler.draft_counters
    return Stats(
        num_requests_running=scheduler.num_running,
        num_requests_waiting=scheduler.num_waiting + scheduler.num_unready,
        kv_cache_usage_perc=kv_cache.usage,
        num_blocks=kv_cache.num_blocks,
        num_free_blocks=kv_cache.num_free_blocks,
        prefix_cache_queries=kv_cache.stats.queries,
        prefix_cache_hits=kv_cache.stats.hits,
        prefix_cache_hit_rate=kv_cache.stats.hit_rate,
        num_preemptions=counters.num_preemptions,
        num_aborts=counters.num_aborts,
        prompt_tokens=counters.prompt_tokens,
        generation_tokens=counters.generation_tokens,
        num_steps=counters.num_steps,
        paused=is_paused,
        groups=[] if len(kv_cache.groups) == 1 else [
            CacheGroupStats(
                name=name,
                num_blocks=num_blocks,
                num_free_blocks=num_free,
                prefix_cache_lost_tokens=kv_cache.stats.lost_tokens[name],
            )
            for name, num_blocks, num_free in kv_cache.blocks_by_group
        ],
        spec_decode_num_drafts=drafts.num_drafts,
        spec_decode_num_draft_tokens=drafts.num_draft_tokens,
        spec_decode_num_accepted_tokens=drafts.num_accepted_tokens,
        spec_decode_num_accepted_tokens_per_pos=list(drafts.accepted_per_pos),
    )  # fmt: skip


def completed(stats: Stats, io: IoCounts) -> Stats:
    return msgspec.structs.replace(
        stats,
        num_clients=io.num_clients,
        num_protocol_errors=io.num_protocol_errors,
    )


class Histogram:
    """Counts values in buckets. bounds: inclusive upper bounds, ascending."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = [float(bound) for bound in bounds]
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0

    def observe(self, values: ArrayLike, times: ArrayLike | None = None) -> None:
        """Count each value once, or `times` times."""
        column = np.asarray(values, np.float64)
        weights = None if times is None else np.asarray(times, np.float64)
        buckets = np.searchsorted(self.bounds, column, side="left")
        counts = np.bincount(buckets, weights, len(self._counts))
        self._counts += counts.astype(np.int64)
        self._sum += float(column.sum() if weights is None else column @ weights)

    def sample(self) -> MetricSample:
        return MetricSample(self._sum, counts=self._counts.tolist())


class EngineMetrics:
    """Takes a scheduler's event log, which it alone does, for all folds of the io thread.

    Args:
        scheduler: whose log, counters and sizes are read.
        rejections: of requests that might not wait, by the limit.
        cache: labels that describe the KV cache.
        utilisation: what steps use of the machine, if it is known.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        rejections: Mapping[str, int],
        cache: Mapping[str, str],
        utilisation: Utilisation | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._rejections = rejections
        self._cache = cache
        self._history = History(scheduler)
        self._num_cached_tokens = 0  # of prompts of started requests
        self._num_by_reason: Counter[str] = Counter()  # ended requests
        self._utilisation = utilisation
        tokens = tuple(_one_two_five(scheduler.config.max_model_len))
        self._histograms = {
            name: Histogram(bounds or tokens) for name, (_, bounds) in HISTOGRAMS.items()
        }
        self._unfinished: dict[int, tuple[int, int]] = {}
        """Open samples and most tokens of requests with several samples, by their first handle."""

    def fold(self, at_least: int = 0) -> None:
        """Take what the step loop has logged since the last call, if it is so many entries."""
        if len(self._scheduler.log) < at_least:
            return
        entries = self._scheduler.log.take()
        self._observe_steps(entries.steps)
        self._observe_requests(entries.requests, self._history.take(entries))
        if self._utilisation is not None:
            self._utilisation.take(entries)

    def recent_steps(self, after: int, client: int, io: IoCounts) -> RecentSteps:
        """Return steps with numbers above `after`, and requests as this client may see them."""
        stats = self._stats(io)
        self.fold()
        return self._history.report(after, client, stats)

    def collect(self, io: IoCounts) -> list[Metric]:
        self.fold()
        values, metrics = self._values(io), []
        for name, (kind, text) in FAMILIES.items():
            if (value := values.get(name)) is None:
                continue
            by_labels = value if isinstance(value, Mapping) else {(): float(value)}
            samples = [MetricSample(number, list(labels)) for labels, number in by_labels.items()]
            metrics.append(Metric(name, kind, text, samples))
        for name, histogram in self._histograms.items():
            (text, _), sample = HISTOGRAMS[name], histogram.sample()
            metrics.append(Metric(name, "histogram", text, [sample], histogram.bounds))
        return metrics

    def _values(self, io: IoCounts) -> dict[str, float | ByLabels | None]:
        """Return values of gauges and counters by name."""
        stats, num_cached = self._stats(io), self._num_cached_tokens
        scheduler = self._scheduler
        waiting = {"capacity": scheduler.num_waiting, "deferred": scheduler.num_unready}
        sources = {"local_compute": stats.prompt_tokens, "local_cache_hit": num_cached}
        ends = dict.fromkeys(get_args(FinishReason), 0) | self._num_by_reason
        steps: dict[str, ByLabels] = {}
        if self._utilisation is not None:
            totals = self._utilisation.totals()
            steps = {
                name: _by("kind", {kind: float(totals[kind][name]) for kind in totals})
                for name in totals["decode"]
            }
        return msgspec.structs.asdict(stats) | {
            "client_backlog_bytes": io.backlog_bytes,
            "engine_draining": io.is_draining,
            "prompt_tokens": stats.prompt_tokens + num_cached,
            "prompt_tokens_cached": num_cached,
            "num_requests_waiting_by_reason": _by("reason", waiting),
            "prompt_tokens_by_source": _by("source", sources),
            "prompt_tokens_cached_by_source": _by("source", {"device": num_cached}),
            "request_success": _by("finished_reason", ends),
            "admission_rejections": _by("reason", self._rejections),
            "sessions_closed": _by("reason", io.closed),
            "spec_decode_num_accepted_tokens_per_pos": _by(
                "position", dict(enumerate(stats.spec_decode_num_accepted_tokens_per_pos))
            )
            or None,
            "cache_config_info": {tuple(self._cache.items()): 1},
            "prefix_cache_lost_tokens": _by(
                "group", {one.name: one.prefix_cache_lost_tokens for one in stats.groups}
            )
            or None,
            **steps,
        }

    def _stats(self, io: IoCounts) -> Stats:
        return completed(stats_of(self._scheduler, io.is_paused), io)

    def _observe_steps(self, steps: Sequence[StepEntry]) -> None:
        if not steps:
            return
        histograms = self._histograms
        histograms["iteration_tokens_total"].observe([step.num_tokens for step in steps])
        intervals = [step.intervals for step in steps if step.intervals is not None]
        alike = [one for one in intervals if isinstance(one, tuple)]
        columns = [one for one in intervals if not isinstance(one, tuple)]
        latencies = histograms["inter_token_latency_seconds"]
        if alike:
            seconds, num_rows = zip(*alike, strict=True)
            latencies.observe(seconds, num_rows)
        if columns:
            latencies.observe(np.concatenate(columns))

    def _observe_requests(
        self, entries: Sequence[RequestEntry], ended: Sequence[RequestLife]
    ) -> None:
        found: defaultdict[str, list[float]] = defaultdict(list)
        for entry in entries:
            if entry.kind in ("first_token", "embedding"):
                self._num_cached_tokens += entry.request.num_cached_tokens or 0
            if entry.kind == "first_token":
                seconds = entry.at_s - entry.request.received_s
                found["time_to_first_token_seconds"].append(seconds)
        for life in ended:
            self._num_by_reason[life.reason or ""] += 1
            for name, value in self._values_of(life):
                found[name].append(value)
        for name, values in found.items():
            self._histograms[name].observe(values)

    def _values_of(self, life: RequestLife) -> Iterator[tuple[str, float]]:
        """Values of a request that has ended, by histogram.

        One that never ran, or had no token, has no times of the phases that it missed.
        """
        request, at_s = life.request, life.at_s
        num_outputs = max(request.last_num_tokens - request.num_submitted_tokens, 0)
        for name, (start, end) in TIMES.items():
            if start in at_s and end in at_s:
                yield name, at_s[end] - at_s[start]
        if num_outputs > 1 and "first_token" in at_s:
            decode_s = at_s["last_token"] - at_s["first_token"]
            yield "request_time_per_output_token_seconds", decode_s / (num_outputs - 1)
        yield "request_num_preemptions", life.num_preemptions
        yield "request_prompt_tokens", request.num_prompt_tokens
        yield "request_generation_tokens", num_outputs
        yield "request_params_max_tokens", request.max_num_tokens - request.num_prompt_tokens
        if request.num_cached_tokens is not None:
            num_computed = request.num_prompt_tokens - request.num_cached_tokens
            yield "request_prefill_kv_computed_tokens", num_computed
        # Samples are one request with n, which has ended with the last of them.
        first, num_samples = request.handle - request.sample, request.sampling.n
        num_left, most = self._unfinished.pop(first, (num_samples, 0))
        most = max(most, num_outputs)
        if num_left > 1:
            self._unfinished[first] = num_left - 1, most
        else:
            yield "request_max_num_generation_tokens", most
            yield "request_params_n", num_samples


def _by(label: str, values: Mapping[Any, float]) -> ByLabels:
    return {((label, str(key)),): value for key, value in values.items()}


FAMILIES: Final[dict[str, tuple[MetricType, str]]] = {
    "num_requests_running": ("gauge", "Running requests."),
    "num_requests_waiting": ("gauge", "Waiting requests."),
    "kv_cache_usage_perc": ("gauge", "Share of KV cache blocks in use, from 0 to 1."),
    "num_blocks": ("gauge", "Blocks of the KV cache."),
    "num_free_blocks": ("gauge", "Free blocks of the KV cache."),
    "num_clients": ("gauge", "Open sessions."),
    "client_backlog_bytes": ("gauge", "Bytes of output that clients have not read."),
    "engine_draining": ("gauge", "1 while the engine drains and refuses new requests, else 0."),
    "prefix_cache_queries": ("counter", "Tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("counter", "Tokens found in the prefix cache."),
    "prefix_cache_lost_tokens": (
        "counter", "Tokens of cached prefixes that a group of layers had let go of.",
    ),
    "num_preemptions": ("counter", "Preemptions: a running request lost its row and blocks."),
    "prompt_tokens": ("counter", "Prompt tokens computed or found in the prefix cache."),
    "prompt_tokens_cached": (
        "counter", "Prompt tokens found in the prefix cache by started requests.",
    ),
    "generation_tokens": ("counter", "Generated tokens."),
    "num_steps": ("counter", "Steps."),
    "spec_decode_num_drafts": ("counter", "Times that a request computed drafts in a step."),
    "spec_decode_num_draft_tokens": ("counter", "Draft tokens computed."),
    "spec_decode_num_accepted_tokens": ("counter", "Draft tokens that were right."),
    "spec_decode_num_accepted_tokens_per_pos": (
        "counter", "Draft tokens that were right, by position in the draft.",
    ),
    "num_aborts": ("counter", "Requests ended by their client or by their timeout."),
    "num_protocol_errors": ("counter", "Messages that violated the protocol."),
    "num_requests_waiting_by_reason": (
        "gauge", "Waiting requests: 'capacity' for the scheduler, 'deferred' for their grammar.",
    ),
    "prompt_tokens_by_source": ("counter", "Prompt tokens by the source of their KV."),
    "prompt_tokens_cached_by_source": (
        "counter", "Cached prompt tokens by the location of the cache.",
    ),
    "request_success": ("counter", "Finished requests by reason."),
    "admission_rejections": (
        "counter", "Requests refused because the queue was full, by limit.",
    ),
    "sessions_closed": ("counter", "Closed sessions by reason."),
    "cache_config_info": ("gauge", "Configuration of the KV cache, in labels."),
    # By kind of step, "decode" or "prefill"; see `StepTotals.numbers`.
    "steps": ("counter", "Steps; prefill if a prompt is computed, else decode."),
    "step_tokens": ("counter", "Tokens computed by steps."),
    "step_seconds": ("counter", "Seconds spent in steps."),
    "step_read_bytes": ("counter", "Bytes of weights and KV cache read by steps."),
    "step_flops": ("counter", "Floating point operations of matrix products in steps."),
    "machine_bytes_per_second": ("gauge", "Measured bandwidth of memory."),
    "machine_flops_per_second": ("gauge", "Measured arithmetic throughput of the machine."),
}  # fmt: skip
"""Gauges and counters: type and help by name."""

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


HISTOGRAMS: Final[dict[str, tuple[str, tuple[float, ...] | None]]] = {
    "time_to_first_token_seconds": ("Time to a request's first token.", FIRST_TOKEN_BOUNDS),
    "inter_token_latency_seconds": ("Time between two outputs of a request.", TOKEN_BOUNDS),
    "request_time_per_output_token_seconds": (
        "A request's time after its first token, divided by its further tokens.", TOKEN_BOUNDS,
    ),
    "e2e_request_latency_seconds": ("Time to a request's end.", LATENCY_BOUNDS),
    "request_queue_time_seconds": ("Time in the queue until first admitted.", LATENCY_BOUNDS),
    "request_inference_time_seconds": ("Time from admission to the last token.", LATENCY_BOUNDS),
    "request_prefill_time_seconds": ("Time from admission to the first token.", LATENCY_BOUNDS),
    "request_decode_time_seconds": ("Time from the first token to the last.", LATENCY_BOUNDS),
    "iteration_tokens_total": ("Tokens computed by a step.", STEP_TOKENS_BOUNDS),
    "request_prompt_tokens": ("Prompt tokens of a request.", None),
    "request_generation_tokens": ("Tokens generated for a request.", None),
    "request_max_num_generation_tokens": ("Tokens of a request's longest sample.", None),
    "request_params_max_tokens": ("Limit of output tokens of a request (max_tokens).", None),
    "request_params_n": ("Samples of a request (n).", NUM_SAMPLES_BOUNDS),
    "request_num_preemptions": ("Preemptions of a request.", PREEMPTIONS_BOUNDS),
    "request_prefill_kv_computed_tokens": ("Uncached prompt tokens of a request.", None),
}  # fmt: skip
"""(help, bounds) by name. None stands for 1, 2, 5, 10 and so on, up to the model's length."""

TIMES: Final = {
    "e2e_request_latency_seconds": ("received", "ended"),
    "request_queue_time_seconds": ("queued", "prefill"),
    "request_inference_time_seconds": ("prefill", "last_token"),
    "request_prefill_time_seconds": ("prefill", "first_token"),
    "request_decode_time_seconds": ("first_token", "last_token"),
}
"""Between which points of a request's life each passes; see `RequestLife.at_s`."""


def _one_two_five(most: int) -> Iterator[int]:
    """Yield 1, 2, 5, 10, 20, 50 and so on."""
    unit = 1
    while True:
        for factor in (1, 2, 5):
            if factor * unit > most:
                return
            yield factor * unit
        unit *= 10
