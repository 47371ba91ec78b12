"""What reaches the terminal: styles, notes, and no control character."""

from __future__ import annotations

import pytest

from nanocore.cli.chat.target import ChatTurn, Resumed, TurnStats, incompleteness, status_line
from nanocore.client.chat.events import (
    ChatAnswer,
    Finished,
    Reasoning,
    Started,
    Text,
    ToolArguments,
    ToolBegin,
    Usage,
)
from nanocore.system.standard_streams import harmless
from tests.cli.chat.fake_target import Shown


def test_no_control_character_of_a_model_reaches_the_terminal() -> None:
    shown = Shown()
    for delta in ("a\x1b[2Jb", "\x07\x9b31m", "tab\there\r\n", "\x1b]0;title\x07"):
        shown.view.show(Text(delta))
        shown.view.show(Reasoning(delta))
        shown.view.show(ToolBegin(0, "id", delta))
        shown.view.show(ToolArguments(0, delta))
    shown.view.note("\x1b[1m")
    shown.view.error("\x1b[1m\n")
    shown.view.say("\x1b[1m")
    assert not set(shown.text) & ({*map(chr, range(32))} - {"\n"} | {*map(chr, range(127, 160))})
    assert "a\\x1b[2Jb" in shown.text


def test_styles_are_for_terminals_with_colours_and_without_wrapping() -> None:
    coloured = Shown(force_terminal=True, color_system="standard", no_color=False)
    coloured.view.show(Reasoning("why " + "x" * 200))
    assert coloured.text.startswith("\x1b[2mwhy x")
    assert "\n" not in coloured.text
    plain = Shown(force_terminal=True, color_system=None)
    plain.view.show(Reasoning("why"))
    plain.view.show(Text("**b**"))
    plain.view.end_answer()
    assert plain.text == "why\n**b**\n"


def test_parts_of_an_answer_begin_lines_and_notes_stand_between() -> None:
    shown = Shown()
    for event in (
        Reasoning("well"), Reasoning(" now"), Text("so"), ToolBegin(0, "1", "f"),
        ToolArguments(0, '{"a":'), ToolArguments(0, "1}"), ToolBegin(1, "2", "g"),
        Text("on"), Resumed(5, True), Text("ward"), Resumed(6, False),
    ):  # fmt: skip
        shown.view.show(event)
    shown.view.end_answer()
    assert shown.text.splitlines() == [
        "well now",
        "so",
        'calls f {"a":1}',
        "calls g ",
        "on",
        "(another engine continues after 5 tokens)",
        "ward",
        "(another engine continues after 6 tokens, perhaps with other words)",
    ]


def test_what_turns_a_text_around_is_shown_and_harmless_text_is_not_changed() -> None:
    assert harmless("Grüße 👩‍🔬\n\tx\u200f\u200e") == "Grüße 👩‍🔬\n\tx\u200f\u200e"

    assert harmless("a\u202eb\u2066\ud83d") == r"a\u202eb\u2066\ud83d"


def test_a_turn_measures_from_the_question() -> None:
    clock = iter([10.0, 10.5, 12.0])
    turn = ChatTurn(lambda: next(clock))
    turn.add(Started("r", range(30), 16))
    turn.add(Text("a"))
    assert turn.stats() == TurnStats(num_prompt_tokens=30, num_cached_tokens=16, ttft_s=0.5)
    turn.add(Text("b"))
    turn.add(Finished("stop", Usage(30, 16, 8, 0)))
    stats = turn.stats()
    assert (stats.tokens_per_s, stats.num_context_tokens) == (4.0, 38)
    assert turn.message() == {"role": "assistant", "content": "ab"}


def test_nothing_is_no_answer() -> None:
    turn = ChatTurn()
    turn.add(Started("r", range(3), 0))
    assert turn.message() is None


FIGURES = TurnStats(
    num_prompt_tokens=1030, num_cached_tokens=16, num_output_tokens=8, ttft_s=0.5, tokens_per_s=4.0
)


@pytest.mark.parametrize(
    ("num_columns", "line"),
    [
        (200, "m | context 1,038/2,048 | 4 tokens/s | first 500 ms | prompt 1,030 (16 cached)"),
        (40, "m | context 1,038/2,048 | 4 tokens/s"),
        (20, "m"),
        (0, ""),
    ],
)
def test_a_narrow_terminal_shows_what_matters_most(num_columns: int, line: str) -> None:
    assert status_line("/models/m/", FIGURES, 2048, num_columns) == line


def test_what_nobody_counts_or_says_is_not_shown() -> None:
    turn = ChatTurn(iter([1.0, 2.0]).__next__)
    turn.add(Started("r", (), 0))
    turn.add(Text("a"))
    turn.add(Finished("stop", Usage(0, 0, 0, 0)))
    assert status_line("m", turn.stats(), 1000, 80) == "m | first 1,000 ms"

    assert status_line("m\x1b", TurnStats(), None, 80) == "m\\x1b"


def test_of_an_answer_that_was_stopped_the_prompt_is_known() -> None:
    turn = ChatTurn(iter([1.0, 2.0]).__next__)
    turn.add(Started("r", range(30), 16))
    turn.add(Text("a"))
    line = "m | context 30/1,000 | first 1,000 ms | prompt 30 (16 cached)"
    assert status_line("m", turn.stats(), 1000, 80) == line


@pytest.mark.parametrize(
    ("reason", "max_model_len", "words"),
    [
        ("stop", 1038, ""),
        ("stop", 1038, "why"),
        ("length", 1038, "the context of 1,038 tokens is full"),
        ("length", None, "max_tokens"),
        ("error", 2048, "ended early: why"),
    ],
)
def test_an_answer_that_is_not_whole_says_why(
    reason: str, max_model_len: int | None, words: str
) -> None:
    answer = ChatAnswer(finish_reason=reason, message=words and "why")  # type: ignore[arg-type]
    assert words in incompleteness(answer, FIGURES, max_model_len)
    assert bool(words) == bool(incompleteness(answer, FIGURES, max_model_len))
