"""Who gets what: streams by request id and by handle, without a connection."""

from __future__ import annotations

from nanocore.client.connection.request_table import OpenRequest, RequestTable
from nanocore.client.requests.request_stream import RequestStream
from nanocore.protocol.codec import pack_int32
from nanocore.protocol.errors import EngineDeadError
from nanocore.protocol.messages import Accepted, Event, Output
from nanocore.protocol.sampling import SamplingParams


def _add(table: RequestTable, request_id: str, handle: int | None = None) -> RequestStream:
    params = SamplingParams(detokenize=False)
    stream = RequestStream(request_id, None, [1], params, None, leave=table.leave)
    table.add(OpenRequest(stream))
    if handle is not None:
        table.accept(Accepted(request_id=request_id, handle=handle, seed=0))
    return stream


def _output(tokens: dict[int, int], *events: Event) -> Output:
    return Output(
        handles=pack_int32(tokens), tokens=pack_int32(tokens.values()), events=list(events)
    )


def _read(stream: RequestStream) -> list[int] | None:
    output = stream.read()
    return None if output is None else output.outputs[0].token_ids


def test_each_stream_can_be_read_as_soon_as_its_token_is_delivered() -> None:
    table = RequestTable()
    first, second = _add(table, "a", 1), _add(table, "b", 2)
    table.deliver(_output({2: 20, 1: 10}))
    assert (_read(first), _read(second)) == ([10], [20])
    assert (_read(first), _read(second)) == (None, None)


def test_a_stream_that_was_left_gets_nothing_more_and_its_id_is_free() -> None:
    table = RequestTable()
    left, kept = _add(table, "a", 1), _add(table, "b", 2)
    left.close()
    assert "a" not in table
    again = _add(table, "a", 3)
    table.deliver(_output({1: 10, 2: 20, 3: 30}, Event(handle=1, finish_reason="abort")))
    assert "a" in table, "the end of the first is not the end of the second"
    assert (_read(left), _read(kept), _read(again)) == (None, [20], [30])


def test_an_id_stays_in_use_until_the_engine_has_answered() -> None:
    table = RequestTable()
    _add(table, "a").close()
    assert "a" in table
    table.accept(Accepted(request_id="a", handle=1, seed=0))
    table.deliver(_output({}, Event(handle=1, finish_reason="abort")))
    assert "a" not in table


def test_a_refusal_frees_the_id() -> None:
    table = RequestTable()
    _add(table, "a")
    table.refuse("a", EngineDeadError("?"))
    table.refuse("a", EngineDeadError("?"))
    assert "a" not in table


def test_a_resubmitted_stream_can_be_left_while_a_lost_engine_is_diagnosed() -> None:
    table = RequestTable()
    stream = RequestStream("a", None, [1], SamplingParams(detokenize=False), None, table.leave)
    table.add(OpenRequest(stream, request_id="a~1"))
    table.accept(Accepted(request_id="a~1", handle=1, seed=0))
    table.hand_over(EngineDeadError("?"))  # nobody continues it
    assert table.wire_ids("a") == ["a", "a~1"]
    stream.close()
    assert "a~1" not in table
    assert table.wire_ids("a") == ["a"]
