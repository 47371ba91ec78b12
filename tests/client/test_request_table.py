"""Requests under ids of their own, as a resubmission sends them, without a connection."""

from __future__ import annotations

from nanocore.client.connection.request_table import OpenRequest, RequestTable
from nanocore.client.requests.request_stream import RequestStream
from nanocore.protocol.errors import EngineDeadError
from nanocore.protocol.messages import Accepted
from nanocore.protocol.sampling import SamplingParams


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
