"""An answer on the page while it comes, and at its end, whatever that is."""

from __future__ import annotations

import json
import re
import time
from email.utils import formatdate
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.http.page.conftest import begin, say
from tests.http.page.scripted_server import Drop, Gate, Refusal, ScriptedServer, Whole, end

pytestmark = pytest.mark.campaign


def test_an_answer_is_seen_before_it_ends(scripted: ScriptedServer, page: Page) -> None:
    gate = Gate()
    scripted.answer_with([{"content": "Hello"}, gate, {"content": " world."}, *end()])
    say(page, "Hi")
    answer = page.get_by_role("article", name="Answer")
    expect(answer.locator(".markdown")).to_have_text("Hello")
    expect(page.locator("#send")).to_have_text("Stop")
    expect(answer.locator(".figures")).to_be_empty()
    gate.open()
    expect(answer.locator(".markdown")).to_have_text("Hello world.")
    expect(page.locator("#send")).to_have_text("Send")
    expect(page.get_by_role("status").filter(has_text="Hello world.")).to_have_count(1)
    figures = answer.locator(".figures")
    expect(figures).to_contain_text("prompt 20, 16 cached")
    expect(figures).to_contain_text("answer 7")
    expect(figures).to_contain_text("finish stop")
    expect(figures).to_contain_text(re.compile(r"[\d,.]+ tokens/s.*first token [\d.]+ [mµ]?s"))


def test_the_request_asks_for_a_stream_with_usage(scripted: ScriptedServer, page: Page) -> None:
    scripted.answer_with([{"content": "Hello."}, *end()])
    say(page, "Hi")
    expect(page.locator("#send")).to_have_text("Send")
    assert scripted.bodies == [
        {
            "model": "/models/scripted",
            "messages": [{"role": "user", "content": "Hi"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_a_stopped_answer_ends_its_request_and_is_kept(
    scripted: ScriptedServer, page: Page, way: str
) -> None:
    begin(scripted, page, [{"content": "again"}, *end()])
    if way == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    assert scripted.left.wait(30)
    expect(page.locator(".notice")).to_have_text("Stopped.")
    expect(page.locator(".markdown")).to_have_text("It begins")
    say(page, "Go on")
    expect(page.locator(".markdown").last).to_have_text("again")
    assert [turn["content"] for turn in scripted.bodies[1]["messages"]] == [
        "Go", "It begins", "Go on",
    ]  # fmt: skip


def test_leaving_the_page_leaves_the_request_too(scripted: ScriptedServer, page: Page) -> None:
    begin(scripted, page)
    page.reload()
    assert scripted.left.wait(30)
    page.get_by_role("button", name="Go", exact=True).click()
    expect(page.locator(".markdown")).to_have_text("It begins")
    expect(page.locator(".notice")).to_have_text("Stopped.")


def test_escape_stops_an_answer_only_where_that_is_seen(
    scripted: ScriptedServer, page: Page
) -> None:
    begin(scripted, page)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").press("Escape")
    expect(page.locator("#settings")).to_be_hidden()
    expect(page.locator("#send")).to_have_text("Stop")
    page.get_by_role("link", name="Live").click()
    expect(page.locator("#live")).to_be_visible()
    page.keyboard.press("Escape")
    page.get_by_role("link", name="Chat").click()
    expect(page.locator("#chat")).to_be_visible()
    expect(page.locator("#send")).to_have_text("Stop")
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_have_text("Send")
    assert scripted.left.wait(30)


def test_reasoning_and_tool_calls_are_folded_and_can_be_read(
    scripted: ScriptedServer, page: Page
) -> None:
    gate = Gate()
    arguments = ['{"city": "Zür', 'ich"}']
    calls = [
        {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": arguments[0]}},
        {"index": 0, "function": {"arguments": arguments[1]}},
        {"index": 1, "id": "c2", "function": {"name": "time", "arguments": "{}"}},
    ]
    scripted.answer_with(
        [
            {"reasoning": "First, ", "reasoning_content": "First, "},
            gate,
            {"reasoning": "I look it up.", "reasoning_content": "I look it up."},
            *[{"tool_calls": [call]} for call in calls],
            *end("tool_calls"),
        ],
        [{"content": "It rains at noon."}, *end()],
    )
    say(page, "How is the weather in Zürich?")
    expect(page.get_by_text("Reasoning …")).to_be_visible()
    expect(page.get_by_text("First,")).to_be_hidden()
    gate.open()
    page.get_by_text("Reasoning", exact=True).click()
    expect(page.get_by_text("First, I look it up.")).to_be_visible()
    city = page.get_by_text('"city": "Zürich"')
    expect(city).to_be_hidden()
    page.get_by_text("Calls weather").click()
    expect(city).to_be_visible()
    expect(page.locator(".figures")).to_contain_text("finish tool calls")
    page.get_by_label("Result of weather").fill("rain")
    page.get_by_label("Result of time").fill("noon")
    page.get_by_role("button", name="Send the results").click()
    expect(page.locator(".markdown").last).to_have_text("It rains at noon.")
    _, asked, *results = scripted.bodies[1]["messages"]
    assert asked["reasoning_content"] == "First, I look it up."
    functions = [call["function"] for call in asked["tool_calls"]]
    assert functions == [
        {"name": "weather", "arguments": "".join(arguments)}, {"name": "time", "arguments": "{}"},
    ]  # fmt: skip
    assert results == [
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        {"role": "tool", "content": "noon", "tool_call_id": "c2"},
    ]


def test_a_refusal_is_told_in_the_servers_words_and_can_be_tried_again(
    scripted: ScriptedServer, page: Page
) -> None:
    scripted.answer_with(
        Refusal(429, "too many requests wait: 9 of 9", retry_after=3),
        [{"content": "Now."}, *end()],
    )
    say(page, "Hi")
    notice = page.locator(".notice.failed")
    expect(notice).to_have_text("429: too many requests wait: 9 of 9 (try again in 3 s)")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".markdown")).to_have_text("Now.")
    expect(notice).to_be_hidden()
    assert scripted.bodies[1] == scripted.bodies[0], "what failed is no part of the conversation"


def test_when_to_come_back_may_be_a_date_or_nonsense(scripted: ScriptedServer, page: Page) -> None:
    for retry_after, says in (
        (formatdate(time.time() + 3000, usegmt=True), r" \(try again in (29|30)\d\d s\)"),
        (formatdate(0, usegmt=True), r" \(try again now\)"),
        ("-5", ""),
        ("soon", ""),
    ):
        scripted.answer_with(Refusal(429, f"too many, {retry_after}", retry_after))
        say(page, "Hi")
        words = re.compile(f"^429: too many, {re.escape(retry_after)}{says}$")
        expect(page.locator(".notice.failed").last).to_have_text(words)


def test_an_answer_that_is_no_stream_is_told_as_what_it_is(
    scripted: ScriptedServer, page: Page
) -> None:
    for kind, body in (("text/html", "<html>Log in</html>"), ("application/json", "{}")):
        scripted.answer_with(Whole(kind, body))
        say(page, "Hi")
        expect(page.locator(".notice.failed").last).to_have_text(
            f"200: the answer is no stream of events ({kind})"
        )


def test_fields_of_other_types_are_as_if_they_were_not_there(
    scripted: ScriptedServer, page: Page
) -> None:
    odd: list[dict[str, Any]] = [
        {"content": 5, "reasoning": {}, "tool_calls": "none"},
        {"content": [{"type": "text", "text": "a"}], "tool_calls": {}},
        {"tool_calls": [None, {"index": 0, "id": 5, "function": {"name": 5, "arguments": {}}}]},
    ]
    usage = {"prompt_tokens": "many", "completion_tokens": None, "prompt_tokens_details": 5}
    chunks = [b'data: {"choices": [null]}\n\n', b'data: {"choices": 5, "usage": "none"}\n\n']
    scripted.answer_with([*odd, *chunks, {"content": "Hello."}, *end(**usage)])
    say(page, "Hi")
    expect(page.locator("#send")).to_have_text("Send")
    expect(page.locator(".markdown")).to_have_text("Hello.")
    expect(page.locator(".notice")).to_be_hidden()
    expect(page.locator(".figures")).to_have_text(
        re.compile(r"^first token [\d.]+ [mµ]?sfinish stop$")
    )
    page.reload()
    expect(page.locator(".entry")).to_have_text("Hi")


def error_event(message: object) -> bytes:
    return b"data: " + json.dumps({"error": {"message": message}}).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("ends_with", "kind", "says"),
    [
        ([], "incomplete", "Incomplete: the stream ended before the response did."),
        ([Drop()], "incomplete", "Incomplete: the connection broke"),
        ([error_event("the engine is gone")], "failed", "the engine is gone"),
        ([error_event({"x": 1})], "failed", '{"x":1}'),
        ([b'data: {"error": "it is gone"}\n\n'], "failed", "it is gone"),
        ([b"data: {]\n\n"], "failed", "the answer is broken"),
        ([b"data: null\n\n"], "failed", "the answer is broken"),
    ],
    ids=["no end", "dropped", "error", "an object", "a string", "no JSON", "null"],
)
def test_an_answer_that_has_no_end_is_said_to_have_none(
    scripted: ScriptedServer, page: Page, ends_with: list[Drop | bytes], kind: str, says: str
) -> None:
    gate = Gate()
    scripted.answer_with([{"content": "Half"}, gate, *ends_with])
    say(page, "Hi")
    expect(page.locator(".markdown")).to_have_text("Half")
    gate.open()
    expect(page.locator(f".notice.{kind}")).to_contain_text(says)
    expect(page.locator(".markdown")).to_have_text("Half")
    expect(page.locator("#send")).to_have_text("Send")


@pytest.mark.parametrize(
    ("width", "height"), [(1280, 800), (640, 360)], ids=["wide", "enlarged, or a phone on its side"]
)
def test_the_end_stays_in_sight_until_the_reader_scrolls_up(
    scripted: ScriptedServer, page: Page, width: int, height: int
) -> None:
    page.set_viewport_size({"width": width, "height": height})
    gate = Gate()
    lines = [{"content": f"line {i}\n\n"} for i in range(80)]
    scripted.answer_with([*lines, gate, {"content": "THE END\n\n" * 20}, *end()])
    say(page, "Write a lot")
    log, jump = page.locator("#log"), page.get_by_role("button", name="Jump to the latest")
    expect(log.get_by_text("line 79")).to_be_in_viewport()
    expect(page.locator("#composer")).to_be_in_viewport(ratio=1)
    expect(jump).to_be_hidden()
    log.hover()
    page.mouse.wheel(0, -100_000)
    expect(jump).to_be_visible()
    expect(log.get_by_text("Write a lot")).to_be_in_viewport()
    gate.open()
    expect(page.locator("#send")).to_have_text("Send")
    assert log.evaluate("log => log.scrollTop") == 0
    jump.click()
    expect(log.get_by_text("THE END").last).to_be_in_viewport()
    expect(jump).to_be_hidden()
