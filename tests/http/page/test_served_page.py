"""The page of `nanocore serve`, with the demo model: what a user sees, and what the engine does.

With NANOCORE_SCREENSHOTS=docs/images the pictures of the documents are made, too.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from nanocore.client import AsyncEngineClient
from tests.cli.served import Served, answered
from tests.http.page.conftest import NewPage, say

pytestmark = pytest.mark.campaign
PICTURES = os.environ.get("NANOCORE_SCREENSHOTS")
MAX_PICTURE_BYTES = 200_000
NUM_CLIENTS = 10


def url(served: Served) -> str:
    return f"http://{served.host}:{served.port}/"


@contextmanager
def paused(served: Served) -> Iterator[None]:
    """The engine does no step while the block runs.

    In a thread, for the browser's driver has this one's event loop.
    """
    found = re.search(r"engine (ipc://\S+)", "".join(served.log))
    assert found is not None
    with asyncio_thread() as call:
        client = AsyncEngineClient.connect(found[1], timeout_s=60)
        call(client.__aenter__)
        call(client.pause)
        try:
            yield
        finally:
            call(client.resume)
            call(client.close)


@contextmanager
def asyncio_thread() -> Iterator[Callable[[Callable[[], object]], object]]:
    """Runs coroutine functions in an event loop of a thread's."""
    with ThreadPoolExecutor(1) as thread:
        runner = asyncio.Runner()
        yield lambda function: thread.submit(lambda: runner.run(function())).result()  # type: ignore[arg-type]
        thread.submit(runner.close).result()


def picture(page: Page, name: str) -> None:
    """Of what is seen, for the documents, if they are to be made."""
    if PICTURES:
        path = Path(PICTURES) / f"{name}.png"
        page.screenshot(path=path)
        assert path.stat().st_size <= MAX_PICTURE_BYTES, path


def test_a_chat_with_the_demo_model(served: Served, new_page: NewPage) -> None:
    page = new_page(url(served), viewport={"width": 1280, "height": 900})
    expect(page.locator("#model")).to_have_text("demo")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Close").click()
    answers = page.locator(".markdown")
    say(page, "The code of Alice is 4817. The code of Bob is 1234. What is the code of Alice?")
    expect(answers).to_have_text("The code of Alice is 4817.")
    expect(page.locator(".figures")).to_contain_text("finish stop")
    say(page, "And Bob?")
    expect(answers.last).to_have_text("The code of Bob is 1234.")
    figures = page.locator(".figures").last
    expect(figures).to_contain_text(re.compile(r"prompt \d+, [1-9]\d* cached"))
    page.get_by_role("button", name="Edit", exact=True).last.click()
    page.get_by_label("Edit the message").fill("Count from 7 to 12.")
    page.keyboard.press("Enter")
    expect(answers.last).to_have_text("7 8 9 10 11 12")
    expect(page.locator(".message")).to_have_count(4)
    say(page, "What is 123 + 456?")
    expect(answers.last).to_have_text("123 + 456 = 579")
    expect(page.locator("#send")).to_have_text("Send")
    picture(page, "chat")
    page.emulate_media(color_scheme="dark")
    picture(page, "chat-dark")


def test_a_value_that_the_engine_refuses_is_told_in_its_words(
    served: Served, new_page: NewPage
) -> None:
    page = new_page(url(served))
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Top k").fill("0")
    page.get_by_label("Max tokens").fill("4")
    page.get_by_label("Repetition penalty").fill("0")
    page.get_by_role("button", name="Close").click()
    say(page, "Hi")
    expect(page.locator(".notice.failed")).to_contain_text(re.compile("400: .*repetition_penalty"))


def test_stop_aborts_the_request_in_the_engine(served: Served, new_page: NewPage) -> None:
    page = new_page(url(served))
    num_aborts = served.get("/live")[1]["stats"]["num_aborts"]
    with paused(served):
        say(page, "Count from 1 to 300.")
        live = new_page(f"{url(served)}#live")
        expect(live.locator("#tile-waiting")).to_have_text("1")
        expect(live.locator("#ways .phase").first).to_have_text("queued")
        page.get_by_role("button", name="Stop").click()
        expect(live.locator("#tile-waiting")).to_have_text("0")
        expect(live.locator("#ways .phase").first).to_have_text("ended: abort")
    assert served.get("/live")[1]["stats"]["num_aborts"] == num_aborts + 1


def test_the_live_view_shows_steps_requests_and_preemption(
    served: Served, new_page: NewPage
) -> None:
    page = new_page(f"{url(served)}#live")
    expect(page.locator("#live-state")).to_have_text("Live")
    numbers = " ".join(map(str, range(40)))
    with paused(served):
        asked = [
            served.ask(
                500 - 10 * i,
                messages=[{"role": "user", "content": f"Count from {i} to 900. {numbers}"}],
            )
            for i in range(12)
        ]
        expect(page.locator("#tile-waiting")).to_have_text("12")
    for connection in asked:
        connection.getresponse().read()
        connection.close()
    expect(page.locator("#ways .phase.ended").first).to_be_visible()
    expect(page.locator("#tile-running")).to_have_text("0")
    expect(page.locator("#tile-preemptions")).to_have_text(re.compile(r"[1-9]\d*"))
    expect(page.locator("#ways rect.preempted").first).to_be_attached()
    expect(page.locator("#ways .detail").filter(has_text="preempted")).not_to_have_count(0)
    assert page.locator("#steps rect.decode").count() > 100
    page.get_by_role("slider").press("End")
    expect(page.locator("#step-detail")).to_contain_text(re.compile(r"Step [\d,]+, .* ago, took"))


def test_the_page_says_that_its_server_is_gone(new_page: NewPage, served: Served) -> None:
    page = new_page(f"{url(served)}#live")
    expect(page.locator("#live-state")).to_have_text("Live")
    page.context.set_offline(True)
    expect(page.locator("#live-state")).to_have_text(
        "The engine is gone: the server does not answer"
    )
    page.context.set_offline(False)
    expect(page.locator("#live-state")).to_have_text("Live")


@pytest.mark.skipif(not PICTURES, reason="NANOCORE_SCREENSHOTS names no folder")
def test_a_picture_of_the_live_view_under_load(served: Served, new_page: NewPage) -> None:
    page = new_page(f"{url(served)}#live", viewport={"width": 1280, "height": 960})
    page.get_by_label("Time shown").select_option("1")
    is_over = threading.Event()
    numbers = [str(number) for number in range(200)]

    def ask(place: int) -> None:
        for i in range(place, 1_000_000, NUM_CLIENTS):
            if is_over.is_set():
                return
            words = " ".join(numbers[: 37 * i % 150])
            messages = [{"role": "user", "content": f"Count from {i} to 900. {words}"}]
            answered(served.ask(60 + 53 * i % 400, messages=messages))

    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        asking = [threads.submit(ask, place) for place in range(NUM_CLIENTS)]
        try:
            expect(page.locator("#ways rect.preempted")).not_to_have_count(0)
            expect(page.locator("#steps .preempted-dot")).not_to_have_count(0)
            page.mouse.move(500, 350)
            expect(page.locator("#step-detail")).to_contain_text("Step")
            picture(page, "live")
            page.emulate_media(color_scheme="dark")
            picture(page, "live-dark")
        finally:
            is_over.set()
    for one in asking:
        one.result()
