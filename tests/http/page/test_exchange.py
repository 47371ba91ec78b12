"""Conversations have names, are searched, and leave and enter the browser as files."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.http.page.conftest import NewPage, say
from tests.http.page.scripted_server import ScriptedServer, end
from tests.http.page.test_storage import ANSWER, BROKEN, QUESTION, kept, put

pytestmark = pytest.mark.campaign
CODE = "```\nx\n```"


def converse(scripted: ScriptedServer, page: Page, *turns: tuple[str, str]) -> None:
    for question, answer in turns:
        scripted.answer_with([{"content": answer}, *end()])
        say(page, question)
        expect(page.locator("#send")).to_have_text("Send")


def choose(page: Page, item: str) -> None:
    page.get_by_role("button", name="More about this conversation").click()
    page.get_by_role("button", name=item).click()


def exported(page: Page) -> str:
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    assert download.value.suggested_filename == "conversations.json"
    return download.value.path().read_text("utf-8")


def take(page: Page, text: str, name: str = "some.json") -> str:
    """Import a file's text; returns what the page says of it."""
    note = page.locator("#import-note")
    note.evaluate("note => (note.textContent = '')")
    payload = {"name": name, "mimeType": "application/json", "buffer": text.encode()}
    page.locator("#import-file").set_input_files(payload)  # type: ignore[arg-type]
    expect(note).not_to_be_empty()
    return note.inner_text()


def test_a_conversation_is_renamed_and_has_its_first_words_again(
    scripted: ScriptedServer, page: Page
) -> None:
    converse(scripted, page, ("first words", "Hello."))
    for name, shown in (("  my name ", "my name"), ("", "first words")):
        choose(page, "Rename")
        field = page.get_by_role("textbox", name="Name")
        expect(field).to_be_focused()
        field.fill(name)
        field.press("Enter")
        expect(page.locator("#title")).to_have_text(shown)
        expect(page.locator(".entry")).to_have_text([shown])
        page.reload()
        expect(page.locator(".entry")).to_have_text([shown])
        page.locator(".entry").click()
    choose(page, "Rename")
    page.keyboard.press("Escape")
    expect(page.locator("#title")).to_have_text("first words")


def test_search_finds_titles_and_texts(page: Page) -> None:
    put(
        page,
        {
            "a": {"messages": [QUESTION, ANSWER | {"content": "Of MARS and more"}]},
            "b": {"messages": [QUESTION], "title": "Trip to Mars", "updatedMs": 2},
            "c": {"messages": [QUESTION | {"content": "Venus"}], "updatedMs": 3},
        },
    )
    entries = page.locator(".entry")
    expect(entries).to_have_text(["Venus", "Trip to Mars", "a"])
    search = page.get_by_label("Search the conversations")
    search.fill("mars ")
    expect(entries).to_have_text(["Trip to Mars", "a"])
    expect(page.locator("#search-found")).to_have_text("2 of 3 have “mars”.")
    entries.last.click()
    expect(page.locator(".markdown")).to_have_text("Of MARS and more")
    expect(entries).to_have_count(2)
    search.fill("")
    expect(entries).to_have_count(3)


def test_one_conversation_is_exported_as_markdown(scripted: ScriptedServer, page: Page) -> None:
    converse(scripted, page, ("What is x/y?", f"See\n\n{CODE}"), ("And z?", "*z*"))
    with page.expect_download() as download:
        choose(page, "Export as Markdown")
    assert download.value.suggested_filename == "What-is-x-y.md"
    text = download.value.path().read_text("utf-8")
    assert text == (
        f"# What is x/y?\n\n## You\n\nWhat is x/y?\n\n## Answer\n\nSee\n\n{CODE}\n\n"
        "## You\n\nAnd z?\n\n## Answer\n\n*z*\n"
    )


def test_all_conversations_go_to_another_browser_and_nothing_there_is_overwritten(
    scripted: ScriptedServer, page: Page, new_page: NewPage
) -> None:
    expect(page.get_by_role("button", name="Export all")).to_be_disabled()
    converse(scripted, page, ("one", "Re: one"))
    page.get_by_role("button", name="New conversation").click()
    converse(scripted, page, ("two", "Re: two"))
    text = exported(page)
    assert take(page, text) == "Imported 0. 2 were here already."
    other = new_page(scripted.url)
    assert take(other, text) == "Imported 2."
    entries = other.locator(".entry")
    expect(entries).to_have_text(["two", "one"])
    entries.last.click()
    expect(other.locator(".markdown")).to_have_text("Re: one")
    converse(scripted, other, ("three", "Re: three"))
    assert take(other, text) == "Imported 1. 1 were here already."
    expect(entries).to_have_text(["one", "two", "one"])
    entries.first.click()
    expect(other.locator(".message.user .text")).to_have_text(["one", "three"])


def export_of(*conversations: Any, **fields: Any) -> str:
    return json.dumps(
        {"format": "nanocore.conversations", "version": 1, "conversations": conversations} | fields
    )


GOOD = {"id": "good", "updatedMs": 1, "messages": [QUESTION, ANSWER]}
REFUSED = [
    "",
    "[]",
    "null",
    "{",
    export_of(GOOD, version=2),
    export_of(GOOD, format="other"),
    export_of(GOOD, GOOD | {"id": "../x"}),
    export_of(GOOD, GOOD | {"title": 5}),
    export_of(GOOD, GOOD | {"id": None}),
    export_of(GOOD, GOOD | {"id": 5}),
    export_of(conversations={"good": GOOD}),
    *(
        export_of(GOOD, {"id": "bad", "updatedMs": 1} | one if isinstance(one, dict) else one)
        for one in BROKEN
        if one != {"messages": [QUESTION], "id": "another"}
    ),
]


def test_a_file_that_is_no_export_is_refused_as_a_whole(page: Page) -> None:
    for text in REFUSED:
        told = take(page, text)
        assert told.startswith("Not imported: some.json is no export of this page"), text
    large = take(page, export_of(GOOD) + " " * 10_000_000)
    assert large == "Not imported: some.json is larger than 10 MB."
    title = take(page, export_of(GOOD, GOOD | {"title": "x" * 201}))
    assert title == "Not imported: a title in some.json is longer than 200 characters."
    assert kept(page) == []
    assert take(page, export_of(GOOD)) == "Imported 1."


def test_an_import_lets_no_conversation_go(page: Page) -> None:
    put(page, {f"old-{i}": {"updatedMs": 10 + i, "messages": [QUESTION]} for i in range(49)})
    told = take(page, export_of(*(GOOD | {"id": f"new-{i}"} for i in range(3))))
    assert told == "Imported 1. No room for 2."
    assert len(kept(page)) == 50


def test_an_import_says_what_is_too_long(page: Page) -> None:
    long = {"id": "long", "messages": [QUESTION, ANSWER | {"content": "x" * 2_000_000}]}
    told = take(page, export_of(GOOD, GOOD | long))
    assert told == "Imported 1. 1 longer than 2,000,000 characters."
    assert len(kept(page)) == 1


def test_the_note_of_an_import_goes_when_the_next_begins(page: Page) -> None:
    assert take(page, export_of(GOOD)) == "Imported 1."
    page.evaluate("() => { Blob.prototype.text = () => new Promise(() => {}) }")
    payload = {"name": "a.json", "mimeType": "application/json", "buffer": b"{}"}
    page.locator("#import-file").set_input_files(payload)  # type: ignore[arg-type]
    expect(page.locator("#import-note")).to_be_empty()


def test_an_import_is_as_old_as_its_messages(page: Page) -> None:
    put(page, {"here": {"updatedMs": 100, "messages": [QUESTION | {"content": "here"}]}})
    future = {"id": "f", "updatedMs": 1e15, "messages": [QUESTION | {"content": "future"}]}
    take(page, export_of(GOOD, future))
    expect(page.locator(".entry")).to_have_text(["future", "here", "a"])
    ages = "Object.values(localStorage).map(text => JSON.parse(text).updatedMs > Date.now())"
    assert page.evaluate(ages) == [False, False, False]
