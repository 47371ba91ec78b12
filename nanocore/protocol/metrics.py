"""Metrics, stats and recent steps, as an engine reports them in a REPLY.

Metrics describe themselves with Prometheus' types, so a reader can show them without knowing their
names. Steps travel in columns. Times are seconds of the engine's own clock, which says `now_s`;
they can be compared with one another, and with nothing else.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec

from nanocore.protocol.fields import Handle, limited, since

Phase = Literal["queued", "prefill", "decode", "preempted", "ended"]
MAX_MOVES = 64
"""Limit of a request's phases; if there are more, those after the first are left out."""


class StepColumns(msgspec.Struct, frozen=True, kw_only=True):
    """Steps, the oldest first.

    number: counts from 1 with the engine's start. ended_s: when its result was in. duration_s: from
    when it was planned, or the step before it ended, whichever is later. num_decode_tokens: of rows
    that go on from their last token. num_running, num_waiting, num_used_blocks: when it ended.
    num_preempted: requests that lost their rows when it was planned.
    """

    number: list[int] = []
    ended_s: list[float] = []
    duration_s: list[float] = []
    num_decode_tokens: list[int] = []
    num_prefill_tokens: list[int] = []
    num_running: list[int] = []
    num_waiting: list[int] = []
    num_used_blocks: list[int] = []
    num_preempted: list[int] = []


class RequestPhases(msgspec.Struct, frozen=True, kw_only=True):
    """A request, or one of its samples, and when it entered which phase.

    way: [phase, since when] pairs. A phase is a `Phase`, or one of a later version. request_id: its
    client's name for it; empty in another's session. num_cached_tokens: of its prompt, found when
    it was first admitted. num_output_tokens: so far, without those that it came with.
    finish_reason: once it has ended, as `Event` has it.
    """

    handle: Handle
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    way: list[tuple[Annotated[str, limited(enum=get_args(Phase))], float]]
    request_id: str = ""
    finish_reason: str | None = None


class RecentSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The last steps, and requests that are open or have ended lately.

    now_s: by the clock that all times are of. stats: as CONTROL `stats` has them, of this moment.
    """

    now_s: float
    stats: Stats
    steps: StepColumns
    requests: list[RequestPhases]


MetricType = Literal["counter", "gauge", "histogram"]


class MetricSample(msgspec.Struct, frozen=True):
    """One series of a metric.

    labels: [name, value] pairs. value: of a counter or gauge; of a histogram the sum of what was
    observed. counts: of a histogram, observations in each of its buckets alone, the last one beyond
    all bounds.
    """

    value: float
    labels: list[tuple[str, str]] = []
    counts: list[int] = []


class Metric(msgspec.Struct, frozen=True):
    """A metric, since the engine's start.

    name: without a prefix, and a counter's without `_total`. bounds: upper bounds of a histogram's
    buckets, ascending, themselves included.
    """

    name: str
    type: MetricType
    help: str
    samples: list[MetricSample]
    bounds: list[float] = []


class CacheGroupStats(msgspec.Struct, frozen=True, kw_only=True):
    """A group of the model's layers: those that keep the same tokens.

    name: "full", or "window(N)" of layers that see N tokens. num_blocks: its blocks if it had all
    of the memory, which groups share. num_free_blocks: those that it could have now.
    prefix_cache_lost_tokens: prompt tokens that were not found because this group had let go of
    them.
    """

    name: str
    num_blocks: int
    num_free_blocks: int
    prefix_cache_lost_tokens: int = 0


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start and gauges of now; names are vLLM's where it has them.

    groups: of a model whose layers do not all keep the same tokens; num_blocks and num_free_blocks
    are sums over them. spec_decode_*: drafts that rows computed in steps, their tokens, and those
    that were right, also by their place in the draft.
    """

    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage_perc: float
    num_blocks: int
    num_free_blocks: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int
    num_aborts: int
    prompt_tokens: int
    generation_tokens: int
    num_steps: int
    paused: bool
    prefix_cache_hit_rate: Annotated[float, since(1)] = 0.0
    num_clients: int = 0
    num_protocol_errors: int = 0
    groups: Annotated[list[CacheGroupStats], since(13)] = []
    spec_decode_num_drafts: Annotated[int, since(14)] = 0
    spec_decode_num_draft_tokens: Annotated[int, since(14)] = 0
    spec_decode_num_accepted_tokens: Annotated[int, since(14)] = 0
    spec_decode_num_accepted_tokens_per_pos: Annotated[list[int], since(14)] = []
