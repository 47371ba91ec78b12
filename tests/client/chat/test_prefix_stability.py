"""A conversation that goes on keeps the tokens that the engine has, so that the prefix cache hits.

After an answer the engine has the prompt and what the model wrote; next it is sent the longer
conversation, rendered and tokenized anew. Each family's template keeps the former in the latter, or
a table here says why not, and how much stays.

A model may write a text in other tokens than a tokenizer would. Here it writes a tokenizer's; that
the prompt stays whatever the model writes is shown on its own.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, Final

import pytest
import tokenizers

from nanocore.client import InvalidRequestError
from nanocore.client.chat.template import ChatTemplate
from nanocore.client.tokenizer import Tokenizer
from nanocore.demo_model import demo_model_folder
from tests.client.family_templates import FAMILIES
from tests.client.trained_tokenizers import TRAINED

Message = dict[str, Any]
Encode = Callable[[str], list[int]]
TODAY, TOMORROW = datetime(2025, 3, 9), datetime(2025, 3, 10)
BYTES, GPT_2, LLAMA_3 = "bytes", "byte-level gpt-2", "byte-level llama-3"
TESTED: Final = [family for family in FAMILIES if family != "filters"]  # that is none
MARK = re.compile(r"<[|¦/]?[^<>\s\"'=,{}]{1,24}[|¦]?>|\[/?[A-Z_]+\]")
"""What families write around turns; their tokenizers have special tokens for it."""


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def answer(text: str, **more: str) -> Message:
    return {"role": "assistant", "content": text, **more}


def call(city: str) -> Message:
    function = {"name": "weather", "arguments": {"city": city}}
    tool_call = {"id": "call12345", "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [tool_call]}


def result(text: str) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": "call12345", "name": "weather"}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Of a city, now.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
PLAIN = [
    user("Hi there, the fox."), answer("Well, it doesn't jump."),
    user("What is 1234 + 5678?"), answer("1234 + 5678 = 6912."),
    user("A naïve café?"), answer("日本語の 👍🏽 emoji!"), user("Good."), answer("Bye."),
]  # fmt: skip
CALLING = [
    user("Rome?"), call("Rome"), result("21 degrees"), answer("It is warm."),
    user("Oslo?"), call("Oslo"), result("3 degrees"), answer("It is cold."),
    user("Good."), answer("Bye."),
]  # fmt: skip
THOUGHTS = ("The fox is in the south.", "The fox is in the north.")
CONVERSATIONS: dict[str, list[Message]] = {
    "plain": PLAIN,
    "system": [{"role": "system", "content": "Be brief, it's said."}, *PLAIN],
    "tools": CALLING, "tools given": CALLING,
    "reasoning": [
        user("Rome?"), answer("Warm.", reasoning_content=THOUGHTS[0]),
        user("Oslo?"), answer("Cold.", reasoning_content=THOUGHTS[1]),
        user("Good."), answer("Bye."),
    ],
    "think tags": [
        user("Rome?"), answer(f"<think>\n{THOUGHTS[0]}\n</think>\n\nWarm."),
        user("Oslo?"), answer(f"<think>\n{THOUGHTS[1]}\n</think>\n\nCold."),
        user("Good."), answer("Bye."),
    ],
}  # fmt: skip
DROPPED = "thoughts of earlier answers are dropped, and of the last one written, though empty"
CUT = "thoughts of earlier answers are dropped"
OPENED = "the prompt opens a thought, which an earlier answer does not have"
MOVED = "instructions move to the last question"
TOOLS_MOVED = "tools move to the last question"
REPEATED = "results are repeated at the end"
UNLIKE = "the prompt begins an answer, and a call begins otherwise"
FORBIDDEN: dict[tuple[str, str], tuple[str, list[tuple[int, int]]]] = {
    ("reasoning", "plain"): (DROPPED, [(50, 74), (110, 131), (162, 192)]),
    ("reasoning", "system"): (DROPPED, [(63, 87), (123, 144), (175, 205)]),
    ("reasoning", "tools"): (DROPPED, [(37, 60), (92, 105), (126, 149), (180, 193)]),
    ("reasoning", "tools given"): (DROPPED, [(205, 228), (260, 273), (294, 317), (348, 361)]),
    ("reasoning", "reasoning"): (DROPPED, [(37, 68), (65, 96)]),
    ("reasoning", "think tags"): (DROPPED, [(37, 68), (65, 96)]),
    ("dated", "tools"): (UNLIKE, [(84, 125), (220, 261)]),
    ("dated", "tools given"): (UNLIKE, [(95, 136), (231, 272)]),
    ("selecting", "system"): (MOVED, [(8, 75), (61, 127), (113, 183)]),
    ("selecting", "tools given"): (TOOLS_MOVED, [(6, 153), (152, 298)]),
    ("macros", "tools"): (UNLIKE, [(98, 138), (212, 252)]),
    ("macros", "tools given"): (UNLIKE, [(116, 156), (230, 270)]),
    ("macros", "reasoning"): (CUT, [(107, 157), (148, 198)]),
    ("flags", "tools"): (UNLIKE, [(20, 71)]),
    ("flags", "tools given"): (UNLIKE, [(20, 71)]),
    ("flags", "think tags"): (CUT, [(24, 72), (55, 103)]),
    ("loops", "tools"): (REPEATED, [(168, 211), (203, 304), (352, 405)]),
    ("loops", "tools given"): (REPEATED, [(168, 211), (203, 304), (352, 405)]),
    ("hermes_thinking", "plain"): (DROPPED, [(68, 109), (171, 209), (266, 313)]),
    ("hermes_thinking", "system"): (DROPPED, [(118, 159), (221, 259), (316, 363)]),
    ("hermes_thinking", "tools"): (DROPPED, [(57, 283), (313, 538)]),
    ("hermes_thinking", "tools given"): (DROPPED, [(291, 517), (547, 772)]),
    ("hermes_thinking", "reasoning"): (DROPPED, [(55, 103), (126, 174)]),
    ("hermes_thinking", "think tags"): (DROPPED, [(55, 103), (126, 174)]),
    ("brackets", "system"): (MOVED, [(12, 107), (72, 168), (131, 226)]),
    ("brackets", "tools given"): (TOOLS_MOVED, [(6, 427), (208, 628)]),
    ("channels", "reasoning"): (CUT, [(193, 293), (286, 386)]),
    ("wide_bars", "plain"): (OPENED, [(52, 82), (150, 177), (240, 276)]),
    ("wide_bars", "system"): (OPENED, [(72, 102), (170, 197), (260, 296)]),
    ("wide_bars", "tools"): (OPENED, [(40, 157), (431, 548)]),
    ("wide_bars", "tools given"): (OPENED, [(40, 157), (431, 548)]),
    ("wide_bars", "think tags"): (OPENED, [(39, 95), (107, 163)]),
    ("wide_bars_switched", "think tags"): (CUT, [(47, 95), (101, 149)]),
}
"""Why, and for each turn that does not keep all, in bytes: (what stays, what there was)."""
MERGED = {
    ("dated", GPT_2): "newlines before a word are tokens of their own, and at the end they are one",
    ("python_tag", GPT_2): "the same; in Llama 3's own tokenizer newlines are one, always",
    ("documents", LLAMA_3): "no mark ends an answer, and its full stop takes the newline behind it",
}
"""Why tokens of text that stays do not."""
DATED = {
    "dated": 27, "parts": 30, "macros": 29, "marked": 7, "documents": 19,
    "python_tag": 61, "bracket_marks": 34, "channels": 58,
}  # fmt: skip
"""Where the day begins to differ: Llama 3.1 and others write the date into each prompt."""


@cache
def template(family: str, now: datetime) -> ChatTemplate:
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    return ChatTemplate(FAMILIES[family], special, family, now=lambda: now)


def prompt(
    family: str, name: str, end: int, now: datetime = TODAY, add_generation_prompt: bool = True
) -> str:
    messages, tools = CONVERSATIONS[name][:end], TOOLS if name == "tools given" else None
    return "".join(template(family, now).render(messages, add_generation_prompt, tools=tools))


def num_common(one: Sequence[object], other: Sequence[object]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclass(frozen=True)
class Turn:
    """An answer. sent: its prompt. written: by the model, to its last word. after: the prompt of
    the next answer."""

    sent: str
    written: str
    after: str

    @property
    def is_kept(self) -> bool:
        return self.after.startswith(self.sent + self.written)

    def kept(self, encode: Encode) -> tuple[int, int]:
        had = encode(self.sent) + encode(self.written)
        return num_common(had, encode(self.after)), len(had)


def turns(family: str, name: str) -> list[Turn]:
    messages = CONVERSATIONS[name]
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    try:
        prompts = [prompt(family, name, i) for i in places]
    except InvalidRequestError:
        return []
    found = []
    for i, sent, after in zip(places, prompts, prompts[1:], strict=False):
        shown = prompt(family, name, i + 1, add_generation_prompt=False)
        written = _written(messages[i], sent, shown)
        if written is not None:
            found.append(Turn(sent, written, after))
    return found


def _written(message: Message, sent: str, shown: str) -> str | None:
    """What the template makes of the last message when it is new; None if it leaves it out."""
    content = message.get("content", "")
    last_words = (
        content.split("\n")[-1] or message["tool_calls"][0]["function"]["arguments"]["city"]
    )
    start = num_common(shown, sent)  # a call may begin otherwise than an answer
    head, found, _ = shown[start:].rpartition(last_words)
    if not found or message.get("reasoning_content", "") not in head:
        return None
    if any(thought in content and thought not in head for thought in THOUGHTS):
        return content  # never shown, but the model did write it
    return head + last_words


def encoder(kind: str, family: str) -> Encode:
    """A family's tokenizer: bytes, or a trained one that has what it writes around turns."""
    if kind == BYTES:
        return lambda text: [*text.encode()]
    marks: set[str] = set()
    for name, messages in CONVERSATIONS.items():
        with suppress(InvalidRequestError):
            marks |= {*MARK.findall(prompt(family, name, len(messages)))}
    backend = tokenizers.Tokenizer.from_str(_trained(kind))
    backend.add_special_tokens(sorted(marks))
    return lambda text: backend.encode(text, add_special_tokens=False).ids


@cache
def _trained(kind: str) -> str:
    return TRAINED[kind]().to_str()


@pytest.mark.parametrize("family", TESTED)
def test_appended_turns_change_no_text_before_them_but_where_the_table_says_so(family: str) -> None:
    changed = {}
    for name in CONVERSATIONS:
        encode = encoder(BYTES, family)
        kept = [turn.kept(encode) for turn in turns(family, name) if not turn.is_kept]
        if kept:
            changed[family, name] = kept
    expected = {key: kept for key, (_, kept) in FORBIDDEN.items() if key[0] == family}
    assert changed == expected


@pytest.mark.parametrize("kind", [BYTES, GPT_2, LLAMA_3])
@pytest.mark.parametrize("family", TESTED)
def test_where_the_text_stays_its_tokens_do_but_where_the_table_says_so(
    family: str, kind: str
) -> None:
    encode = encoder(kind, family)
    kept = []
    for turn in (turn for name in CONVERSATIONS for turn in turns(family, name)):
        if turn.after.startswith(turn.sent):
            sent, after = encode(turn.sent), encode(turn.after)
            assert after[: len(sent) - 1] == sent[:-1], "all but the last token, anywhere"
            kept.append(turn.kept(encode) if turn.is_kept else (0, 0))
    assert kept, "each family keeps some prompts"
    changed = [(stay, were) for stay, were in kept if stay < were]
    assert bool(changed) is ((family, kind) in MERGED), changed


def test_the_tables_are_of_families_and_conversations_that_there_are() -> None:
    assert {family for family, _ in [*FORBIDDEN, *MERGED]} <= {*TESTED}
    assert {name for _, name in FORBIDDEN} <= CONVERSATIONS.keys()


@pytest.mark.parametrize("family", TESTED)
def test_a_prompt_with_a_date_stays_up_to_it_when_the_day_changes(family: str) -> None:
    today, tomorrow = (prompt(family, "plain", 1, now) for now in (TODAY, TOMORROW))
    assert (today != tomorrow) is (family in DATED), "DATED is of those with a date"
    if family in DATED:
        assert num_common(today, tomorrow) == DATED[family]


@pytest.fixture(scope="module")
def chatml() -> Tokenizer:
    backend = TRAINED[GPT_2]()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    config = demo_model_folder() / "tokenizer_config.json"
    files = {"tokenizer.json": backend.to_str().encode(), config.name: config.read_bytes()}
    return Tokenizer(files, "test")


def encoded(chatml: Tokenizer, text: str) -> tuple[list[int], list[int]]:
    messages: Any = [*PLAIN[:1], answer(text), *PLAIN[:1]]
    return chatml.encode_chat(messages[:1]), chatml.encode_chat(messages)


def test_a_prompt_stays_whatever_tokens_its_answer_is_written_in(chatml: Tokenizer) -> None:
    """A model may write a word letter by letter: from there on all is computed again."""
    text = "The quick brown fox"
    sent, after = encoded(chatml, text)
    letters = [token for letter in text for token in chatml.encode(letter)]
    assert letters != chatml.encode(text)
    num_kept = num_common(sent + letters, after)
    assert len(sent) <= num_kept < len(sent + letters)


@pytest.mark.parametrize(("text", "num_lost"), [("Hello", 0), ("\nHello", 0), ("\n\nHello", 1)])
def test_newlines_that_begin_an_answer_may_join_the_prompts_last_token(
    chatml: Tokenizer, text: str, num_lost: int
) -> None:
    sent, after = encoded(chatml, text)
    assert len(sent) - num_common(sent, after) == num_lost
