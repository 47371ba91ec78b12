"""What a reader does with conversations: edit, ask again, keep, delete; and with the settings."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from nanocore.cli.chat.commands import CHAT_SAMPLING
from nanocore.demo_model import demo_model_folder
from tests.http.page.conftest import NewPage, begin, say
from tests.http.page.scripted_server import Gate, Part, Refusal, ScriptedServer, end

pytestmark = pytest.mark.campaign


def answer(text: str) -> list[Part]:
    return [{"content": text}, *end()]


def contents(body: dict[str, Any]) -> list[str]:
    return [turn["content"] for turn in body["messages"]]


def talk(scripted: ScriptedServer, page: Page, *questions: str) -> None:
    """Each gets its own words as the answer."""
    for question in questions:
        scripted.answer_with(answer(f"Re: {question}"))
        say(page, question)
        expect(page.locator(".markdown").last).to_have_text(f"Re: {question}")
        expect(page.locator("#send")).to_have_text("Send")


def test_an_earlier_message_is_edited_and_the_conversation_goes_on_from_there(
    scripted: ScriptedServer, page: Page
) -> None:
    talk(scripted, page, "one", "two", "three")
    scripted.answer_with(answer("Re: 2"))
    page.get_by_role("button", name="Edit", exact=True).nth(1).click()
    editor = page.get_by_label("Edit the message")
    expect(editor).to_be_focused()
    expect(editor).to_have_value("two")
    editor.fill("2")
    editor.press("Enter")
    expect(page.locator(".markdown").last).to_have_text("Re: 2")
    expect(page.locator(".message")).to_have_count(4)
    assert contents(scripted.bodies[-1]) == ["one", "Re: one", "2"]
    talk(scripted, page, "four")
    assert contents(scripted.bodies[-1]) == ["one", "Re: one", "2", "Re: 2", "four"]


def test_an_edit_can_be_left(scripted: ScriptedServer, page: Page) -> None:
    talk(scripted, page, "one")
    edit = page.get_by_role("button", name="Edit", exact=True)
    edit.click()
    page.get_by_label("Edit the message").fill("other")
    page.keyboard.press("Escape")
    expect(page.locator(".message.user .text")).to_have_text("one")
    expect(edit).to_be_focused()
    assert len(scripted.bodies) == 1


def test_an_answer_is_made_again_from_the_same_messages(
    scripted: ScriptedServer, page: Page
) -> None:
    talk(scripted, page, "one", "two")
    scripted.answer_with(answer("another"))
    again = page.get_by_role("button", name="Regenerate")
    expect(again).to_have_count(1)
    again.click()
    expect(page.locator(".markdown").last).to_have_text("another")
    expect(page.locator(".message")).to_have_count(4)
    assert scripted.bodies[2] == scripted.bodies[1]


def test_conversations_are_kept_found_again_and_deleted(
    scripted: ScriptedServer, page: Page
) -> None:
    talk(scripted, page, "first talk")
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".message")).to_have_count(0)
    talk(scripted, page, "second talk")
    assert contents(scripted.bodies[-1]) == ["second talk"]
    page.reload()
    entries = page.locator("#conversation-list .entry")
    expect(entries).to_have_text(["second talk", "first talk"])
    entries.nth(1).click()
    expect(page.locator(".markdown")).to_have_text("Re: first talk")
    expect(page.locator(".figures")).to_contain_text("prompt 20, 16 cached")
    delete = page.get_by_role("button", name="Delete first talk")
    delete.click()
    expect(entries).to_have_count(2)
    page.get_by_role("button", name="Really delete first talk?").click()
    expect(entries).to_have_text(["second talk"])
    expect(page.locator(".message")).to_have_count(0)
    page.reload()
    expect(entries).to_have_text(["second talk"])


def test_an_answer_goes_on_while_another_conversation_is_open(
    scripted: ScriptedServer, page: Page
) -> None:
    first, last = Gate(), Gate()
    parts = [{"content": "It begins"}, first, {"content": ", goes on"}, last, {"content": "."}]
    scripted.answer_with([*parts, *end()])
    say(page, "Go")
    expect(page.locator(".markdown")).to_have_text("It begins")
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#send")).to_have_text("Send")
    expect(page.locator(".entry.busy")).to_have_text("Go")
    talk(scripted, page, "new")
    first.open()
    page.locator(".entry", has_text="Go").click()
    expect(page.locator("#send")).to_have_text("Stop")
    expect(page.locator(".markdown")).to_have_text("It begins, goes on")
    page.locator(".entry", has_text="new").click()
    expect(page.locator(".markdown")).to_have_text("Re: new")
    last.open()
    expect(page.locator("#announcer")).to_have_text("The response in “Go” is there.")
    expect(page.locator(".entry.busy")).to_have_count(0)
    expect(page.locator(".message")).to_have_count(2)
    page.reload()
    page.locator(".entry", has_text="Go").click()
    expect(page.locator(".markdown")).to_have_text("It begins, goes on.")
    expect(page.locator(".figures")).to_contain_text("finish stop")


def test_two_answers_come_at_once_and_only_the_one_that_is_shown_is_stopped(
    scripted: ScriptedServer, page: Page
) -> None:
    gate = Gate()
    scripted.answer_with([{"content": "One"}, gate, {"content": " ends."}, *end()])
    say(page, "1")
    expect(page.locator(".markdown")).to_have_text("One")
    page.get_by_role("button", name="New conversation").click()
    begin(scripted, page)
    expect(page.locator(".entry.busy")).to_have_count(2)
    page.keyboard.press("Escape")
    expect(page.locator(".notice.stopped")).to_be_visible()
    assert scripted.left.wait(30)
    gate.open()
    expect(page.locator(".entry.busy")).to_have_count(0)
    page.locator(".entry", has_text="1").click()
    expect(page.locator(".markdown")).to_have_text("One ends.")


def test_an_answer_in_a_conversation_that_is_deleted_meanwhile_is_left(
    scripted: ScriptedServer, page: Page
) -> None:
    begin(scripted, page)
    page.get_by_role("button", name="New conversation").click()
    page.get_by_role("button", name="Delete Go").click()
    page.get_by_role("button", name="Really delete Go?").click()
    assert scripted.left.wait(30)
    expect(page.locator(".entry")).to_have_count(0)
    assert page.evaluate("Object.keys(localStorage)") == []


def test_what_is_kept_is_bounded_and_the_oldest_goes(scripted: ScriptedServer, page: Page) -> None:
    kept = [
        {"id": f"old-{i}", "updatedMs": i, "messages": [{"role": "user", "content": f"talk {i}"}]}
        for i in range(50)
    ]
    page.evaluate(
        "all => { for (const [key, text] of all) localStorage.setItem(key, text); }",
        [(f"nanocore.chat.{one['id']}", json.dumps(one)) for one in kept],
    )
    page.evaluate("localStorage.setItem('nanocore.chat.broken', '{')")
    talk(scripted, page, "the newest")
    entries = page.locator("#conversation-list .entry")
    expect(entries).to_have_count(50)
    expect(entries.first).to_have_text("the newest")
    expect(entries.last).to_have_text("talk 1")


def test_a_browser_without_room_is_no_reason_to_fail(scripted: ScriptedServer, page: Page) -> None:
    page.evaluate("localStorage.setItem('other', 'x'.repeat(5 * 2**20 - 200))")
    talk(scripted, page, "where to?")
    expect(page.locator("#chat-note")).to_contain_text("storage is full")


SETTINGS: dict[str, tuple[str, Any]] = {
    "Temperature": ("0.7", 0.7),
    "Top p": ("0.9", 0.9),
    "Top k": ("40", 40),
    "Min p": ("0.05", 0.05),
    "Max tokens": ("64", 64),
    "Seed": ("9007199254740993", 9007199254740993),  # more than a double holds
    "Presence penalty": ("-0.5", -0.5),
    "Frequency penalty": ("0.25", 0.25),
    "Repetition penalty": ("1.1", 1.1),
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_settings_reach_the_request_and_are_kept(scripted: ScriptedServer, page: Page) -> None:
    page.get_by_role("button", name="Settings").click()
    for label, (text, _) in SETTINGS.items():
        page.get_by_label(label, exact=True).fill(text)
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Stop strings").fill("END\n\n###")
    page.get_by_label("Tools").fill(json.dumps([TOOL]))
    expect(page.locator("#in-force")).to_contain_text("a system prompt, stop strings, tools.")
    page.reload()
    expect(page.locator("#model")).to_have_text("scripted")
    talk(scripted, page, "Hi")
    (body,) = scripted.bodies
    given = {label.lower().replace(" ", "_"): value for label, (_, value) in SETTINGS.items()}
    assert body == {
        "model": "/models/scripted",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        **given,
        "stop": ["END", "###"],
        "tools": [TOOL],
    }
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Clear the settings").click()
    talk(scripted, page, "Ho")
    assert body.keys() - scripted.bodies[1].keys() == {*given, "stop", "tools"}
    assert contents(scripted.bodies[1]) == ["Hi", "Re: Hi", "Ho"]


@pytest.mark.parametrize(
    ("recommended", "sent", "shown"),
    [
        ({}, dict(CHAT_SAMPLING), "Defaults, as the model recommends none: temperature 0.8, "),
        ({"temperature": 0.6}, {}, "Recommended by the model: temperature 0.6."),
    ],
)
def test_a_model_that_recommends_nothing_gets_defaults_which_are_shown(
    scripted: ScriptedServer,
    new_page: NewPage,
    recommended: dict[str, Any],
    sent: dict[str, Any],
    shown: str,
) -> None:
    scripted.model_fields = {"default_sampling": recommended}
    page = new_page(scripted.url)
    in_force = page.locator("#in-force")
    expect(in_force).to_contain_text(shown)
    talk(scripted, page, "Hi")
    page.get_by_role("button", name="Settings").click()
    temperature = page.get_by_label("Temperature")
    assert temperature.get_attribute("placeholder") == str({**recommended, **sent}["temperature"])
    assert temperature.get_attribute("title")
    temperature.fill("0")
    expect(in_force).to_contain_text("Model: scripted. Set: temperature 0.")
    talk(scripted, page, "Ho")
    fields = [
        {name: body[name] for name in CHAT_SAMPLING if name in body} for body in scripted.bodies
    ]
    assert fields == [sent, {**sent, "temperature": 0}]


def test_a_model_without_template_is_asked_in_chatml(scripted: ScriptedServer, page: Page) -> None:
    refusal = Refusal(400, "no template", param="chat_template")
    scripted.answer_with(refusal, answer("Hello."))
    say(page, "Hi")
    expect(page.locator(".markdown")).to_have_text("Hello.")
    expect(page.locator("#in-force")).to_contain_text("ChatML is used")
    talk(scripted, page, "Ho")
    assert [body.get("chat_template") for body in scripted.bodies] == [None, "chatml", "chatml"]
    scripted.answer_with(refusal)
    say(page, "He")
    expect(page.locator(".notice.failed")).to_have_text("400: no template")


@pytest.mark.parametrize(
    ("label", "text", "says"),
    [
        ("Tools", "[{", "Tools are not valid JSON"),
        ("Tools", "{}", "Tools must be a JSON array."),
        ("Top p", "2", "Top p:"),
        ("Max tokens", "0.5", "Max tokens:"),
    ],
)
def test_a_setting_that_is_none_is_told_before_anything_is_sent(
    scripted: ScriptedServer, page: Page, label: str, text: str, says: str
) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label(label).fill(text)
    page.get_by_role("button", name="Close").click()
    say(page, "Hi")
    expect(page.locator("#banner")).to_contain_text(says)
    expect(page.get_by_label(label)).to_be_focused()
    expect(page.get_by_label("Message", exact=True)).to_have_value("Hi")
    assert scripted.bodies == []


def test_the_demo_model_says_what_it_can_do(scripted: ScriptedServer, new_page: NewPage) -> None:
    scripted.model = "any"
    scripted.model_fields = {"root": f"{demo_model_folder()}/"}
    page = new_page(scripted.url)
    scripted.answer_with(answer("123 + 456 = 579"))
    page.get_by_role("button", name="What is 123 + 456?").click()
    expect(page.locator(".markdown")).to_have_text("123 + 456 = 579")
    assert contents(scripted.bodies[0]) == ["What is 123 + 456?"]


def test_a_server_with_another_model_by_now_is_asked_for_it(
    scripted: ScriptedServer, page: Page
) -> None:
    scripted.model = "new"
    scripted.answer_with(Refusal(404, "there is no scripted"), answer("Hello."))
    say(page, "Hi")
    expect(page.locator("#model")).to_have_text("new")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".markdown")).to_have_text("Hello.")
    assert [body["model"] for body in scripted.bodies] == ["/models/scripted", "/models/new"]


def test_a_model_that_loads_is_waited_for(scripted: ScriptedServer, new_page: NewPage) -> None:
    scripted.models_after = 1
    page = new_page(scripted.url)
    expect(page.locator("#banner")).to_contain_text("503: the model is being loaded")
    expect(page.locator("#model")).to_have_text("scripted")
    expect(page.locator("#banner")).to_be_empty()
