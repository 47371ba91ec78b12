"""`GET /live`: an engine's last steps and the ways of requests, as pages read them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from msgspec.structs import replace

from nanocore.client import AsyncEngineClient, RequestPhases, Stats
from nanocore.http.app import App
from nanocore.http.endpoints.status import live_request
from nanocore.http.server_settings import AppSettings
from tests.client.fake_engine import connected, welcome_message
from tests.http.asgi import Connection, app_of, scope

ROOT = Path(__file__).parents[2]
CHAT = {"messages": [{"role": "user", "content": "Count from 3 to 9"}], "max_tokens": 6}
VIEW = {
    "engine", "model", "max_model_len", "num_blocks", "now_s", "draining", "stats", "steps",
    "requests",
}  # fmt: skip
STEP = {
    "step", "t_s", "duration_s", "decode_tokens", "prefill_tokens", "running", "waiting",
    "used_blocks", "preempted",
}  # fmt: skip
REQUEST = {
    "handle", "id", "prompt_tokens", "cached_tokens", "output_tokens", "finish_reason", "way",
}  # fmt: skip


async def live(http: httpx.AsyncClient, **query: Any) -> Any:
    answer = await http.get("/live", params=query)
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    return answer.json()


async def test_a_chat_is_seen_step_by_step_and_under_its_answers_id(demo_endpoint: str) -> None:
    async with app_of(demo_endpoint, served_model_names=("demo",)) as (app, http):
        before = await live(http)
        answer = (await http.post("/v1/chat/completions", json=CHAT)).json()
        view = await live(http, after=before["stats"]["num_steps"])
        assert view.keys() == VIEW
        client = app.state.client
        assert client is not None
        assert (view["model"], view["draining"]) == ("demo", False)
        assert view["engine"] == before["engine"] == client.engine_instance
        card = client.model_card
        assert view["max_model_len"] == card.max_model_len
        assert view["num_blocks"] == card.num_blocks
        num_prompt = answer["usage"]["prompt_tokens"]
        steps, (*_, request) = view["steps"], view["requests"]
        assert all(step.keys() == STEP for step in steps)
        first = before["stats"]["num_steps"] + 1
        assert [step["step"] for step in steps] == [*range(first, first + len(steps))]
        assert view["stats"]["num_steps"] == steps[-1]["step"]
        assert sum(step["decode_tokens"] for step in steps) == 5
        cached = request["cached_tokens"]
        assert sum(step["prefill_tokens"] for step in steps) == num_prompt - cached
        assert (steps[0]["running"], steps[-1]["running"]) == (1, 0)
        assert steps[0]["used_blocks"] > 0
        assert all(step["duration_s"] > 0 for step in steps)
        assert request.keys() == REQUEST
        assert request["id"] == answer["id"]
        assert (request["prompt_tokens"], request["output_tokens"]) == (num_prompt, 6)
        assert request["finish_reason"] == "length"
        assert [phase for phase, _ in request["way"]] == [
            "queued", "prefill", "decode", "ended",
        ]  # fmt: skip
        times = [since_s for _, since_s in request["way"]]
        assert times == sorted(times)
        assert times[-1] == steps[-1]["t_s"] <= view["now_s"]


def test_the_answer_in_the_text_is_such_an_answer() -> None:
    text = (ROOT / "docs" / "observability.md").read_text("utf-8")
    view = json.loads(
        text.split("## Steps and request timelines", 1)[1].split("```json\n", 1)[1].split("```")[0]
    )
    assert view.keys() == VIEW
    assert [step.keys() for step in view["steps"]] == [STEP]
    assert [request.keys() for request in view["requests"]] == [REQUEST]
    assert view["stats"].keys() < {*Stats.__struct_fields__}


async def test_requests_of_others_and_those_whose_id_opens_an_answer_have_none(
    demo_endpoint: str,
) -> None:
    async with (
        app_of(demo_endpoint) as (_, http),
        AsyncEngineClient.connect(demo_endpoint) as other,
    ):
        await other.complete("Sorted:", request_id="secret")
        stored = await http.post("/v1/responses", json={"input": "1 + 1", "model": ""})
        assert stored.json()["id"].startswith("resp_")
        told = (await live(http))["requests"][-2:]
        assert [request["id"] for request in told] == [None, None]
        own = (await other.recent_steps()).requests[-2:]
        assert [request.request_id for request in own] == ["secret", ""]


def test_ids_of_answers_are_told_but_for_stored_ones() -> None:
    def way(request_id: str) -> RequestPhases:
        return RequestPhases(
            handle=1,
            num_prompt_tokens=1,
            num_cached_tokens=0,
            num_output_tokens=0,
            way=[("queued", 1.23456789)],
            request_id=request_id,
        )

    names = ["chatcmpl-1", "", "resp_1", "msg_1"]
    ways = [way(name) for name in names]
    seen = [live_request(way) for way in ways]
    assert [one.id for one in seen] == ["chatcmpl-1", None, None, "msg_1"]
    assert seen[0].way == [("queued", 1.234568)]


@pytest.mark.parametrize("after", ["-1", "x", "1.5", str(2**53), "9" * 400, "٣"])
async def test_what_is_no_steps_number_is_refused(demo_endpoint: str, after: str) -> None:
    async with app_of(demo_endpoint) as (_, http):
        refused = await http.get("/live", params={"after": after})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "after"
        assert not (await live(http, after=2**53 - 1))["steps"]


async def test_a_key_is_needed_where_there_are_any() -> None:
    app = App(AppSettings(api_keys=("k",)))
    connection = Connection()
    await app(scope("GET", "/live"), connection.receive, connection.send)
    assert connection.status == 401


async def test_a_server_that_drains_tells_so(demo_endpoint: str) -> None:
    async with app_of(demo_endpoint) as (app, http):
        app.state.is_draining = True
        assert (await live(http))["draining"]


async def test_an_engine_that_is_too_old_is_named(endpoint: str) -> None:
    welcome = replace(welcome_message(), protocol=(1, 10))

    async with connected(endpoint, welcome) as (_, client):
        app, connection = App(AppSettings()), Connection()
        app.state.client = client
        await asyncio.wait_for(app(scope("GET", "/live"), connection.receive, connection.send), 60)
        assert connection.status == 500
        assert "steps came with protocol 1.11" in connection.json["error"]["message"]
