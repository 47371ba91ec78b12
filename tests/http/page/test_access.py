"""The page for everybody: by keyboard alone, in both themes, narrow and enlarged, for readers."""

from __future__ import annotations

import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.http.page.conftest import NewPage, say
from tests.http.page.live_answers import live_answer
from tests.http.page.scripted_server import Gate, Part, Refusal, ScriptedServer, end

pytestmark = pytest.mark.campaign

CALL = {"index": 0, "id": "c", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
RICH: list[Part] = [
    {"reasoning_content": "Let me think."},
    {"content": "# Title\n\nSome `code` and **bold**, $x^2$.\n\n- a\n- [x] b\n\n"},
    {"content": "> A [quote](https://a.example)\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n"},
    {"content": "```py\n# c\nclass A(B):\n    x = f(1, 'a', None)\n```\n"},
    {"tool_calls": [CALL]},
    *end("tool_calls"),
]
AUDITED = [
    pytest.param("light", 1280, 800, id="wide, light"),
    pytest.param("dark", 1280, 800, id="wide, dark"),
    pytest.param("dark", 360, 740, id="phone"),
    pytest.param("light", 640, 400, id="enlarged"),  # 1280 by 800 at 200 %
]
FOCUSED = """() => {
    const { activeElement: element } = document;
    const style = getComputedStyle(element);
    const isSeen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
    const words = element.getAttribute("aria-label") || element.textContent.trim();
    return [element === document.body ? "" : element.id || words, isSeen];
}"""


def test_everything_is_reached_and_done_by_keyboard(scripted: ScriptedServer, page: Page) -> None:
    keyboard = page.keyboard
    keyboard.press("Tab")
    expect(page.get_by_text("Skip to the message field")).to_be_focused()
    keyboard.press("Enter")
    field = page.get_by_label("Message", exact=True)
    expect(field).to_be_focused()
    scripted.answer_with([{"content": "It begins"}, Gate()], RICH)
    keyboard.type("Hello")
    keyboard.press("Shift+Enter")
    keyboard.type("there")
    keyboard.press("Enter")
    expect(page.locator(".markdown")).to_have_text("It begins")
    expect(field).to_be_focused()
    keyboard.press("Escape")
    assert scripted.left.wait(30)
    assert scripted.bodies[0]["messages"][0]["content"] == "Hello\nthere"
    tab_to(page, "Regenerate", back=True)
    keyboard.press("Enter")
    expect(page.get_by_role("button", name="Send the result")).to_be_visible()
    expect(field).to_be_focused()
    tab_to(page, "Reasoning", back=True)
    keyboard.press("Space")
    expect(page.get_by_text("Let me think.")).to_be_visible()
    tab_to(page, "show-settings", back=True)
    keyboard.press("Enter")
    expect(page.get_by_label("System prompt")).to_be_focused()
    keyboard.press("Escape")
    expect(page.locator("#show-settings")).to_be_focused()
    expect(page.locator("#settings")).to_be_hidden()
    tab_to(page, "to-live", back=True)
    keyboard.press("Enter")
    expect(page.locator("#live")).to_be_visible()
    tab_to(page, "steps")
    keyboard.press("End")


def tab_to(page: Page, name: str, back: bool = False) -> None:
    """Press Tab until this is focused: its id, or its words; whatever is on the way is seen."""
    passed = []
    for _ in range(60):
        page.keyboard.press("Shift+Tab" if back else "Tab")
        focused, is_seen = page.evaluate(FOCUSED)
        assert is_seen or not focused, f"{focused} does not show that it has the focus"
        passed.append(focused)
        if focused == name:
            return
    raise AssertionError(f"no {name!r} in {passed}")


@pytest.mark.parametrize(("scheme", "width", "height"), AUDITED)
def test_an_audit_finds_nothing_and_nothing_is_wider_than_the_window(
    scripted: ScriptedServer, new_page: NewPage, scheme: str, width: int, height: int
) -> None:
    """Of names, roles, landmarks, contrast; whatever is open."""
    scripted.live = live_answer()
    scripted.answer_with(Refusal(429, "too many", 3), RICH)
    size = {"width": width, "height": height}
    page = new_page(scripted.url, color_scheme=scheme, viewport=size)
    expect(page.locator("#model")).to_have_text("scripted")
    check(page)
    say(page, "Hi")
    expect(page.locator(".notice.failed")).to_be_visible()
    say(page, "Hi")
    expect(page.get_by_role("button", name="Send the result")).to_be_visible()
    for summary in page.locator("summary").filter(visible=True).all():
        summary.click()
    expect(page.locator(".hljs-comment")).to_be_attached()
    check(page)
    page.get_by_role("button", name="More about this conversation").click()
    check(page)
    page.get_by_role("button", name="Rename").click()
    check(page)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Edit", exact=True).first.click()
    expect(page.get_by_label("Edit the message")).to_be_focused()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Tools").fill("[")
    check(page)
    page.get_by_role("button", name="Close").last.click()
    page.get_by_role("link", name="Live").click()
    expect(page.locator("#ways li").first).to_be_visible()
    page.get_by_role("slider").press("End")
    check(page)


def check(page: Page) -> None:
    found = Axe().run(page).response["violations"]
    told = [
        (one["id"], one["help"], [(node["html"], node["failureSummary"]) for node in one["nodes"]])
        for one in found
    ]
    assert told == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_phone_has_its_panels_on_demand(scripted: ScriptedServer, new_page: NewPage) -> None:
    scripted.answer_with([{"content": "Hello."}, *end()])
    page = new_page(scripted.url, viewport={"width": 360, "height": 740})
    say(page, "Hi")
    expect(page.locator(".markdown")).to_have_text("Hello.")
    expect(page.get_by_label("Message", exact=True)).to_be_in_viewport(ratio=1)
    expect(page.locator("#send")).to_be_in_viewport(ratio=1)
    entry = page.locator(".entry")
    expect(entry).to_be_hidden()
    opener = page.locator("#show-conversations")
    opener.click()
    expect(entry).to_be_in_viewport()
    expect(opener).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("Escape")
    expect(entry).to_be_hidden()
    expect(opener).to_be_focused()
    opener.click()
    entry.click()
    expect(entry).to_be_hidden()


def test_the_theme_is_the_systems_until_one_is_chosen(
    scripted: ScriptedServer, new_page: NewPage
) -> None:
    page = new_page(scripted.url, color_scheme="dark")
    theme = page.locator("#theme")
    expect(theme).to_have_text("Theme: auto")
    assert ground(page) < 60
    page.emulate_media(color_scheme="light")
    assert ground(page) > 200
    for words, is_dark in (("Theme: light", False), ("Theme: dark", True)):
        theme.click()
        expect(theme).to_have_text(words)
        assert (ground(page) < 60) is is_dark
    page.reload()
    expect(theme).to_have_text("Theme: dark")
    assert ground(page) < 60
    theme.click()
    expect(theme).to_have_text("Theme: auto")
    assert ground(page) > 200


def ground(page: Page) -> int:
    """How bright the page's ground is, of 255."""
    colour = page.locator("body").evaluate("body => getComputedStyle(body).backgroundColor")
    return int(re.findall(r"\d+", colour)[0])


def test_nothing_moves_for_those_who_want_it_still(
    scripted: ScriptedServer, new_page: NewPage
) -> None:
    moving = "document.getAnimations({ subtree: true }).length"
    for motion, moves in (("no-preference", True), ("reduce", False)):
        gate = Gate()
        scripted.answer_with([{"content": "Hello"}, gate, *end()])
        page = new_page(scripted.url, reduced_motion=motion)
        say(page, "Hi")
        expect(page.locator(".markdown")).to_have_text("Hello")
        assert (page.evaluate(moving) > 0) is moves
        gate.open()
        expect(page.locator("#send")).to_have_text("Send")
