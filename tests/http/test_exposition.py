"""The metrics in Prometheus' format, compared with what vLLM 0.32 exposes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prometheus_client.core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from nanocore.engine_core.log.metrics import EngineMetrics, IoCounts
from nanocore.http.exposition import exposition, read_exposition
from nanocore.protocol.metrics import Metric, MetricSample
from tests.fakes import make_request, make_scheduler

VLLM = json.loads((Path(__file__).parent / "vllm_metrics.json").read_text())
"""By name: type, labels and, of a model of 4096 tokens, buckets. Facts of its v1/metrics."""
NOT_OURS = {
    "engine_sleep_state", "external_prefix_cache_hits", "external_prefix_cache_queries",
    "kv_block_idle_before_evict_seconds", "kv_block_lifetime_seconds", "kv_block_reuse_gap_seconds",
    "lora_requests_info", "mm_cache_hits", "mm_cache_queries", "num_requests_kv_fetch_by_stage",
    "watermark_requests", "corrupted_requests",
}  # fmt: skip
"""Of what we have not: sleep, caches elsewhere, adapters, images, samples of blocks' lives."""
CACHE = {
    "block_size": "4", "cache_dtype": "auto", "enable_prefix_caching": "True",
    "num_gpu_blocks": "9",
}  # fmt: skip


def metrics_of_an_engine() -> list[Metric]:
    scheduler, executor = make_scheduler(max_model_len=4096)
    scheduler.add(make_request(1, [1, 2, 3], 2))
    while scheduler.num_requests:
        scheduler.update(executor.execute(scheduler.schedule()))
    collector = EngineMetrics(scheduler, {"max_num_queued_reqs": 0}, CACHE)
    return collector.collect(IoCounts())


def parsed(namespace: str) -> dict[str, Family]:
    text = exposition(metrics_of_an_engine(), "a-model", namespace).decode()
    families = text_string_to_metric_families(text)
    return {family.name.removeprefix(f"{namespace}:"): family for family in families}


def test_what_is_exposed_can_be_read_again() -> None:
    metrics = [metric for metric in metrics_of_an_engine() if metric.samples]
    found, model = read_exposition(exposition(metrics, "a-model").decode())
    assert model == "a-model"
    assert found == metrics


def test_metrics_of_others_are_left_out() -> None:
    text = "# TYPE python_info gauge\npython_info 1\n# TYPE a:b summary\na:b_sum 1\n"
    assert read_exposition(text) == ([], "")
    with pytest.raises(ValueError, match="abc"):
        read_exposition("a:b abc\n")


def test_every_metric_of_vllm_that_we_have_is_there() -> None:
    assert {name for name in VLLM if name not in parsed("vllm")} == NOT_OURS


@pytest.mark.parametrize("name", sorted(VLLM.keys() - NOT_OURS))
def test_a_metric_has_vllms_type_labels_and_buckets(name: str) -> None:
    family, theirs = parsed("vllm")[name], VLLM[name]
    assert family.type == theirs["type"]
    assert family.samples
    for sample in family.samples:
        assert {*sample.labels} - {"le"} == {*theirs["labels"]}
    if theirs["type"] == "histogram":
        bounds = [s.labels["le"] for s in family.samples if s.name.endswith("_bucket")]
        assert [float(bound) for bound in bounds[:-1]] == theirs["buckets"]
        assert bounds[-1] == "+Inf"


def test_names_begin_with_the_namespace_and_say_whose_they_are() -> None:
    text = exposition(metrics_of_an_engine(), 'a "model"').decode()
    assert 'nanocore:generation_tokens_total{engine="0",model_name="a \\"model\\""} 2.0' in text
    assert "vllm" not in text


def test_buckets_are_cumulative() -> None:
    metric = Metric("x", "histogram", "", [MetricSample(9.5, counts=[1, 0, 2])], [1.0, 2.5])
    (family,) = text_string_to_metric_families(exposition([metric], "m").decode())
    values = {(s.name, s.labels.get("le")): s.value for s in family.samples}
    assert values == {
        ("nanocore:x_bucket", "1.0"): 1,
        ("nanocore:x_bucket", "2.5"): 1,
        ("nanocore:x_bucket", "+Inf"): 3,
        ("nanocore:x_count", None): 3,
        ("nanocore:x_sum", None): 9.5,
    }
