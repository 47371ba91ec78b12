"""Keys: when the page asks for one, what it does with it, and how it is changed and forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.cli.served import serving
from tests.http.page.conftest import NewPage, say
from tests.http.page.live_answers import live_answer
from tests.http.page.scripted_server import ScriptedServer, end

pytestmark = pytest.mark.campaign


def give(page: Page, key: str) -> None:
    expect(page.get_by_role("dialog")).to_be_visible()
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Save").click()


def test_a_key_is_asked_for_and_stays_in_the_tab(
    scripted: ScriptedServer, new_page: NewPage
) -> None:
    scripted.key = "right"
    page = new_page(scripted.url)
    dialog = page.get_by_role("dialog")
    for key in ("schl\u00fcssel", "wrong", "right"):
        expect(dialog).to_be_visible()
        expect(page.get_by_label("API key")).to_be_focused()
        page.get_by_label("API key").fill(key)
        page.keyboard.press("Enter")
        if key == "schl\u00fcssel":
            expect(dialog).to_contain_text("printable ASCII")
        if key == "wrong":
            expect(dialog).to_contain_text("Wrong key")
    expect(page.locator("#model")).to_have_text("scripted")
    expect(dialog).to_be_hidden()
    page.reload()
    expect(page.locator("#model")).to_have_text("scripted")
    assert "right" not in page.evaluate("JSON.stringify(localStorage)")
    scripted.key = "another"
    say(page, "Hi")
    expect(dialog).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator(".notice.failed")).to_contain_text("401: Wrong key")
    scripted.answer_with([{"content": "Hello."}, *end()])
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_label("API key").fill("another")
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".markdown")).to_have_text("Hello.")


def test_a_key_that_is_given_with_a_message_is_the_whole_pages(
    scripted: ScriptedServer, new_page: NewPage
) -> None:
    scripted.key = "right"
    page = new_page(scripted.url)
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#banner")).to_contain_text("401: no valid API key")
    scripted.answer_with([{"content": "Hello."}, *end()])
    say(page, "Hi")
    give(page, "right")
    expect(page.locator(".markdown")).to_have_text("Hello.")
    expect(page.locator("#model")).to_have_text("scripted")
    expect(page.locator("#banner")).to_be_empty()
    expect(page.locator(".assistant h3")).to_have_text("scripted")


def test_a_key_that_is_kept_can_be_changed_and_forgotten(
    scripted: ScriptedServer, new_page: NewPage
) -> None:
    scripted.key = "right"
    scripted.live = live_answer()
    page = new_page(scripted.url)
    give(page, "right")
    expect(page.locator("#model")).to_have_text("scripted")
    page.reload()
    expect(page.locator("#model")).to_have_text("scripted")
    page.get_by_role("button", name="Key", exact=True).click()
    page.get_by_role("button", name="Forget the key").click()
    expect(page.get_by_role("dialog")).to_be_hidden()
    assert page.evaluate("sessionStorage.length") == 0
    page.get_by_role("link", name="Live").click()
    expect(page.get_by_role("button", name="Forget the key")).to_be_hidden()
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#live-state")).to_contain_text("401")
    page.get_by_role("button", name="Key", exact=True).click()
    give(page, "right")
    expect(page.locator("#live-state")).to_have_text("Live")


def test_a_key_that_nothing_takes_is_no_trap(scripted: ScriptedServer, new_page: NewPage) -> None:
    scripted.key = "right"
    page = new_page(scripted.url)
    give(page, "x" * 70_000)
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("at most 8192 characters; this one has 70000")
    for status in (403, 431):
        scripted.key_status = status
        give(page, f"another-{status}")
        expect(dialog).to_contain_text(f"not with this key: {status}")
    give(page, "right")
    expect(page.locator("#model")).to_have_text("scripted")


def test_a_real_server_with_keys(new_page: NewPage, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("mine\n")
    keys.chmod(0o600)
    with serving("--api-key-file", str(keys), "--served-model-name", "demo") as server:
        server.line("ready:")
        page = new_page(f"http://{server.host}:{server.port}/")
        give(page, "other")
        expect(page.get_by_role("dialog")).to_contain_text("Wrong key")
        give(page, "mine")
        expect(page.locator("#model")).to_have_text("demo")
        say(page, "What is 123 + 456?")
        expect(page.locator(".markdown")).to_contain_text("579")
        page.get_by_role("link", name="Live").click()
        expect(page.locator("#live-state")).to_have_text("Live")
