"""How answers go out: merged if they must be, alive in silence, ended when nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from nanocore.client.chat.answer_stream import AnswerStream
from nanocore.client.chat.events import ChatEvent, Finished, Started, Text
from nanocore.client.chat.parsing.reasoning import PlainTextParser
from nanocore.client.tokenizer import Tokenizer
from nanocore.http.delivery import Delivery
from nanocore.http.http_errors import ENGINE_GONE, HttpError, unavailable
from nanocore.http.server_settings import AppSettings
from nanocore.http.state import ServerState
from nanocore.protocol.errors import EngineDeadError, EngineOverloadedError, InvalidRequestError
from tests.client.driven_stream import DrivenStream
from tests.http.asgi import Connection, exchange, turns


class Marks:
    """Implements Encoder: S is a start, F an end, and texts are themselves."""

    keep_alive = b"~"

    def __init__(self, is_stream: bool = True) -> None:
        self.is_stream = is_stream
        self.kept: list[bytes] = []

    def feed(self, number: int, events: Sequence[ChatEvent], num_output_tokens: int) -> bytes:
        parts = [self._mark(number, event) for event in events]
        self.kept += parts
        return b"".join(parts) if self.is_stream else b""

    def finish(self) -> bytes:
        return b"." if self.is_stream else b"".join(self.kept)

    def fail(self, error: HttpError) -> bytes:
        return b"!" + error.message.encode()

    def _mark(self, number: int, event: ChatEvent) -> bytes:
        match event:
            case Started():
                return b"S%d" % number
            case Finished():
                return b"F%d" % number
            case Text():
                return event.delta.encode()
            case _:
                raise AssertionError(event)


class Delivered:
    """A delivery over a connection, of requests that the test drives."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_prompts: int = 1,
        is_stream: bool = True,
        is_slow: bool = False,
        **params: Any,
    ) -> None:
        self.driven = [DrivenStream(tokenizer, **params) for _ in range(num_prompts)]
        for driven in self.driven:
            driven.stream.seed = 0
        answers = [
            AnswerStream(driven.stream, PlainTextParser, tokenizer) for driven in self.driven
        ]
        self.connection = Connection(is_slow=is_slow)
        self.state = ServerState(AppSettings())
        asked = exchange(self.connection, self.state)
        asked.error_body = lambda error: b"?" + error.message.encode()
        self.delivery = Delivery(asked, answers, Marks(is_stream))
        self.task = asyncio.ensure_future(self.delivery.run())

    async def push(self, text: str, number: int = 0) -> None:
        self.driven[number].push(text)
        await turns()


async def test_each_message_of_the_engine_is_one_chunk(tokenizer: Tokenizer) -> None:
    one = Delivered(tokenizer)
    await turns()
    assert one.connection.start is None  # an error may still have its status
    await one.push("ab")
    await one.push("c")
    assert one.connection.bodies == [b"S0ab", b"c"]
    assert one.connection.headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    one.driven[0].end()
    await one.task
    assert one.connection.bodies == [b"S0ab", b"c", b"F0."]
    assert one.driven[0].aborts == []


async def test_tokens_that_come_in_one_turn_are_one_chunk(tokenizer: Tokenizer) -> None:
    one = Delivered(tokenizer)
    await one.push("a")
    for letter in "bcd":
        one.driven[0].push(letter)
    await turns()
    assert one.connection.bodies == [b"S0a", b"bcd"]
    one.connection.leave()
    await one.task


async def test_a_client_that_leaves_aborts_its_request_once(tokenizer: Tokenizer) -> None:
    one = Delivered(tokenizer)
    await one.push("a")
    one.connection.leave()
    await one.task
    assert one.driven[0].aborts == ["r"]
    await one.push("b")
    assert one.connection.bodies == [b"S0a"]
    assert not one.state.deliveries.is_busy


async def test_a_client_that_leaves_before_the_first_token_aborts_it(tokenizer: Tokenizer) -> None:
    for is_stream in (True, False):
        one = Delivered(tokenizer, is_stream=is_stream)
        await turns()
        one.connection.leave()
        await one.task
        assert one.driven[0].aborts == ["r"]
        assert one.connection.start is None


async def test_a_slow_reader_gets_what_came_meanwhile_in_one_chunk(
    tokenizer: Tokenizer,
) -> None:
    one = Delivered(tokenizer, is_slow=True)
    for letter in "abcdef":
        await one.push(letter)
    assert one.connection.num_waits == 1  # nothing is sent on top of what waits
    one.connection.take()
    await turns()
    one.connection.take()
    await turns()
    assert one.connection.bodies == [b"S0a"]
    one.connection.take()
    await turns()
    assert one.connection.bodies == [b"S0a", b"bcdef"]
    await one.push("g")
    one.driven[0].end()
    for _ in range(3):
        one.connection.take()
        await turns()
    await one.task
    assert one.connection.bodies == [b"S0a", b"bcdef", b"g", b"F0."]


async def test_a_slow_reader_that_leaves_aborts_its_request(tokenizer: Tokenizer) -> None:
    one = Delivered(tokenizer, is_slow=True)
    await one.push("a")
    one.connection.leave()
    await one.task
    assert one.driven[0].aborts == ["r"]


async def test_a_whole_answer_is_sent_at_the_end_with_its_length(tokenizer: Tokenizer) -> None:
    one = Delivered(tokenizer, is_stream=False)
    await one.push("ab")
    await one.push("c")
    assert one.connection.start is None
    one.driven[0].end()
    await one.task
    assert one.connection.bodies == [b"S0abcF0"]
    assert one.connection.headers[b"content-length"] == b"7"


async def test_a_whole_answer_with_stop_strings_ends_at_them(tokenizer: Tokenizer) -> None:
    one = Delivered(tokenizer, is_stream=False, stop="X")
    await one.push("ab")
    await one.push("cXd")
    await one.task
    assert one.connection.bodies == [b"S0abcF0"]
    assert one.driven[0].aborts == ["r"]


async def test_several_prompts_go_out_side_by_side(tokenizer: Tokenizer) -> None:
    one = Delivered(tokenizer, num_prompts=2)
    one.driven[0].push("a")
    one.driven[1].push("b")
    await turns()
    await one.push("c", number=1)
    one.driven[1].end()
    await turns()
    one.driven[0].end()
    await one.task
    assert one.connection.bodies == [b"S0aS1b", b"c", b"F1", b"F0."]


async def test_no_stream_begins_before_all_its_prompts_are_accepted(tokenizer: Tokenizer) -> None:
    one = Delivered(tokenizer, num_prompts=2)
    one.driven[1].stream.seed = None
    await one.push("a")
    assert one.connection.start is None
    one.driven[1].stream.fail(InvalidRequestError("no"))
    await one.task
    assert (one.connection.status, one.connection.bodies) == (400, [b"?no"])
    assert one.driven[0].aborts == ["r"]


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequestError("no"), 400),
        (EngineOverloadedError("no", 2.5), 429),
        (EngineDeadError("no"), 503),
    ],
)
async def test_a_failure_before_the_first_token_has_its_status(
    tokenizer: Tokenizer, error: Any, status: int, is_stream: bool
) -> None:
    one = Delivered(tokenizer, is_stream=is_stream)
    await turns()
    one.driven[0].stream.fail(error)
    await one.task
    assert one.connection.status == status
    words = ENGINE_GONE if status == 503 else "no"
    assert one.connection.bodies == [b"?" + words.encode()]
    retry = {429: b"3", 503: b"1"}.get(status)
    assert one.connection.headers.get(b"retry-after") == retry


async def test_a_failure_after_the_first_token_ends_the_stream_and_the_other_prompts(
    tokenizer: Tokenizer,
) -> None:
    one = Delivered(tokenizer, num_prompts=2)
    await one.push("a")
    await one.push("b", number=1)
    one.driven[0].push("c")
    one.driven[0].stream.fail(EngineDeadError("gone"))
    await one.task
    assert one.connection.bodies == [b"S0a", b"S1b", b"c", b"!" + ENGINE_GONE.encode()]
    assert one.driven[1].aborts == ["r"]


@pytest.mark.parametrize(("reason", "status"), [("error", 500), ("abort", 503)])
async def test_an_end_that_nobody_asked_for_is_an_error(
    tokenizer: Tokenizer, reason: Any, status: int
) -> None:
    one = Delivered(tokenizer, is_stream=False)
    await one.push("a")
    one.driven[0].end(reason, message="no memory")
    await one.task
    assert (one.connection.status, one.connection.bodies) == (status, [b"?no memory"])
    one = Delivered(tokenizer)
    await one.push("a")
    one.driven[0].end(reason, message="no memory")
    await one.task
    assert one.connection.bodies == [b"S0a", b"F0!no memory"]


async def test_a_silent_stream_says_that_it_lives(tokenizer: Tokenizer) -> None:
    one, whole = Delivered(tokenizer), Delivered(tokenizer, is_stream=False)
    await turns()
    for delivered in (one, whole):
        delivered.delivery.tick()  # the first one: it may have been sent something just now
        assert delivered.connection.start is None
        delivered.delivery.tick()
        await turns()
    assert one.connection.bodies == [b"~"]
    assert whole.connection.start is None
    await one.push("a")
    one.delivery.tick()
    assert one.connection.bodies == [b"~", b"S0a"]
    for delivered in (one, whole):
        delivered.connection.leave()
        await delivered.task


async def test_a_stream_that_is_over_says_nothing_more(tokenizer: Tokenizer) -> None:
    """Its request may still be open for a turn."""
    one = Delivered(tokenizer)
    await one.push("a")
    one.delivery.tick()
    one.driven[0].end()
    one.delivery.step()
    one.delivery.tick()
    one.delivery.tick()
    assert one.connection.bodies == [b"S0a", b"F0."]
    await one.task


async def test_a_long_backlog_is_sent_in_slices(tokenizer: Tokenizer) -> None:
    one = Delivered(tokenizer)
    await one.push("x" * 5000)
    one.driven[0].end()
    await one.task
    assert len(one.connection.bodies) > 2
    assert one.connection.body == b"S0" + b"x" * 5000 + b"F0."


async def test_what_is_left_when_the_server_ends_is_told(tokenizer: Tokenizer) -> None:
    one, whole = Delivered(tokenizer), Delivered(tokenizer, is_stream=False)
    blocked = Delivered(tokenizer, is_slow=True)
    for delivered in (one, whole, blocked):
        delivered.state.deliveries.add(delivered.delivery)
        await delivered.push("a")
    for delivered in (one, whole, blocked):
        delivered.state.deliveries.fail_all(unavailable("ends", 5.0))
    await one.task
    await whole.task
    assert one.connection.bodies == [b"S0a", b"!ends"]
    assert (whole.connection.status, whole.connection.bodies) == (503, [b"?ends"])
    assert whole.connection.headers[b"retry-after"] == b"5"
    assert one.driven[0].aborts == whole.driven[0].aborts == ["r"]
    assert blocked.connection.start is None
    blocked.connection.leave()
    await blocked.task


async def test_a_bug_ends_the_request_that_shows_it(tokenizer: Tokenizer) -> None:
    one, other = Delivered(tokenizer), Delivered(tokenizer)
    await turns()

    def feed(number: int, events: Sequence[ChatEvent], num_output_tokens: int) -> bytes:
        raise ZeroDivisionError

    one.delivery._encoder.feed = feed  # type: ignore[method-assign]
    one.driven[0].push("a")
    await other.push("b")
    with pytest.raises(ZeroDivisionError):
        await one.task
    assert one.driven[0].aborts == ["r"]
    assert other.connection.bodies == [b"S0b"]
    other.connection.leave()
    await other.task
