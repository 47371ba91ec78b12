"""A scheduler, its worker and its metrics, whose clock a test moves."""

from __future__ import annotations

from typing import Any

from nanocore.engine_core.log.event_log import StepDone
from nanocore.engine_core.log.metrics import EngineMetrics, IoCounts
from nanocore.engine_core.log.utilisation import Utilisation
from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.protocol.metrics import Metric
from tests.fakes import FakeExecutor, make_scheduler


class Engine:
    """A scheduler, its worker and its metrics; a step takes a second, or as a test says."""

    def __init__(self, utilisation: Utilisation | None = None, **settings: Any) -> None:
        self.now_s = 100.0
        self.scheduler: Scheduler
        self.executor: FakeExecutor
        self.scheduler, self.executor = make_scheduler(clock=lambda: self.now_s, **settings)
        self.rejections = {"max_num_queued_reqs": 2}
        counted = self.scheduler, self.rejections
        self.collector = EngineMetrics(*counted, {"a": "b"}, utilisation)

    def add(self, request: Request) -> Request:
        for sample in request.samples:
            sample.received_s = self.now_s
        self.scheduler.add(request)
        return request

    def step(self, seconds: float = 1.0) -> None:
        group = self.scheduler.next_group()
        assert group is not None
        result = self.executor.execute(self.scheduler.schedule(group))
        self.now_s += seconds
        self.scheduler.update(result)
        self.scheduler.log.append(StepDone(seconds))

    def metrics(self, io: IoCounts | None = None) -> dict[str, Metric]:
        return {one.name: one for one in self.collector.collect(io or IoCounts())}

    def value(self, name: str, *labels: tuple[str, str]) -> float:
        (value,) = [s.value for s in self.metrics()[name].samples if s.labels == list(labels)]
        return value

    def observed(self, name: str) -> tuple[int, float]:
        """(how many, their sum)."""
        (sample,) = self.metrics()[name].samples
        return sum(sample.counts), sample.value
