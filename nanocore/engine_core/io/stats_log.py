"""What an engine does, as a line of its log every ten seconds, in vLLM's words.

Written on the io thread, at its regular look at the sessions, from the counters that CONTROL
`stats` answers with: the step loop is not asked. An engine that does nothing says so once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from nanocore.protocol.metrics import Stats

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 10.0


def stats_line(before: Stats, now: Stats, passed_s: float) -> str:
    """What has been done between these two, and how things are."""
    prompts_per_s = (now.prompt_tokens - before.prompt_tokens) / passed_s
    outputs_per_s = (now.generation_tokens - before.generation_tokens) / passed_s
    return (
        f"Avg prompt throughput: {prompts_per_s:.1f} tokens/s, "
        f"Avg generation throughput: {outputs_per_s:.1f} tokens/s, "
        f"Running: {now.num_requests_running} reqs, Waiting: {now.num_requests_waiting} reqs, "
        f"KV cache usage: {now.kv_cache_usage_perc * 100:.1f}%, "
        f"Prefix cache hit rate: {now.prefix_cache_hit_rate * 100:.1f}%"
    )


class StatsLog:
    """read: the counters of now. now_s: by any one monotonic clock, here and below."""

    def __init__(self, read: Callable[[], Stats], now_s: float) -> None:
        self._read = read
        self._last, self._last_s = read(), now_s
        self._was_busy = False

    def look(self, now_s: float) -> None:
        """Write the line if it is due, and there is something to say."""
        passed_s = now_s - self._last_s
        if passed_s < INTERVAL_S:
            return
        before, now = self._last, self._read()
        self._last, self._last_s = now, now_s
        is_busy = (
            now.num_requests_running + now.num_requests_waiting > 0
            or now.prompt_tokens != before.prompt_tokens
            or now.generation_tokens != before.generation_tokens
        )
        if is_busy or self._was_busy:
            logger.info("%s", stats_line(before, now, passed_s))
        self._was_busy = is_busy
