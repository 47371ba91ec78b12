"""A browser for the page, and what holds for every test in it.

It is the system's chromium or chrome, without a window; where there is none the tests are skipped.
Whatever a test does, the page talks to its own origin alone, and nothing goes wrong in its console.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.cli.served import Served, serving
from tests.http.page.scripted_server import Gate, Part, ScriptedServer, scripted_server

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]  # fmt: skip
WIDE = {"width": 1280, "height": 800}
PATIENCE_MS = 30_000
STATUS = re.compile(r"Failed to load resource: the server responded with a status of \d+|ERR_")
"""What the browser says by itself of answers that are errors, and of broken connections."""
NewPage = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for the tests of a file: its driver has the event loop of their thread."""
    found = filter(None, [os.environ.get("CHROMIUM"), *map(shutil.which, BROWSERS)])
    chromium = next(found, None)
    if chromium is None:
        pytest.skip(f"no browser is installed: {', '.join(BROWSERS)}")
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def new_page(browser: Browser) -> Iterator[NewPage]:
    """Opens a page at a URL, in a browser without a past. has_clock: its time is the test's, and
    stands still until that turns it. settings: the context's."""
    contexts: list[BrowserContext] = []
    pages: list[tuple[str, list[str], list[str]]] = []

    def open_page(url: str, has_clock: bool = False, **settings: Any) -> Page:
        context = browser.new_context(**{"viewport": WIDE, "reduced_motion": "reduce", **settings})
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        asked: list[str] = []
        wrong: list[str] = []
        context.on("request", lambda request: asked.append(request.url))
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "console",
            lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None,
        )
        pages.append((url, asked, wrong))
        if has_clock:
            page.clock.install(time=0)
            page.clock.pause_at(1)
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    for url, asked, wrong in pages:
        assert {urlsplit(one)[:2] for one in asked} == {urlsplit(url)[:2]}
        assert [text for text in wrong if not STATUS.search(text)] == []


@pytest.fixture(scope="module")
def _scripted() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield server


@pytest.fixture
def scripted(_scripted: ScriptedServer) -> ScriptedServer:
    """A file's one server, which has forgotten the test before."""
    _scripted.forget()
    return _scripted


@pytest.fixture
def page(scripted: ScriptedServer, new_page: NewPage) -> Page:
    """The scripted server's, once it knows the model."""
    opened = new_page(scripted.url)
    expect(opened.locator("#model")).to_have_text("scripted")
    return opened


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """`nanocore serve` with the demo model, and little KV memory."""
    flags = ("--num-gpu-blocks-override", "140", "--max-num-seqs", "8")
    with serving(*flags, "--served-model-name", "demo") as server:
        server.line("ready:")
        yield server


def say(page: Page, text: str) -> None:
    """Send a message."""
    field = page.get_by_label("Message", exact=True)
    field.fill(text)
    field.press("Enter")


def begin(scripted: ScriptedServer, page: Page, *later: Sequence[Part]) -> None:
    """Send "Go", and have an answer that begins and goes no further; then come the later ones."""
    scripted.answer_with([{"content": "It begins"}, Gate()], *later)
    say(page, "Go")
    expect(page.locator(".markdown")).to_have_text("It begins")
