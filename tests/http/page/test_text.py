"""Text of a model on the page: the Markdown that is shown, and all else that stays text."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.http.page.conftest import say
from tests.http.page.scripted_server import Gate, ScriptedServer, end

pytestmark = pytest.mark.campaign

MARKDOWN = """# A title #

Some **bold**, *italic*, ***both***, `co**de`, snake_case_name, 2 * 3 * 4, \\*stars\\*.
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

> quoted
> > deeper

- [x] done
- [ ] open

| left | centre | right |
|:-----|:------:|------:|
| `a`  | **b**  | 1 \\| 2 |

~~struck~~ [link](https://a.example/b "t") https://c.example/d. <mail@e.example>
![image *alt*](https://f.example/g.png) main.py [here](/v1/models) [![x](https://y.example)](https://z.example)

***
"""
SHOWN = [
    ("h3", "A title"),
    ("p strong", "bold"),
    ("p > em", "italic"),
    ("p em strong", "both"),
    ("p > code", "co**de"),
    ("ol > li:nth-child(2) > ul > li", "deep"),
    (".code-block pre", "x = 1\n  y"),
    ("blockquote > blockquote > p", "deeper"),
    ("th.center", "centre"),
    ("td.left > code", "a"),
    ("td.right", "1 | 2"),
    ("s", "struck"),
    ("a[href='https://a.example/b']", "link"),
    ("a[href='https://c.example/d']", "https://c.example/d"),
    ("a[href='mailto:mail@e.example']", "mail@e.example"),
    ("a[href='https://f.example/g.png']", "image *alt*"),
    ("a[href='https://z.example']", "x"),
]
CODE = "```python\n# one\ndef two(three: int) -> str:\n    return f'four {5}'\n```\n\nEnd."
FORMULAS = [
    ("$a_1*b*c$", "a1\u2217b\u2217c", False),
    ("so $x$, and", "x", False),
    (r"\(y^2\)", "y2", False),
    ("$$z$$", "z", True),
    ("\\[\nv\n- w\n\\]", "v\u2212w", True),
    ("- in a list:\n  $$\n  u\n  + t\n  $$", "u+t", True),
    ("| $r$ |\n|---|", "r", False),
    (r"$\boldsymbol{q}$", "q", False),
    ("Costs $5 and $10. Formula $k^2$, not $7", "k2", False),
    (r"$9\$$", "9$", False),
    (r"$l\kern-3em\hspace{2.5cm}\text{ 120 cm}$", "l 120 cm", False),
]
NO_FORMULAS = [
    "from $5 to $10", "US$5, CA$6", "$ a $", "a $ b$", "$a$5", r"\$a\$", "`$a$`", "$$\n\na$$",
    "```\n$$\na\n$$\n```", r"\[a", "$",
]  # fmt: skip
WRONG_FORMULAS = [
    r"$\frac{1$", r"$$\nosuch$$", r"$\href{javascript:alert(1)}{x}$",
    r"$$\raisebox{-9000em}{x}$$", r"$$\textcolor{red}{\rule{10000em}{10000em}}$$",
    r"$\kern{-9999em}x$", r"$\kern-99.5mu x$", r"$\hspace{-200em}\text{X}$", r"$$a\\[+ 100 pt]b$$",
    r"$\llap{x}$", r"$\rlap{x}$", r"$\mathrlap{x}$", r"$\eqref{views}$", r"$\ref{views}$",
    r"$$x\label{views}$$",
]  # fmt: skip
WIDE_FORMULAS = [
    r"$$\rule{90em}{90em}$$", r"$\rule{90em}{9em}$",
    r"$$" + r"\hspace{-2.9em}" * 90 + "x$$", "$" + r"\kern-2.9em" * 90 + "x$",
    r"$\smash{\rule{1em}{90em}}$", r"$$\smash{\rule{1em}{90em}}$$",
]  # fmt: skip
USUAL_FORMULAS = [
    r"$x^2$", r"$\frac{a}{b}$", r"$\hat{f}'_j$", r"$\sqrt{\sum_{i=1}^n x_i}$", r"$f$", r"$\vec{V}$",
    r"$\begin{pmatrix}a&b\\c&d\end{pmatrix}$", r"$\left(\frac{1}{1+\frac{1}{x}}\right)^2$",
]  # fmt: skip
LOADED = "performance.getEntriesByType('resource').map(one => one.name.split('/').at(-1))"
HOSTILE = [
    "<img src=x onerror=\"window.hurt = 'img'\">",
    "<script>window.hurt = 'script'</script>",
    "<svg onload=\"window.hurt = 'svg'\"></svg><iframe src='https://evil.example'></iframe>",
    "[click](javascript:window.hurt='link') ![image](data:image/png;base64,AAAA)",
    "<javascript:window.hurt=1> [a](vbscript:a) [b](JAVASCRIPT:a) [c](data:text/html,a)",
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
    expect(page.locator(".hljs-number")).to_have_text("1")
    for selector, text in SHOWN:
        shown = page.locator(f".markdown {selector}").first
        assert shown.evaluate("element => element.firstChild.textContent") == text
    paragraph = page.locator(".markdown p").first
    expect(paragraph).to_contain_text("snake_case_name, 2 * 3 * 4, *stars*.")
    expect(page.locator(".markdown pre code").last).to_have_text("<b>")
    expect(page.locator(".markdown hr")).to_have_count(1)
    expect(page.get_by_role("checkbox", name="Done")).to_be_checked()
    expect(page.get_by_role("checkbox", name="To do")).not_to_be_checked()
    links = page.locator(".markdown a").evaluate_all("all => all.map(a => [a.target, a.rel])")
    assert links == [["_blank", "noopener noreferrer"]] * 5
    assert page.locator(".markdown").locator("img, [style]").count() == 0
    assert_is_the_same_when_opened_again(page)


def assert_is_the_same_when_opened_again(page: Page) -> None:
    """What came piece by piece looks as the whole does."""
    streamed = page.locator(".markdown").evaluate("element => element.outerHTML")
    page.reload()
    page.locator(".entry").click()
    page.wait_for_function(
        "streamed => document.querySelector('.markdown').outerHTML === streamed", arg=streamed
    )


def test_a_link_may_stand_before_its_target(scripted: ScriptedServer, page: Page) -> None:
    text = "See [the page][1].\n\nMore.\n\n[1]: https://a.example/one\n\nEnd.\n\nIts end.\n"
    answered(scripted, page, *text)
    expect(page.locator(".markdown a")).to_have_attribute("href", "https://a.example/one")
    expect(page.locator(".markdown p")).to_have_count(4)
    assert_is_the_same_when_opened_again(page)


def test_code_has_its_colours_once_it_is_whole(scripted: ScriptedServer, page: Page) -> None:
    gate = Gate()
    cut = CODE.index("return")
    scripted.answer_with([{"content": CODE[:cut]}, gate, {"content": CODE[cut:]}, *end()])
    say(page, "Hi")
    code = page.locator(".markdown code")
    expect(code).to_contain_text("def two")
    assert "highlight.min.js" not in page.evaluate(LOADED)
    gate.open()
    expect(code.locator(".hljs-keyword")).to_have_text(["def", "return"])
    expect(code.locator(".hljs-comment")).to_have_text("# one")
    assert code.text_content() == CODE.split("\n", 1)[1].partition("\n```")[0]
    assert "temml.min.js" not in page.evaluate(LOADED)
    assert_is_the_same_when_opened_again(page)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("```nosuch\nif x\n```", id="no language"),
        pytest.param("```py\n" + "if x\n" * 25_000 + "```", id="long"),
    ],
)
def test_other_code_stays_plain(scripted: ScriptedServer, page: Page, text: str) -> None:
    answered(scripted, page, f"{text}\n\n```py\nif x\n```\n")
    expect(page.locator(".markdown code").last.locator(".hljs-keyword")).to_have_text("if")
    expect(page.locator(".markdown code").first.locator("span")).to_have_count(0)


def test_formulas_become_mathml_and_money_does_not(scripted: ScriptedServer, page: Page) -> None:
    text = "\n\n".join([*(written for written, *_ in FORMULAS), *NO_FORMULAS])
    answered(scripted, page, *text)
    drawn = page.locator(".markdown math")
    expect(drawn).to_have_count(len(FORMULAS))
    shown = drawn.evaluate_all(
        "all => all.map(m => [m.textContent.normalize('NFKC'), m.matches('[display=block]')])"
    )
    assert shown == [[words, is_display] for _, words, is_display in FORMULAS]
    expect(page.locator(".markdown")).to_contain_text("from $5 to $10")
    assert_is_the_same_when_opened_again(page)


def test_a_formula_that_is_wrong_shows_its_tex(scripted: ScriptedServer, page: Page) -> None:
    answered(scripted, page, "\n\n".join([*WRONG_FORMULAS, "$x$"]))
    expect(page.locator("math")).to_have_text("x")
    expect(page.locator(".math.failed")).to_have_text(WRONG_FORMULAS)


def test_a_formula_stays_in_its_place(scripted: ScriptedServer, page: Page) -> None:
    answered(scripted, page, "\n\n".join([*USUAL_FORMULAS, *WIDE_FORMULAS]))
    drawn = page.locator(".math:has(> math)")
    expect(drawn).to_have_count(len(USUAL_FORMULAS) + len(WIDE_FORMULAS))
    sizes = drawn.evaluate_all(
        """all => all.map(box => {
          const [outer, inner] = [box, box.firstChild].map(one => one.getBoundingClientRect());
          const clip = getComputedStyle(box).overflowY;
          const cut = Math.max(outer.top - inner.top, inner.bottom - outer.bottom);
          return [clip, cut, outer.height, box.parentNode.getBoundingClientRect().height];
        })"""
    )
    for clip, cut, height, line in sizes:
        assert clip in ("clip", "hidden")
        assert cut <= 1
        assert height <= 1000
        assert clip == "hidden" or line <= max(height + 60, 60), "it stands on the line"
    log = page.locator("#log").evaluate("log => [log.scrollWidth, log.clientWidth]")
    assert log[0] <= log[1]


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
    made = page.locator("#log").locator("img, script, svg, iframe, style, object, embed, [style]")
    assert made.count() == 0
    links = page.locator("#log a").evaluate_all("all => all.map(a => a.protocol)")
    assert set(links) <= {"https:"}
    assert page.evaluate("window.hurt") is None
    assert page.title() == "nanocore"


def test_text_from_right_to_left_has_its_direction(scripted: ScriptedServer, page: Page) -> None:
    answered(scripted, page, "\u0645\u0631\u062d\u0628\u0627\n\nhello")
    directions = page.locator(".markdown p").evaluate_all(
        "all => all.map(p => getComputedStyle(p).direction)"
    )
    assert directions == ["rtl", "ltr"]
