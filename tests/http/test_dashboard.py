"""The dashboard's queries, evaluated by Prometheus over what an engine tells in five minutes."""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nanocore.engine_core.log.metrics import IoCounts
from nanocore.engine_core.log.utilisation import Utilisation
from nanocore.http.exposition import exposition
from nanocore.worker.cost.model_cost import MachineSpeed, ModelCost
from tests.engine_core.log.clocked_engine import Engine
from tests.fakes import make_request

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus is installed"),
]

DASHBOARD = json.loads(
    (Path(__file__).parents[2] / "deploy" / "grafana" / "nanocore.json").read_text()
)
QUERIES = [
    pytest.param(target["expr"], id=f"{panel['title']}, {target['legendFormat']}")
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
]
MODEL = "a model"
NUM_SCRAPES = 21
INTERVAL_S = 15
COST = ModelCost(num_params=9, token_params=9, head_params=1, weight_bytes=90, attention=[])
SPEED = MachineSpeed(bytes_per_s=1e3, flops_per_s=1e3)


def scrapes() -> Iterator[str]:
    """Of an engine under a load in which all happens that is counted."""
    settings = {"num_blocks": 8, "max_num_batched_tokens": 16, "max_num_seqs": 3}
    engine = Engine(Utilisation(COST, SPEED), **settings)
    closed: dict[str, int] = {"the client is gone": 0}
    for i in range(NUM_SCRAPES):
        for handle in range(3 * i + 1, 3 * i + 4):
            engine.add(make_request(handle, [1, 2, 3, 4, 5, handle], 9))
        for _ in range(INTERVAL_S):
            if engine.scheduler.num_requests:
                engine.step(0.5)
        closed["the client is gone"] += 1
        engine.rejections["max_num_queued_reqs"] += 1
        counts = IoCounts(num_clients=2, num_protocol_errors=i, closed=closed)
        yield exposition(engine.collector.collect(counts), MODEL).decode()


def open_metrics(start_s: int) -> str:
    """All scrapes, with their times, as promtool reads them."""
    types: dict[str, str] = {}
    lines: dict[str, list[str]] = defaultdict(list)
    for i, text in enumerate(scrapes()):
        for family in text_string_to_metric_families(text):
            types[family.name] = family.type
            for sample in family.samples:
                labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
                at_s = start_s + i * INTERVAL_S
                lines[family.name].append(f"{sample.name}{{{labels}}} {sample.value} {at_s}")
    text = "".join(
        f"# TYPE {name} {kind}\n" + "\n".join(lines[name]) + "\n" for name, kind in types.items()
    )
    return text + "# EOF\n"


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """(URL of one that has the scrapes, the time of the last of them)."""
    folder = tmp_path_factory.mktemp("prometheus")
    start_s = int(time.time()) - 6 * 3600
    (folder / "scrapes.txt").write_text(open_metrics(start_s))
    (folder / "none.yml").write_text("scrape_configs: []\n")
    blocks = ["tsdb", "create-blocks-from", "openmetrics", "scrapes.txt", "data"]
    subprocess.run(["promtool", *blocks], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen(
        ["prometheus", "--config.file=none.yml", "--storage.tsdb.path=data",
         f"--web.listen-address=127.0.0.1:{port}"],
        cwd=folder, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stderr is not None
        assert any("ready to receive web requests" in line for line in server.stderr)
        yield f"http://127.0.0.1:{port}", start_s + (NUM_SCRAPES - 1) * INTERVAL_S
    finally:
        server.terminate()
        server.communicate(timeout=60)


def ask(url: str, expression: str, at_s: int) -> list[dict[str, Any]]:
    query = urllib.parse.urlencode({"query": expression, "time": at_s})
    with urllib.request.urlopen(f"{url}/api/v1/query?{query}", timeout=60) as response:
        result: list[dict[str, Any]] = json.load(response)["data"]["result"]
        return result


@pytest.mark.parametrize("expression", QUERIES)
def test_a_query_has_an_answer(prometheus: tuple[str, int], expression: str) -> None:
    url, at_s = prometheus
    expression = expression.replace("$__rate_interval", "1m").replace("$model_name", MODEL)
    assert "$" not in expression
    result = ask(url, expression, at_s)
    assert result
    for series in result:
        assert math.isfinite(float(series["value"][1])), series


def test_rates_are_those_of_the_load(prometheus: tuple[str, int]) -> None:
    url, at_s = prometheus
    (ended,) = ask(url, "rate(nanocore:sessions_closed_total[1m]) * 60", at_s)
    assert float(ended["value"][1]) == pytest.approx(4)


def test_the_example_configuration_is_one() -> None:
    config = Path(__file__).parents[2] / "deploy" / "prometheus" / "prometheus.yml"
    subprocess.run(["promtool", "check", "config", config], check=True, capture_output=True)
