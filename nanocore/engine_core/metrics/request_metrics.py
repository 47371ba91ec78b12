"""The histograms of requests that have ended, and how they ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from nanocore.engine_core.metrics.histogram import Histogram
from nanocore.engine_core.requests.step_log import EndedRequest


class RequestMetrics:
    """Observes ended requests, many at once. histograms: by name; written here."""

    def __init__(self, histograms: Mapping[str, Histogram]) -> None:
        self.num_by_reason: Counter[str] = Counter()
        self._histograms = histograms
        self._unfinished: dict[int, tuple[int, int]] = {}
        """Of requests with several samples: those that have not ended, and the most tokens."""

    def observe(self, ended: Sequence[EndedRequest]) -> None:
        """Count these in. A request that never ran, or had no token, has no such times."""
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
        """Of several samples the last one to end is the request's end."""
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
