"""What CONTROL `stats` answers: counters and gauges of now, out of what either thread knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.protocol.metrics import Stats


@dataclass
class DeskCounts:
    """What the front desk knows.

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
    closed: Mapping[str, int] = field(default_factory=dict)


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


def completed(stats: Stats, desk: DeskCounts) -> Stats:
    """What the step loop knows, with what the desk does."""
    return msgspec.structs.replace(
        stats,
        num_requests_waiting=stats.num_requests_waiting + desk.num_compiling,
        num_aborts=stats.num_aborts + desk.num_aborts,
        num_clients=desk.num_clients,
        num_protocol_errors=desk.num_protocol_errors,
    )
