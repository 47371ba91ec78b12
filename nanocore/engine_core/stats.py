"""What CONTROL `stats` answers, as far as the step loop knows it: counters and gauges of now."""

from __future__ import annotations

from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.protocol.metrics import Stats


def stats_of(scheduler: Scheduler, is_paused: bool) -> Stats:
    """Of an engine with this scheduler; the io thread adds what it knows."""
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
