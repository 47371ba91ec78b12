"""Text of a model on the page: the Markdown that is shown, and all else that stays text."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.http.page.conftest import say
from tests.http.page.scripted_server import ScriptedServer, end

pytestmark = pytest.mark.campaign

MARKDOWN = """# A title #

Some **bold**, *italic*, ***both***, `co**de`, snake_case_name, 2*3*4, \\*stars\\*.
Second line.

1. one
   ```py
   x = 1
     y
   ```
2. two
   - deep
   - deeper

~~~
<b>
~~~
"""
SHOWN = [
    ("h3", "A title"),
    ("p strong", "bold"),
    ("p > em", "italic"),
    ("p strong em", "both"),
    ("p > code", "co**de"),
    ("ol[start='2'] > li > ul > li", "deep"),
    (".code-block[dir], .code-block pre code", "x = 1\n  y"),
]
HOSTILE = [
    "<img src=x onerror=\"window.hurt = 'img'\">",
    "<script>window.hurt = 'script'</script>",
    "<svg onload=\"window.hurt = 'svg'\"></svg><iframe src='https://evil.example'></iframe>",
    "[click](javascript:window.hurt='link') ![image](https://evil.example/a.png)",
    "<https://evil.example> https://evil.example &lt;b&gt; &#60;b&#62;",
    "</div></main></body><style>* { display: none }</style>",
    "\u202eright to left\u202c \u0645\u0631\u062d\u0628\u0627",
    "**unclosed *marks `of all _kinds",
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "\0\u0008\ufffd\ud83d",
]


def answered(scripted: ScriptedServer, page: Page, *pieces: str) -> None:
    scripted.answer_with([*[{"content": piece} for piece in pieces], *end()])
    say(page, "Hi")
    expect(page.locator("#send")).to_have_text("Send")


def test_markdown_is_shown_as_it_comes_and_at_its_end(scripted: ScriptedServer, page: Page) -> None:
    answered(scripted, page, *MARKDOWN)  # a character at a time
    for selector, text in SHOWN:
        shown = page.locator(f".markdown {selector}").first
        assert shown.evaluate("element => element.firstChild.textContent") == text
    paragraph = page.locator(".markdown p").first
    expect(paragraph).to_contain_text("snake_case_name, 2*3*4, *stars*.")
    expect(page.locator(".markdown pre code").last).to_have_text("<b>")
    streamed = page.locator(".markdown").evaluate("element => element.outerHTML")
    page.reload()
    page.locator(".entry").click()
    assert page.locator(".markdown").evaluate("element => element.outerHTML") == streamed


def test_code_is_copied_as_it_is(scripted: ScriptedServer, page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answered(scripted, page, MARKDOWN)
    copy = page.locator(".code-block").first.get_by_role("button")
    copy.click()
    expect(copy).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1\n  y"


@pytest.mark.parametrize("place", ["content", "reasoning_content", "name", "arguments"])
def test_hostile_text_stays_text(scripted: ScriptedServer, page: Page, place: str) -> None:
    text = "\n\n".join(HOSTILE)
    delta: dict[str, object] = {place: text}
    if place in ("name", "arguments"):
        function = {"name": "f", "arguments": ""} | {place: text}
        delta = {"tool_calls": [{"index": 0, "id": "c", "function": function}]}
    scripted.answer_with([delta, *end()])
    say(page, text)
    expect(page.locator("#send")).to_have_text("Send")
    for summary in page.locator("summary").filter(visible=True).all():
        summary.click()
    everything = page.locator("#log").evaluate("log => log.textContent")
    for hostile in HOSTILE[:6]:
        assert everything.count(hostile) >= 2, "in the question and in the answer"
    made = page.locator("#log").locator("img, script, svg, iframe, a, style, object, embed")
    assert made.count() == 0
    assert page.evaluate("window.hurt") is None
    assert page.title() == "nanocore"


def test_text_of_any_length_neither_widens_the_page_nor_holds_it_up(
    scripted: ScriptedServer, page: Page
) -> None:
    answered(scripted, page, "x" * 200_000, "\n\n```\n", "y" * 200_000, "\n```\n\n", "*a " * 50_000)
    expect(page.locator(".markdown > *")).to_have_count(3)
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= page.evaluate("document.documentElement.clientWidth")
    log = page.locator("#log").evaluate("log => [log.scrollWidth, log.clientWidth]")
    assert log[0] <= log[1]


def test_text_from_right_to_left_has_its_direction(scripted: ScriptedServer, page: Page) -> None:
    answered(scripted, page, "\u0645\u0631\u062d\u0628\u0627\n\nhello")
    directions = page.locator(".markdown p").evaluate_all(
        "all => all.map(p => getComputedStyle(p).direction)"
    )
    assert directions == ["rtl", "ltr"]
