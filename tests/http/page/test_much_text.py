"""Much text of a model on the page: it neither holds the page up nor widens it."""

from __future__ import annotations

import itertools

import pytest
from playwright.sync_api import Page, expect

from tests.http.page.scripted_server import ScriptedServer
from tests.http.page.test_text import answered, assert_is_the_same_when_opened_again

pytestmark = pytest.mark.campaign

CELLS = "|1" * 60 + "|\n"
MUCH = {
    "table": CELLS + "|-" * 60 + "|\n" + CELLS * 3000,
    "code": "```py\nx = 1\n```\n\n" * 15_000,
    "headings": "# *a*\n" * 30_000,
    "lines": "a\n" * 9999 + "\n" + "a\n" * 9999,
    "links": ("http://a " * 2000 + "\n\n") * 5,
    "formulas": "$x$ " * 4000 + "\n\n" + "$x$ " * 4000,
}


def test_text_of_any_length_neither_widens_the_page_nor_holds_it_up(
    scripted: ScriptedServer, page: Page
) -> None:
    answered(scripted, page, "x" * 200_000, "\n\n```\n", "y" * 200_000, "\n```\n\n", "*a " * 50_000)
    expect(page.locator(".markdown > *")).to_have_count(3)
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= page.evaluate("document.documentElement.clientWidth")
    log = page.locator("#log").evaluate("log => [log.scrollWidth, log.clientWidth]")
    assert log[0] <= log[1]


def test_much_of_anything_is_shown_in_time(scripted: ScriptedServer, page: Page) -> None:
    much = [
        "[" * 20_000, "*a " * 6000, "$a " * 6000, "![](" * 5000, "\\[\n" * 20_000, "$$\n" * 20_000,
        "> " * 10_000 + "x", "- " * 10_000 + "x", "- 1\n" * 20_000, "a" + "`" * 20_000,
        "|" * 20_000, "|a|b|\n|-|-|\n" + "|1|2|\n" * 5000, "http://a" * 2000, "[a]: b\n" * 5000,
    ]  # fmt: skip
    for text in much:
        answered(scripted, page, f"{text}\n\n", "Its end.")
        ending = "[...document.querySelectorAll('.markdown')].at(-1).textContent.slice(-8)"
        assert page.evaluate(ending) == "Its end."


@pytest.mark.parametrize("kind", MUCH)
def test_what_is_too_much_is_plain_text(scripted: ScriptedServer, page: Page, kind: str) -> None:
    first = "See [the page][1].\n\n"
    text = f"{first}{MUCH[kind]}\n\n**Its end.** [1]\n\n[1]: https://a.example/one\n"
    cuts = [0, 10, len(text) // 50, len(text) // 2, len(text) // 2 + 1, len(text)]
    answered(scripted, page, *(text[a:b] for a, b in itertools.pairwise(cuts)))
    expect(page.locator(".markdown > .hint")).to_have_text(
        "Shown as plain text from here on: too much to format."
    )
    expect(page.locator(".markdown > p").first).to_have_text("See the page.")  # at the end
    shown = page.locator(".markdown").evaluate(
        "view => [view.querySelectorAll('*').length, view.lastChild.textContent]"
    )
    assert shown[0] <= 30_000
    assert shown[1] == text[-len(shown[1]) :]
    assert shown[1].count("\n") > 1
    assert_is_the_same_when_opened_again(page)


def test_what_becomes_less_is_formatted_in_the_end(scripted: ScriptedServer, page: Page) -> None:
    answered(scripted, page, "a\n" * 9999, "a" * 10_000, "\n\n**b**")
    expect(page.locator(".markdown strong")).to_have_text("b")
    expect(page.locator(".markdown .plain")).to_have_count(0)
    assert_is_the_same_when_opened_again(page)
