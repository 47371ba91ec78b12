"""The live view: what it shows of an engine's steps and requests, and of an engine's end."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.http.page.conftest import NewPage
from tests.http.page.live_answers import NOW_S, live_answer
from tests.http.page.scripted_server import Refusal, ScriptedServer

pytestmark = pytest.mark.campaign
NONE = "\u2013"


@pytest.fixture
def live(scripted: ScriptedServer, new_page: NewPage) -> Page:
    """The page, with a clock that the test turns, and what `live_answer` says."""
    scripted.live = live_answer()
    page = new_page(f"{scripted.url}#live", has_clock=True)
    expect(page.locator("#live-state")).to_have_text("Live")
    return page


def answered(scripted: ScriptedServer, page: Page, answer: dict[str, Any] | Refusal) -> None:
    """A second later there is this answer."""
    scripted.live = answer
    with page.expect_response(lambda response: "/live?" in response.url):
        page.clock.run_for(1000)


def test_numbers_are_those_of_the_engine(scripted: ScriptedServer, live: Page) -> None:
    tiles = {"running": "4", "waiting": "2", "kv": "43 %", "hits": "25 %", "preemptions": "7"}
    for name, text in {**tiles, "output": NONE, "prompt": NONE}.items():
        expect(live.locator(f"#tile-{name}")).to_have_text(text)
    later = live_answer(now_s=NOW_S + 2)
    later["stats"] |= {"generation_tokens": 5000 + 2468, "prompt_tokens": 1000 + 10}
    answered(scripted, live, later)
    expect(live.locator("#tile-output")).to_have_text("1,234")
    expect(live.locator("#tile-prompt")).to_have_text("5")


def test_steps_are_a_bar_each_of_decode_and_prefill_tokens(live: Page) -> None:
    decode, prefill = (
        [float(bar.get_attribute("height") or 0) for bar in live.locator(f"#steps .{kind}").all()]
        for kind in ("decode", "prefill")
    )
    assert (len(decode), len(prefill)) == (20, 4)
    assert decode == sorted(decode)
    # Squares of heights are as tokens are: of the decodes, and of all of a step.
    assert decode[19] / decode[4] == pytest.approx((20 / 5) ** 0.5, rel=0.01)
    tops = [decode[4] + prefill[0], decode[19] + prefill[3]]
    assert tops[1] / tops[0] == pytest.approx((148 / 133) ** 0.5, rel=0.01)
    assert tops[0] / decode[4] == pytest.approx((133 / 5) ** 0.5, rel=0.01)
    expect(live.locator("#steps .preempted-dot")).to_have_count(1)


def test_a_step_tells_its_numbers_to_pointers_and_keys(live: Page) -> None:
    detail = live.locator("#step-detail")
    slider = live.get_by_role("slider", name="Steps")
    slider.focus()
    live.keyboard.press("End")
    says = "Step 20, 0 µs ago, took 4.1 ms: 20 decode and 128 prefill tokens; 4 running, 2 waiting"
    expect(detail).to_have_text(f"{says}; 60 of 512 blocks in use")
    expect(slider).to_have_attribute("aria-valuetext", f"{says}; 60 of 512 blocks in use")
    expect(slider).to_have_attribute("aria-valuenow", "20")
    live.keyboard.press("ArrowLeft")
    expect(detail).to_contain_text("Step 19, 500 ms ago")
    live.keyboard.press("PageUp")
    expect(detail).to_contain_text("Step 9,")
    live.keyboard.press("ArrowRight")
    expect(detail).to_contain_text("Step 10, 5.0 s ago")
    expect(detail).to_contain_text("2 waiting, 1 preempted;")
    live.keyboard.press("Home")
    expect(detail).to_contain_text("Step 1,")
    bar = live.locator("#steps .decode").nth(4).bounding_box()
    assert bar is not None
    live.mouse.move(bar["x"] + 2, bar["y"] - 20)
    expect(detail).to_contain_text("Step 5,")


def test_each_request_has_its_way_in_phases(live: Page) -> None:
    rows = live.locator("#ways li")
    expect(rows.locator(".name")).to_have_text(
        ["chatcmpl-mine", "request 3", "request 5", "request 1"]
    )
    expect(rows.locator(".phase")).to_have_text(
        ["preempted", "queued", "a phase of tomorrow", "ended: stop"]
    )
    ended = rows.nth(3)
    expect(ended.locator(".detail")).to_have_text(
        "20 prompt tokens (16 cached), 7 out. "
        "queued 500 ms, prefill 750 ms, decode 1.8 s, preempted 1.0 s"
    )
    bars = [
        (bar.get_attribute("class"), float(bar.get_attribute("width") or 0))
        for bar in ended.locator("rect").all()
    ]
    width = ended.locator("svg").first.evaluate("svg => svg.clientWidth")
    spans = [("queued", 0.5), ("prefill", 0.5), ("decode", 1), ("preempted", 1), ("prefill", 0.25)]
    assert [kind for kind, _ in bars] == [kind for kind, _ in spans] + ["decode"]
    for (_, wide), (_, seconds) in zip(bars, spans, strict=False):
        assert wide == pytest.approx(width * seconds / 10, rel=0.01)
    live.get_by_label("Time shown").select_option("120")
    expect(rows).to_have_count(5)
    live.get_by_label("Time shown").select_option("3")
    expect(rows).to_have_count(4)


def test_a_phase_is_a_pattern_and_not_a_colour_alone(live: Page) -> None:
    fills = {
        kind: live.locator(f".legend rect.{kind}").first.evaluate("r => getComputedStyle(r).fill")
        for kind in ("queued", "prefill", "decode", "preempted")
    }
    assert fills.pop("decode").startswith("rgb")
    assert [fill.split("#")[1].rstrip('")') for fill in fills.values()] == [
        "dots", "hatch", "cross",
    ]  # fmt: skip


def test_only_new_steps_are_asked_for(scripted: ScriptedServer, live: Page) -> None:
    newer = live_answer(num_steps=23)
    newer["steps"] = newer["steps"][20:]
    answered(scripted, live, newer)
    expect(live.locator("#steps .decode")).to_have_count(23)
    answered(scripted, live, live_answer(num_steps=23, steps=[]))
    assert scripted.live_asked[:3] == ["after=0", "after=20", "after=23"]
    expect(live.locator("#steps .decode")).to_have_count(23)


def test_an_engine_that_drains_is_gone_or_is_replaced_is_told(
    scripted: ScriptedServer, live: Page
) -> None:
    state = live.locator("#live-state")
    answered(scripted, live, live_answer(draining=True))
    expect(state).to_have_text("The engine is draining: it finishes its requests")
    answered(scripted, live, Refusal(503, "the engine is gone", 1))
    expect(state).to_have_text("The engine is gone: 503: the engine is gone (try again in 1 s)")
    expect(live.locator("#steps .decode")).to_have_count(20)
    answered(scripted, live, live_answer("two", num_steps=3))
    expect(state).to_contain_text("Live; the engine was replaced at")
    answered(scripted, live, live_answer("two", num_steps=3))
    expect(live.locator("#steps .decode")).to_have_count(3)
    assert scripted.live_asked[-1] == "after=0"
    expect(live.locator("#tile-output")).to_have_text(NONE)


def test_an_error_of_another_kind_is_told_as_it_is(scripted: ScriptedServer, live: Page) -> None:
    answered(scripted, live, Refusal(400, "this engine speaks protocol 1.10"))
    expect(live.locator("#live-state")).to_have_text("400: this engine speaks protocol 1.10")


def test_who_gives_no_key_is_not_asked_for_it_again_and_again(
    scripted: ScriptedServer, live: Page
) -> None:
    scripted.key = "right"
    live.clock.run_for(1000)
    live.get_by_role("button", name="Cancel").click()
    expect(live.locator("#live-state")).to_contain_text("401: no valid API key")
    live.clock.run_for(60_000)
    expect(live.get_by_role("dialog")).to_be_hidden()
    live.get_by_role("button", name="Pause").click()
    live.get_by_label("API key").fill("right")
    live.get_by_role("button", name="Save").click()
    expect(live.locator("#live-state")).to_have_text("Live")


def leave(live: Page) -> None:
    live.get_by_role("link", name="Chat").click()
    expect(live.locator("#live")).to_be_hidden()


def test_nothing_is_asked_while_nobody_looks(scripted: ScriptedServer, live: Page) -> None:
    answered(scripted, live, live_answer())
    for hide, show in (
        (lambda: leave(live),
         lambda: live.get_by_role("link", name="Live").click()),
        (lambda: live.get_by_role("button", name="Pause").click(),
         lambda: live.get_by_role("button", name="Pause").click()),
        (lambda: see(live, "hidden"), lambda: see(live, "visible")),
    ):  # fmt: skip
        hide()
        num_asked = len(scripted.live_asked)
        live.clock.run_for(60_000)
        assert len(scripted.live_asked) == num_asked
        with live.expect_response(lambda response: "/live?" in response.url):
            show()
        live.clock.run_for(0)


def see(page: Page, state: str) -> None:
    """As if its tab were hidden, or shown again."""
    page.evaluate(
        """state => {
            const property = { value: state, configurable: true };
            Object.defineProperty(document, "visibilityState", property);
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        state,
    )
