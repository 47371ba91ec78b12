"""A histogram counts as Prometheus' own does."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Reference

from nanocore.engine_core.log.metrics import TOKEN_BOUNDS, Histogram

VALUES = st.floats(0, 100) | st.sampled_from(TOKEN_BOUNDS)


@settings(deadline=None)
@given(st.lists(st.lists(VALUES, max_size=20), max_size=4))
def test_columns_are_counted_as_single_values_are(columns: list[list[float]]) -> None:
    ours = Histogram(TOKEN_BOUNDS)
    reference = Reference("x", "", registry=CollectorRegistry(), buckets=TOKEN_BOUNDS)
    for column in columns:
        ours.observe(column)
        for value in column:
            reference.observe(value)
    sample = ours.sample()
    samples = {(s.name, s.labels.get("le")): s.value for s in reference.collect()[0].samples}
    assert sum(sample.counts) == samples["x_count", None]
    assert abs(sample.value - samples["x_sum", None]) < 1e-6
    for i, bound in enumerate(TOKEN_BOUNDS):
        assert sum(sample.counts[: i + 1]) == samples["x_bucket", str(float(bound))]


def test_a_value_may_count_several_times() -> None:
    histogram = Histogram((1, 2))
    histogram.observe([0.5, 2.0, 3.0], [3, 2, 1])
    assert histogram.sample().counts == [3, 2, 1]
    assert histogram.sample().value == 0.5 * 3 + 2 * 2 + 3
