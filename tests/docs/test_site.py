"""The documents as a site: links, what is in it, what is loaded, and what a browser shows."""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown import markdown
from playwright.sync_api import Page, expect, sync_playwright

from tests.docs.blocks import ROOT
from tests.http.page.conftest import FLAGS, PATIENCE_MS
from tools.docs_site import hook

LOADS = {
    "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src",
    "audio": "src", "embed": "src", "object": "data", "link": "href", "use": "href",
}  # fmt: skip
IN_REPOSITORY = {
    f"{name}.md" for name in ("README", "PROTOCOL", "ARCHITECTURE", "RELIABILITY", "CHANGELOG")
}


@pytest.mark.parametrize(
    ("text", "rewritten"),
    [
        ("[a](../PROTOCOL.md#6-x)", "[a](repository/PROTOCOL.md#6-x)"),
        ("[a](engine.md)", "[a](engine.md)"),
        ("[a](reference/README.md#x)", "[a](reference/README.md#x)"),
        ("[a](../clients/node)", "[a](repository/clients/node/README.md)"),
        ("[a](#here)", "[a](#here)"),
        ("[a](https://example.org/x.md)", "[a](https://example.org/x.md)"),
        ("[core.py](../nanocore/engine_core/core.py)", "`nanocore/engine_core/core.py`"),
        ("[`core.py`](../nanocore/engine_core/core.py)", "`nanocore/engine_core/core.py`"),
        (
            "[the loop](../nanocore/engine_core/core.py)",
            "the loop (`nanocore/engine_core/core.py`)",
        ),
        ("`[a](../PROTOCOL.md)`", "`[a](../PROTOCOL.md)`"),
        ("```text\n[a](../PROTOCOL.md)\n```\n", "```text\n[a](../PROTOCOL.md)\n```\n"),
        ("![a](../PROTOCOL.md)", "![a](../PROTOCOL.md)"),
    ],
)
def test_links_are_those_of_the_site(text: str, rewritten: str) -> None:
    assert hook.rewritten(text, "docs/http.md") == rewritten


def test_what_belongs_to_an_item_of_a_list_stays_there() -> None:
    text = "- a\n  b\n\n  ```sh\n  c\n  ```\n- d\n\n  | e |\n  |---|\n\nf\n  g\n"
    html = markdown(hook.with_wide_lists(text), extensions=["tables", "pymdownx.superfences"])
    assert re.sub(r"\s+", "", re.sub(r"</?(?:p|pre|code|span|div)[^>]*>", "", html)) == (
        "<ul><li>abc</li><li>d<table><thead><tr><th>e</th></tr></thead><tbody><tr><td></td></tr></tbody></table>"
        "</li></ul>fg"
    )
    assert hook.with_wide_lists("a\n  b\n") == "a\n  b\n"


def test_links_from_documents_that_were_brought_in() -> None:
    text = "[a](docs/http.md#endpoints), [b](PROTOCOL.md)"
    assert hook.rewritten(text, "README.md") == "[a](../http.md#endpoints), [b](PROTOCOL.md)"


def test_a_link_that_leads_nowhere_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.md"):
        hook.rewritten("[a](none.md)", "docs/http.md")


def test_every_document_is_in_the_site() -> None:
    ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert ours | IN_REPOSITORY <= set(hook.documents())


class Loading(HTMLParser):
    """What a browser would fetch for a page, in urls."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.urls += [value or "" for name, value in attrs if LOADS.get(tag) == name]
        self.urls += re.findall(r"url\(([^)]*)\)", dict(attrs).get("style") or "")


def is_outside(url: str) -> bool:
    return re.match(r"['\"]?(?:[a-z]+:)?//", url) is not None


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` does it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_nothing_of_the_site_is_loaded_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        text = page.read_text("utf-8")
        urls = Loading(text).urls
        assert urls
        assert [url for url in urls if is_outside(url)] == [], page
        assert 'class="mermaid"' not in text, "the theme fetches what draws it"
    for sheet in site.rglob("*.css"):
        urls = re.findall(r"(?:url\(|@import )\s*([^)\s;]+)", sheet.read_text("utf-8"))
        assert [url for url in urls if is_outside(url)] == [], sheet


@pytest.mark.campaign
def test_every_document_can_be_found_in_the_site(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    for document in hook.documents():
        place = hook.page_of(document).removesuffix(".md") + ".html"
        place = re.sub(r"(^|/)README\.html$", r"\1index.html", place)
        assert (site / place).exists()
        assert place in found, document
    text = (site / "http.html").read_text("utf-8")
    assert "<!-- not run" not in text


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Says nothing of requests."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def page(site: Path) -> Iterator[Page]:
    """Of the site, served as `make docs` says; where there is no chromium the tests are skipped."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium is installed")
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Quiet, directory=str(site))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
            base = f"http://127.0.0.1:{server.server_port}"
            opened = browser.new_page(base_url=base, viewport={"width": 1280, "height": 800})
            opened.set_default_timeout(PATIENCE_MS)
            yield opened
            browser.close()
        server.shutdown()


@pytest.mark.campaign
@pytest.mark.parametrize("flag", ["--max-num-seqs", "-tp", "--no-enable-prefix-caching"])
def test_a_flag_is_found_as_it_is_written(page: Page, flag: str) -> None:
    page.goto("/index.html")
    field = page.locator("[data-md-component=search-query]")
    field.click()
    page.keyboard.type(flag)
    found = page.locator(".md-search-result__meta")
    expect(found).to_contain_text(re.compile(r"\d+ matching documents"), timeout=PATIENCE_MS)
    word = re.compile(max(flag.split("-"), key=len), re.IGNORECASE)
    marked = page.locator(".md-search-result__item mark").filter(has_text=word)
    expect(marked.first).to_be_attached(timeout=PATIENCE_MS)


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["features", "coming-from"])
def test_what_is_to_be_compared_fits_a_screen(page: Page, name: str) -> None:
    page.goto(f"/{name}.html")
    room = page.locator("article").bounding_box()
    assert room is not None
    widths = page.evaluate(
        "[...document.querySelectorAll('table, pre > code')].map(e => e.scrollWidth)"
    )
    assert widths
    assert max(widths) <= room["width"]
