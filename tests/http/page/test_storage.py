"""Conversations in the browser's storage: its bounds, what goes for what, two tabs, broken ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.http.page.conftest import begin, say
from tests.http.page.scripted_server import Gate, Part, Refusal, ScriptedServer, end

pytestmark = pytest.mark.campaign

QUOTA_CHARS = 5 * 2**20  # Chromium's, keys included
PREFIX = "nanocore.chat."
FIGURES = dict.fromkeys(
    ("ttftMs", "tokensPerS", "promptTokens", "cachedTokens", "outputTokens"), None
)
QUESTION: dict[str, Any] = {"role": "user", "content": "a"}
ANSWER: dict[str, Any] = {
    "role": "assistant",
    "content": "b",
    "reasoning": "",
    "toolCalls": [],
    "finishReason": "stop",
    "ending": None,
    "figures": FIGURES,
}
BROKEN: list[Any] = [
    None,
    5,
    [],
    {"id": 5},
    {"messages": 5},
    {"messages": [QUESTION], "updatedMs": "now"},
    {"messages": [QUESTION], "id": "another"},
    {"messages": [None]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    {"messages": [{"role": "robot", "content": "a"}]},
    {"messages": [{"role": "tool", "content": "a"}]},
    {"messages": [QUESTION, {"role": "assistant", "content": "b"}]},
    {"messages": [QUESTION, ANSWER | {"toolCalls": 5}]},
    {"messages": [QUESTION, ANSWER | {"toolCalls": [{"id": "c", "function": None}]}]},
    {"messages": [QUESTION, ANSWER | {"figures": None}]},
    {"messages": [QUESTION, ANSWER | {"figures": FIGURES | {"ttftMs": "5"}}]},
    {"messages": [QUESTION, ANSWER | {"ending": {"kind": "failed"}}]},
]


def answer(text: str) -> list[Part]:
    return [{"content": text}, *end()]


def store(page: Page, *sizes: int) -> None:
    """Keep a conversation of so many characters each, from another tab as it were, oldest first."""
    put(
        page,
        {
            f"old-{i}": {
                "updatedMs": i,
                "messages": [{"role": "user", "content": f"talk {i} " + "x" * size}],
            }
            for i, size in enumerate(sizes)
        },
    )


def put(page: Page, values: dict[str, Any]) -> None:
    """Into the storage, by id, and have the page look there."""
    texts = {
        PREFIX + key: json.dumps(
            {"id": key, "updatedMs": 1} | value if isinstance(value, dict) else value
        )
        for key, value in values.items()
    }
    page.evaluate("texts => { for (const key in texts) localStorage[key] = texts[key]; }", texts)
    page.reload()


def fill_quota(page: Page, left: int) -> int:
    """As another program of this address would. Leaves so many characters; returns its own."""
    used = page.evaluate(
        "Object.entries(localStorage).reduce((sum, [k, v]) => sum + k.length + v.length, 0)"
    )
    other: int = QUOTA_CHARS - used - left - len("other")
    page.evaluate("chars => localStorage.setItem('other', 'x'.repeat(chars))", other)
    return other


def paste(page: Page, text: str, times: int) -> None:
    """Send much at once."""
    field = page.get_by_label("Message", exact=True)
    field.evaluate("(field, [text, times]) => (field.value = text.repeat(times))", [text, times])
    field.press("Enter")


def kept(page: Page) -> list[str]:
    """The beginnings of what storage has, the newest first, whatever the list shows."""
    found = page.evaluate(
        f"Object.keys(localStorage).filter(key => key.startsWith('{PREFIX}'))"
        ".map(key => JSON.parse(localStorage[key])).sort((a, b) => b.updatedMs - a.updatedMs)"
        ".map(one => one.messages[0].content.slice(0, 6))"
    )
    return list(found)


def note(page: Page) -> Locator:
    return page.locator("#chat-note")


def ended(page: Page) -> None:
    expect(page.locator("#send")).to_have_text("Send")


def test_a_conversation_that_is_too_long_is_not_kept_and_no_other_goes_for_it(
    scripted: ScriptedServer, page: Page
) -> None:
    store(page, 10, 10, 10)
    scripted.answer_with(answer("Long."))
    paste(page, "word ", 420_000)
    expect(note(page)).to_contain_text("too long to store")
    expect(page.locator(".markdown")).to_have_text("Long.")
    assert kept(page) == ["talk 2", "talk 1", "talk 0"]
    page.get_by_role("button", name="New conversation").click()
    expect(note(page)).to_be_empty()


def test_only_what_an_answer_came_to_makes_others_go_and_no_more_than_it_needs(
    scripted: ScriptedServer, page: Page
) -> None:
    store(page, 900_000, 500_000, 500_000)
    scripted.answer_with(Refusal(400, "too many tokens"), answer("Now."))
    paste(page, "longer", 50_000)
    expect(page.locator(".notice.failed")).to_have_text("400: too many tokens")
    expect(note(page)).to_contain_text("storage is full")
    assert kept(page) == ["talk 2", "talk 1", "talk 0"]
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".markdown")).to_have_text("Now.")
    expect(note(page)).to_be_empty()
    assert kept(page) == ["longer", "talk 2", "talk 1"]


def test_where_others_have_filled_the_storage_only_what_makes_room_goes(
    scripted: ScriptedServer, page: Page
) -> None:
    store(page, 2000, 2000, 2000)
    other = fill_quota(page, left=100)
    scripted.answer_with(answer("No."), answer("Yes."))
    paste(page, "larger", 2000)
    expect(page.locator(".markdown")).to_have_text("No.")
    expect(note(page)).to_contain_text("storage is full")
    assert kept(page) == ["talk 2", "talk 1", "talk 0"], "all of them would not be enough"
    page.get_by_role("button", name="New conversation").click()
    paste(page, "little", 400)
    expect(page.locator(".markdown")).to_have_text("Yes.")
    expect(note(page)).to_be_empty()
    assert kept(page) == ["little", "talk 2"]
    assert page.evaluate("localStorage.other.length") == other
    assert page.evaluate("Object.keys(localStorage).length") == 3


def test_what_cannot_be_read_is_left_out_and_the_page_works(
    scripted: ScriptedServer, page: Page
) -> None:
    good = {"updatedMs": 5, "messages": [QUESTION | {"content": "good"}, ANSWER]}
    put(page, {f"broken-{i}": value for i, value in enumerate(BROKEN)} | {"good": good})
    entries = page.locator(".entry")
    expect(entries).to_have_text(["good"])
    scripted.answer_with(answer("Hello."))
    say(page, "Hi")
    expect(page.locator(".markdown")).to_have_text("Hello.")
    expect(entries).to_have_text(["Hi", "good"])
    entries.last.click()
    expect(page.locator(".markdown")).to_have_text("b")


def test_two_tabs_with_a_conversation_see_each_others_turns_and_lose_none(
    scripted: ScriptedServer, page: Page
) -> None:
    scripted.answer_with(answer("Re: base"), answer("Re: one"))
    say(page, "base")
    ended(page)
    other = page.context.new_page()
    other.goto(scripted.url)
    other.locator(".entry").click()
    expect(other.locator(".markdown")).to_have_text("Re: base")
    say(page, "one")
    ended(page)
    expect(other.locator(".markdown")).to_have_text(["Re: base", "Re: one"])
    gate = Gate()
    scripted.answer_with(
        [{"content": "Re: "}, gate, {"content": "two"}, *end()], answer("Re: three")
    )
    say(page, "two")
    expect(page.locator(".markdown").last).to_have_text("Re:")
    expect(other.locator(".message.user")).to_have_count(3)
    say(other, "three")
    expect(other.locator(".markdown").last).to_have_text("Re: three")
    ended(other)
    gate.open()
    ended(page)
    expect(note(page)).to_contain_text("continues here as a copy")
    expect(page.locator(".message.user .text")).to_have_text(["base", "one", "two"])
    stored = page.evaluate(
        f"Object.keys(localStorage).filter(key => key.startsWith('{PREFIX}'))"
        ".map(key => JSON.parse(localStorage[key]).messages.at(-1).content).sort()"
    )
    assert stored == ["Re: three", "Re: two"]
    expect(other.locator(".entry")).to_have_count(2)


def test_what_is_being_written_stays_when_another_tab_goes_on(
    scripted: ScriptedServer, page: Page
) -> None:
    scripted.answer_with(answer("Re: base"), answer("Re: one"), answer("Re: edited"))
    say(page, "base")
    ended(page)
    other = page.context.new_page()
    other.goto(scripted.url)
    other.locator(".entry").click()
    other.get_by_role("button", name="Edit", exact=True).click()
    other.get_by_label("Edit the message").fill("edited")
    say(page, "one")
    ended(page)
    expect(other.get_by_label("Edit the message")).to_have_value("edited")
    other.get_by_label("Edit the message").press("Enter")
    expect(other.locator(".markdown")).to_have_text("Re: edited")
    expect(note(other)).to_contain_text("continues here as a copy")
    expect(page.locator(".entry")).to_have_count(2)
    expect(page.locator(".markdown")).to_have_text(["Re: base", "Re: one"])


def test_a_conversation_that_is_deleted_while_its_answer_comes_is_gone(
    scripted: ScriptedServer, page: Page
) -> None:
    begin(scripted, page)
    page.get_by_role("button", name="Delete Go").click()
    page.get_by_role("button", name="Really delete Go?").click()
    assert scripted.left.wait(30)
    expect(page.locator(".entry")).to_have_count(0)
    assert kept(page) == []
