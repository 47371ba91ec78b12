"""What two readings say, and how it is shown; the clock stands where a test wants it."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from rich.console import Console

from nanocore.cli.top.command import watch
from nanocore.cli.top.load import Load, MetricsReading, load_between, quantile
from nanocore.cli.top.view import sparkline, view
from nanocore.protocol.errors import EngineDeadError
from nanocore.protocol.metrics import Metric, MetricSample


def counter(name: str, value: float, **labels: str) -> Metric:
    return Metric(name, "counter", "", [MetricSample(value, [*labels.items()])])


def by(name: str, label: str, values: dict[str, float]) -> Metric:
    samples = [MetricSample(value, [(label, key)]) for key, value in values.items()]
    return Metric(name, "counter", "", samples)


def histogram(name: str, counts: list[int]) -> Metric:
    samples = [MetricSample(1.5 * sum(counts), counts=counts)]
    return Metric(name, "histogram", "", samples, [1.0, 2.0])


def reading(at_s: float, scale: int) -> MetricsReading:
    """Counters are some number times scale."""
    return MetricsReading(
        [
            counter("generation_tokens", 100 * scale),
            counter("prompt_tokens", 50 * scale),
            counter("num_steps", 10 * scale),
            counter("prefix_cache_queries", 40 * scale),
            counter("prefix_cache_hits", 10 * scale),
            counter("num_requests_running", 3),
            counter("kv_cache_usage_perc", 0.5),
            by("request_success", "finished_reason", {"stop": 4 * scale, "length": 0}),
            by("admission_rejections", "reason", {"max_num_queued_reqs": 2 * scale, "x": scale}),
            by("num_requests_waiting_by_reason", "reason", {"capacity": 5, "deferred": 1}),
            by("step_seconds", "kind", {"decode": 1.0 * scale, "prefill": 0.0}),
            by("step_read_bytes", "kind", {"decode": 300.0 * scale, "prefill": 0.0}),
            by("machine_bytes_per_second", "kind", {"decode": 1000.0, "prefill": 1000.0}),
            histogram("time_to_first_token_seconds", [scale, 3 * scale, 0]),
        ],
        at_s,
    )


@pytest.fixture
def load() -> Load:
    return load_between(reading(10.0, 1), reading(12.0, 3))


def test_rates_quantiles_and_utilisation_are_of_what_happened_in_between(load: Load) -> None:
    assert load.generation_tokens_per_s == 100
    assert load.prompt_tokens_per_s == 50
    assert load.steps_per_s == 10
    assert load.ended_per_s == {"stop": 4, "length": 0}
    assert load.rejections_per_s == 3
    assert load.prefix_hit_rate == 0.25
    assert (load.num_running, load.num_deferred, load.kv_cache_usage) == (3, 1, 0.5)

    assert load.decode_mbu == pytest.approx(0.3)
    assert load.prefill_mfu is None

    assert load.ttft_s.p50 == pytest.approx(1 + 1 / 3)
    assert load.ttft_s.mean == 1.5
    assert load.e2e_s.mean is load.e2e_s.p50 is None


def test_what_is_below_the_first_bound_is_not_guessed() -> None:
    before = MetricsReading([histogram("request_queue_time_seconds", [0, 0, 0])], 1.0)
    now = MetricsReading([histogram("request_queue_time_seconds", [4, 0, 0])], 2.0)
    queue_s = load_between(before, now).queue_s
    assert (queue_s.mean, queue_s.p99, queue_s.least) == (1.5, None, 1.0)
    assert "<1000" in shown(load_between(before, now))


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([0, 0, 0], 0.5, None),
        ([], 0.5, None),
        ([4, 0, 0], 0.5, None),
        ([0, 4, 0], 0.5, 1.5),
        ([2, 2, 0], 0.75, 1.5),
        ([2, 0, 2], 0.99, 2.0),
        ([0, 0, 1], 0.5, 2.0),
    ],
)
def test_a_quantile_is_what_prometheus_estimates(
    counts: list[int], share: float, expected: float | None
) -> None:
    assert quantile([1.0, 2.0], counts, share) == (
        None if expected is None else pytest.approx(expected)
    )


def shown(load: Load) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(view("a model", load, [1.0, 50.0, 100.0]))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_a_view_says_all_of_it_and_the_models_name_as_it_is(load: Load) -> None:
    text = shown(load)
    for words in ("a model", "50.0%", "25.0%", "100.0 tokens/s", "30.0%", "4.0 stop", "1,333.3"):
        assert words in text
    assert "▁▅█" in text

    console = Console(file=io.StringIO(), width=120)
    console.print(view("[bold]x[/nothing]", load, []))
    assert "[bold]x[/nothing]" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_sparkline_is_as_high_as_its_largest_value() -> None:
    assert sparkline([0.0, 7.0, 14.0]) == "▁▅█"
    assert sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([1.0] * 5, num_chars=3) == "███"
    assert sparkline([]) == ""


class FakeClient:
    """Answers with these readings' metrics, one after another; an error is raised."""

    def __init__(self, *answers: list[Metric] | Exception) -> None:
        self._answers = list(answers)

    async def metrics(self) -> list[Metric]:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class DoneError(Exception):
    pass


def steps(num_steps: int) -> list[Metric]:
    return [counter("num_steps", num_steps)]


def watched(*answers: list[Metric] | Exception) -> list[Load | None]:
    shown: list[Load | None] = []
    client: Any = FakeClient(*answers, DoneError())
    with pytest.raises(DoneError):
        asyncio.run(watch(client.metrics, 0.001, shown.append))
    return shown


def test_an_engine_that_is_gone_is_awaited_and_one_that_is_new_begins_anew() -> None:
    gone = EngineDeadError("gone")
    shown = watched(steps(5), steps(7), gone, steps(1), steps(2), steps(0), steps(9))
    assert [None if one is None else one.steps_per_s > 0 for one in shown] == [
        True, None, True, True,
    ]  # fmt: skip
