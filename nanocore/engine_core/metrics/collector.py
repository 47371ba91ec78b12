"""Collects the engine's metrics from what the step loop has noted.

Belongs to the io thread, which reads what the step loop writes; each number is whole, and numbers
of one moment may differ by the current step. The step_log is emptied often, so that it stays small
whether or not anybody asks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar, get_args

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from nanocore.engine_core.metrics import families
from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.requests.step_log import EndedRequest, StepEntry
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.engine_core.utilisation import Utilisation
from nanocore.protocol.messages import FinishReason
from nanocore.protocol.metrics import (
    Metric,
    MetricSample,
    MetricType,
    RecentSteps,
    RequestPhases,
    Stats,
    StepColumns,
)


class IoCounts(msgspec.Struct):
    """Counts of the io thread.

    num_compiling: requests that wait for their structured output. num_aborts: of those.
    is_paused: a session holds a pause. closed: sessions by reason.
    """

    num_clients: int = 0
    num_protocol_errors: int = 0
    num_compiling: int = 0
    num_aborts: int = 0
    backlog_bytes: int = 0
    is_draining: bool = False
    is_paused: bool = False
    closed: Mapping[str, int] = msgspec.field(default_factory=dict)


def stats_of(scheduler: Scheduler, is_paused: bool) -> Stats:
    """Stats of a scheduler; `completed` adds the io thread's."""
    counters, kv_cache = scheduler.counters, scheduler.kv_cache
    return Stats(
        num_requests_running=scheduler.num_running,
        num_requests_waiting=scheduler.num_waiting,
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
    )


def completed(stats: Stats, io: IoCounts) -> Stats:
    return msgspec.structs.replace(
        stats,
        num_requests_waiting=stats.num_requests_waiting + io.num_compiling,
        num_aborts=stats.num_aborts + io.num_aborts,
        num_clients=io.num_clients,
        num_protocol_errors=io.num_protocol_errors,
    )


MAX_STEPS: Final = 512
MAX_OPEN: Final = 256
MAX_ENDED: Final = 64


class Recent:
    """Recent steps and requests, for the live page and `nanocore top`. The collector fills steps
    and ended.

    Phases of open requests are read only when asked, so memory does not depend on readers. The step
    loop goes on meanwhile; the result may differ by the current step.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.steps: deque[StepEntry] = deque(maxlen=MAX_STEPS)
        self.ended: deque[EndedRequest] = deque(maxlen=MAX_ENDED)

    def tell(
        self, after: int, client: int, open_requests: Sequence[Request], stats: Stats
    ) -> RecentSteps:
        """Return steps with numbers above `after`, and requests; only their own client gets their
        ids.

        open_requests: as they came; of many those that run, and then the newest.
        """
        ways = {one.handle: _ended_way(one, client) for one in self.ended}
        for request in _most_telling(open_requests):
            if request.handle not in ways:
                ways[request.handle] = self._open_way(request, client)
        return RecentSteps(
            now_s=self._scheduler.clock(),
            stats=stats,
            steps=self._columns([step for step in self.steps if step.number > after]),
            requests=list(ways.values()),
        )

    def _columns(self, steps: Sequence[StepEntry]) -> StepColumns:
        num_blocks = self._scheduler.kv_cache.num_blocks
        return StepColumns(
            number=[step.number for step in steps],
            ended_s=[step.ended_s for step in steps],
            duration_s=[step.duration_s for step in steps],
            num_decode_tokens=[step.num_decode_tokens for step in steps],
            num_prefill_tokens=[step.num_prefill_tokens for step in steps],
            num_running=[step.num_running for step in steps],
            num_waiting=[step.num_waiting for step in steps],
            num_used_blocks=[num_blocks - step.num_free_blocks for step in steps],
            num_preempted=[step.num_preempted for step in steps],
        )

    def _open_way(self, request: Request, client: int) -> RequestPhases:
        num_outputs = self._num_tokens(request) - request.num_submitted_tokens
        return RequestPhases(
            handle=request.handle,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens or 0,
            num_output_tokens=max(num_outputs, 0),
            way=list(request.times.phases),
            request_id=request.client_request_id if request.client == client else "",
        )

    def _num_tokens(self, request: Request) -> int:
        """Return a request's number of tokens; its row may be taken from it at any moment."""
        row = request.row
        if row >= 0:
            num_tokens = int(self._scheduler.running.table.num_tokens[row])
            if request.row == row:
                return num_tokens
        token_ids = request.token_ids
        return request.times.num_tokens if token_ids is None else len(token_ids)


def _most_telling(requests: Sequence[Request]) -> Sequence[Request]:
    if len(requests) <= MAX_OPEN:
        return requests
    is_running = {one.handle for one in requests if one.row >= 0}
    running = [one for one in requests if one.handle in is_running]
    waiting = [one for one in requests if one.handle not in is_running]
    return [*waiting, *running][-MAX_OPEN:]


def _ended_way(ended: EndedRequest, client: int) -> RequestPhases:
    return RequestPhases(
        handle=ended.handle,
        num_prompt_tokens=ended.num_prompt_tokens,
        num_cached_tokens=ended.num_cached_tokens,
        num_output_tokens=ended.num_output_tokens,
        way=list(ended.times.phases),
        request_id=ended.request_id if ended.client == client else "",
        finish_reason=ended.reason,
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


class RequestHistograms:
    """Observes ended requests, many at once. histograms: by name; updated here."""

    def __init__(self, histograms: Mapping[str, Histogram]) -> None:
        self.num_by_reason: Counter[str] = Counter()
        self._histograms = histograms
        self._unfinished: dict[int, tuple[int, int]] = {}
        """Open samples and most tokens of requests with several samples, by their first handle."""

    def observe(self, ended: Sequence[EndedRequest]) -> None:
        """Count requests. One that never ran, or had no token, has no times of the phases it
        missed.
        """
        if not ended:
            return
        self.num_by_reason.update([one.reason for one in ended])
        self._observe("e2e_request_latency_seconds", [one.at_s - one.received_s for one in ended])
        self._observe("request_num_preemptions", [one.times.num_preemptions for one in ended])
        self._observe("request_prompt_tokens", [one.num_prompt_tokens for one in ended])
        self._observe("request_generation_tokens", [one.num_output_tokens for one in ended])
        self._observe("request_params_max_tokens", [one.max_tokens for one in ended])
        for one in ended:
            self._join_samples(one)
        self._observe_running([one for one in ended if one.times.admitted_s])
        self._observe_answered([one for one in ended if one.times.first_token_s])

    def _observe_running(self, ended: Sequence[EndedRequest]) -> None:
        self._observe(
            "request_queue_time_seconds",
            [one.times.admitted_s - one.times.queued_s for one in ended],
        )
        self._observe(
            "request_prefill_kv_computed_tokens",
            [one.num_prompt_tokens - one.num_cached_tokens for one in ended],
        )

    def _observe_answered(self, ended: Sequence[EndedRequest]) -> None:
        lives = [one.times for one in ended]
        decodes = [life.last_token_s - life.first_token_s for life in lives]
        self._observe(
            "request_prefill_time_seconds", [life.first_token_s - life.admitted_s for life in lives]
        )
        self._observe("request_decode_time_seconds", decodes)
        self._observe(
            "request_inference_time_seconds",
            [life.last_token_s - life.admitted_s for life in lives],
        )
        self._observe(
            "request_time_per_output_token_seconds",
            [
                seconds / (one.num_output_tokens - 1)
                for one, seconds in zip(ended, decodes, strict=True)
                if one.num_output_tokens > 1
            ],
        )

    def _join_samples(self, one: EndedRequest) -> None:
        """Observe a request of several samples when its last sample has ended."""
        default = one.num_samples, 0
        num_left, most = self._unfinished.pop(one.first_handle, default)
        num_left, most = num_left - 1, max(most, one.num_output_tokens)
        if num_left:
            self._unfinished[one.first_handle] = num_left, most
        else:
            self._observe("request_max_num_generation_tokens", [most])
            self._observe("request_params_n", [one.num_samples])

    def _observe(self, name: str, values: Sequence[float]) -> None:
        if values:
            self._histograms[name].observe(values)


T = TypeVar("T")


class EngineMetrics:
    """Makes metrics of a scheduler's step_log, which it alone reads.

    Args:
        scheduler: whose step_log, counters and sizes are read.
        rejections: of requests that might not wait, by the limit.
        utilisation: what steps use of the machine, if it is known.
        cache: labels that describe the KV cache.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        rejections: Mapping[str, int],
        cache: Mapping[str, str],
        utilisation: Utilisation | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._step_log = scheduler.step_log
        self._rejections = rejections
        self._utilisation = utilisation
        self._cache = dict(cache)
        self._help = families.histograms(scheduler.config.max_model_len)
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in self._help.items()}
        self._requests = RequestHistograms(self._histograms)
        self._recent = Recent(scheduler)
        self._cached_tokens = 0

    def fold(self) -> None:
        """Add up what the step loop has noted since the last call."""
        step_log, histograms = self._step_log, self._histograms
        if self._utilisation is not None:
            self._utilisation.fold()
        if steps := _take(step_log.steps):
            histograms["iteration_tokens_total"].observe([step.num_tokens for step in steps])
            self._recent.steps.extend(steps)
        self._fold_intervals()
        if first := _take(step_log.first_tokens):
            seconds, cached = zip(*first, strict=True)
            known = [one for one in seconds if one is not None]
            histograms["time_to_first_token_seconds"].observe(known)
            self._cached_tokens += sum(cached)
        ended = _take(step_log.ended)
        self._requests.observe(ended)
        self._recent.ended.extend(ended)

    def recent_steps(self, after: int, client: int, io: IoCounts) -> RecentSteps:
        """Return steps with numbers above `after`, and requests as this client may see them."""
        stats = completed(stats_of(self._scheduler, io.is_paused), io)
        open_requests = self._scheduler.open_requests()  # first, so that who ends now is in one
        self.fold()
        return self._recent.tell(after, client, open_requests, stats)

    def collect(self, io: IoCounts) -> list[Metric]:
        self.fold()
        return [
            *self._gauges(io),
            *self._counters(io),
            *self._labelled(io),
            *self._steps(),
            *(
                Metric(name, "histogram", self._help[name][0], [one.sample()], one.bounds)
                for name, one in self._histograms.items()
            ),
        ]

    def _fold_intervals(self) -> None:
        taken = _take(self._step_log.intervals)
        alike = [one for one in taken if isinstance(one, tuple)]
        columns = [one for one in taken if not isinstance(one, tuple)]
        histogram = self._histograms["inter_token_latency_seconds"]
        if alike:
            seconds, num_rows = zip(*alike, strict=True)
            histogram.observe(seconds, num_rows)
        if columns:
            histogram.observe(np.concatenate(columns))

    def _gauges(self, io: IoCounts) -> list[Metric]:
        scheduler, kv_cache = self._scheduler, self._scheduler.kv_cache
        values = {
            "num_requests_running": scheduler.num_running,
            "num_requests_waiting": scheduler.num_waiting + io.num_compiling,
            "kv_cache_usage_perc": kv_cache.usage,
            "num_blocks": kv_cache.num_blocks,
            "num_free_blocks": kv_cache.num_free_blocks,
            "num_clients": io.num_clients,
            "client_backlog_bytes": io.backlog_bytes,
            "engine_draining": io.is_draining,
        }
        return [_metric(name, "gauge", families.GAUGES[name], values[name]) for name in values]

    def _counters(self, io: IoCounts) -> list[Metric]:
        counters, prefixes = self._scheduler.counters, self._scheduler.kv_cache.stats
        values = {
            "prefix_cache_queries": prefixes.queries,
            "prefix_cache_hits": prefixes.hits,
            "num_preemptions": counters.num_preemptions,
            "prompt_tokens": counters.prompt_tokens + self._cached_tokens,
            "prompt_tokens_cached": self._cached_tokens,
            "generation_tokens": counters.generation_tokens,
            "num_steps": counters.num_steps,
            "num_aborts": counters.num_aborts + io.num_aborts,
            "num_protocol_errors": io.num_protocol_errors,
        }
        return [_metric(name, "counter", families.COUNTERS[name], values[name]) for name in values]

    def _labelled(self, io: IoCounts) -> list[Metric]:
        ends: dict[str, int] = dict.fromkeys(get_args(FinishReason), 0)
        series: dict[str, dict[tuple[tuple[str, str], ...], float]] = {
            "num_requests_waiting_by_reason": {
                (("reason", "capacity"),): self._scheduler.num_waiting,
                (("reason", "deferred"),): io.num_compiling,
            },
            "prompt_tokens_by_source": {
                (("source", "local_compute"),): self._scheduler.counters.prompt_tokens,
                (("source", "local_cache_hit"),): self._cached_tokens,
            },
            "prompt_tokens_cached_by_source": {(("source", "device"),): self._cached_tokens},
            "request_success": _by("finished_reason", ends | self._requests.num_by_reason),
            "admission_rejections": _by("reason", self._rejections),
            "sessions_closed": _by("reason", io.closed),
            "cache_config_info": {tuple(self._cache.items()): 1},
        }
        metrics = []
        for name, samples in series.items():
            kind, text = families.BY_LABEL[name]
            labelled = [MetricSample(value, list(labels)) for labels, value in samples.items()]
            metrics.append(Metric(name, kind, text, labelled))
        return metrics

    def _steps(self) -> list[Metric]:
        """Metrics of the machine's use, by kind of step."""
        if self._utilisation is None:
            return []
        numbers = self._utilisation.totals()
        return [
            Metric(
                name,
                kind,
                text,
                [
                    MetricSample(float(numbers[f"{step}_{key}"]), [("kind", step)])
                    for step in ("decode", "prefill")
                ],
            )
            for name, (kind, key, text) in families.STEPS.items()
            if f"decode_{key}" in numbers
        ]


def _take(entries: deque[T]) -> list[T]:
    """Take all items; the step loop may append others meanwhile."""
    return [entries.popleft() for _ in range(len(entries))]


def _metric(name: str, kind: MetricType, text: str, value: float) -> Metric:
    return Metric(name, kind, text, [MetricSample(float(value))])


def _by(label: str, values: Mapping[str, int]) -> dict[tuple[tuple[str, str], ...], float]:
    return {((label, key),): count for key, count in values.items()}
