"""The page of all metrics, as an engine without a model tells them: names, labels, buckets."""

from __future__ import annotations

from nanocore.engine_core.config import SchedulerConfig
from nanocore.engine_core.io.limits import QueueLimit
from nanocore.engine_core.log.metrics import EngineMetrics, IoCounts
from nanocore.engine_core.log.utilisation import Utilisation
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.http.exposition import NOT_NAMING
from nanocore.kv_cache import CacheGroup, Capacity, KVCacheManager
from nanocore.protocol.metrics import Metric
from nanocore.worker.cost.model_cost import MachineSpeed, ModelCost
from tools.reference.markdown import item, page, wrapped

MAX_MODEL_LEN = 4096
_CACHE = {
    "block_size": "16",
    "num_gpu_blocks": "8",
    "enable_prefix_caching": "True",
    "cache_dtype": "auto",
}
_FREE_LABELS = {
    "sessions_closed": "reason",
    "prefix_cache_lost_tokens": "group",
    "spec_decode_num_accepted_tokens_per_pos": "position",
    "cache_config_info": ", ".join(f"`{k}`" for k in _CACHE),
}
"""Of these the values are not a closed set."""
_COST = ModelCost(num_params=1, token_params=1, head_params=0, weight_bytes=1, attention=[])
_SPEED = MachineSpeed(bytes_per_s=1, flops_per_s=1)
_EXCEPTIONS = "; ".join(f"`{name}` has no `{no}`" for name, (no,) in NOT_NAMING.items())
_ABOUT = (
    "The metrics of `GET /metrics` of [nanocore serve](nanocore-serve.md), of [nanocore metrics]"
    "(nanocore-metrics.md) and of `await client.metrics()` ([observability]"
    "(../observability.md#metrics)). Names begin with `nanocore:` for Prometheus, or with "
    "`--metrics-namespace`; counters end in `_total`; labels `model_name` and `engine` are "
    f"added ({_EXCEPTIONS}). Times are in seconds; a request's start when its SUBMIT is read. "
    "`nanocore metrics` also has a gauge `engine_up`, which is 0 while no engine answers."
)


def metrics_page() -> str:
    """The page."""
    parts: list[str] = []
    metrics = _metrics()
    first_with = {tuple(metric.bounds): metric.name for metric in reversed(metrics)}
    for kind in ("gauge", "counter", "histogram"):
        lines = [_line(one, first_with[tuple(one.bounds)]) for one in metrics if one.type == kind]
        parts += [f"## {kind.capitalize()}s", "\n".join(lines)]
    buckets = (
        "Buckets of tokens continue as 1, 2, 5, 10, … up to `--max-model-len`, which is "
        f"{MAX_MODEL_LEN:,} here."
    )
    return page("Metrics", wrapped(_ABOUT), *parts, wrapped(buckets))


def _metrics() -> list[Metric]:
    config = SchedulerConfig(
        max_num_seqs=1,
        max_num_batched_tokens=8,
        max_model_len=MAX_MODEL_LEN,
        num_speculative_tokens=1,
    )
    groups = [CacheGroup("full"), CacheGroup("window(512)", 512)]
    scheduler = Scheduler(config, KVCacheManager(Capacity(8, 16, groups)))
    limit = QueueLimit(1, 1, scheduler.counters)
    used = Utilisation(_COST, _SPEED)
    collector = EngineMetrics(scheduler, limit.rejections, _CACHE, used)
    return collector.collect(IoCounts(closed={"": 0}))


def _line(metric: Metric, first: str) -> str:
    """first: the first metric with these buckets, which are listed there."""
    notes = ""
    if labels := _labels(metric):
        notes += f" Labels: {labels}."
    if metric.bounds and first != metric.name:
        notes += f" Buckets: as `{first}`."
    elif metric.bounds:
        notes += f" Buckets: {', '.join(f'{bound:g}' for bound in metric.bounds)}."
    return item(f"`{metric.name}`: {metric.help}{notes}")


def _labels(metric: Metric) -> str:
    if metric.name in _FREE_LABELS:
        names = _FREE_LABELS[metric.name]
        return names if "`" in names else f"`{names}`"
    values: dict[str, list[str]] = {}
    for sample in metric.samples:
        for name, value in sample.labels:
            values.setdefault(name, []).append(f"`{value}`")
    return "; ".join(f"`{name}` is {_either(found)}" for name, found in values.items())


def _either(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} or {values[-1]}"
