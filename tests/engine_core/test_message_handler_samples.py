"""Samples and log probabilities at the message handler: ids, handles, aborts, and slow clients."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from nanocore.demo_model import demo_model_folder
from nanocore.engine_core.io.control_handler import ServedFiles
from nanocore.engine_core.io.session import MAX_BACKLOG_BYTES
from nanocore.engine_core.mailbox import AbortRequests, AddRequest
from nanocore.engine_core.scheduling.columns import LogprobColumns, TokenColumns
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.protocol.codec import pack_int32
from nanocore.protocol.messages import Event, Output, Submit
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.protocol.sockets.options import SendResult
from tests.engine_core.scripted_io import Io

FILES = ServedFiles(demo_model_folder())


@pytest.fixture
def io() -> Io:
    return Io(FILES)


def submit(io: Io, request_id: str, n: int, peer: bytes = b"a", **sampling: int) -> list[int]:
    """Submit a request; returns its samples' handles."""
    params = EngineSamplingParams(n=n, **sampling)
    message = Submit(request_id=request_id, prompt_token_ids=pack_int32([1]), sampling=params)
    io.receive(message, peer)
    event = io.next_event(AddRequest)
    return [one.handle for one in event.request.samples]


def handles(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def aborted(io: Io) -> list[int]:
    event = io.next_event(AbortRequests)
    return event.handles


def output(num_candidates: int, *owners: int, of_prompt: int = 0) -> ClientOutput:
    """A token for each of these handles, with so many candidates; and entries of a prompt."""

    def entries(names: list[int]) -> LogprobColumns:
        num = len(names)
        return LogprobColumns(
            np.array(names, np.uint32),
            np.ones(num, np.int32),
            np.full(num, num_candidates),
            np.arange(num * num_candidates, dtype=np.int32),
            np.zeros(num * num_candidates, np.float32),
        )

    said = TokenColumns(np.array(owners, np.uint32), np.array(owners, np.int32))
    said.logprobs = entries([*owners]) if owners else None
    prompt = entries([1] * of_prompt) if of_prompt else None
    return ClientOutput(1, said, [], prompt)


def test_a_slow_clients_log_probabilities_are_merged_with_its_tokens(io: Io) -> None:
    submit(io, "x", 2)
    io.take_sent()
    io.peers.state[b"a"] = SendResult.FULL
    io.handler.deliver(output(2, of_prompt=2), io.now_s)
    io.handler.deliver(output(1, 1, 2), io.now_s)
    io.handler.deliver(output(3, 2), io.now_s)
    assert io.session.backlog is not None
    assert io.session.backlog.num_bytes == 5 * 12 + (4 + 2 + 3) * 8
    del io.peers.state[b"a"]
    io.flush()
    message = io.take_one(Output)
    assert np.frombuffer(message.tokens, "<i4").tolist() == [1, 2, 2]
    assert message.logprobs is not None
    assert message.prompt_logprobs is not None
    assert np.frombuffer(message.logprobs.handles, "<u4").tolist() == [1, 2, 2]
    assert np.frombuffer(message.logprobs.counts, "<u4").tolist() == [1, 1, 3]
    assert np.frombuffer(message.prompt_logprobs.counts, "<u4").tolist() == [2, 2]
    assert io.session.backlog is None


@pytest.mark.parametrize("of_prompt", [False, True])
def test_who_lets_too_many_log_probabilities_wait_is_cut_off(
    io: Io, of_prompt: bool, caplog: pytest.LogCaptureFixture
) -> None:
    (handle,) = submit(io, "x", 1)
    io.peers.state[b"a"] = SendResult.FULL
    one = output(2**17, of_prompt=1) if of_prompt else output(2**17, handle)  # a MiB
    num_taken = 0
    while io.in_session():
        io.check_tables()
        io.handler.deliver(one, io.now_s)
        num_taken += 1
        assert num_taken <= MAX_BACKLOG_BYTES // 2**20
    assert aborted(io) == [handle]
    with caplog.at_level(logging.INFO):
        io.check_sessions()
    assert "the client does not read its log probabilities or embeddings (1)" in caplog.text


def test_what_a_client_has_read_counts_no_more(io: Io) -> None:
    (handle,) = submit(io, "x", 1)
    for _ in range(5):
        io.peers.state[b"a"] = SendResult.FULL
        for _ in range(3):
            io.handler.deliver(output(2**17, handle), io.now_s)
        io.handler.flush(io.now_s)  # tried, and not taken
        del io.peers.state[b"a"]
        io.flush()
        assert io.session.backlog is None
    assert io.in_session() == {b"a"}


class FullAfter:
    """Peers of which one takes so many messages, and then no more for now."""

    def __init__(self, io: Io, num: int) -> None:
        self._send, self._left = io.peers.send, num
        io.peers.send = self.send  # type: ignore[method-assign]

    def send(self, routing_id: bytes, frames: list[bytes]) -> SendResult:
        self._left -= 1
        return SendResult.FULL if self._left < 0 else self._send(routing_id, frames)

    def take(self, num: int) -> None:
        self._left = num


def test_an_output_in_parts_goes_on_where_the_socket_was_full(io: Io) -> None:
    """And what comes meanwhile follows it."""
    submit(io, "x", 7)
    io.take_sent()
    peers = FullAfter(io, 1)
    io.handler.deliver(output(2**14, 1, 2, 3, 4, 5, 6), io.now_s)  # 768 KiB: parts of 512
    backlog = io.session.backlog
    assert backlog is not None
    assert backlog.num_bytes == backlog.logprobs_bytes > 0
    more = output(1, 7)
    more.events.append(Event(handle=7, finish_reason="length"))
    io.handler.deliver(more, io.now_s)
    peers.take(100)
    io.flush()
    messages = io.take_sent()
    tokens = [np.frombuffer(one.tokens, "<i4").tolist() for one in messages
              if isinstance(one, Output)]  # fmt: skip
    assert tokens == [[1, 2, 3, 4], [5, 6], [7]]
    assert io.session.backlog is None
    assert (backlog.num_bytes, backlog.logprobs_bytes) == (0, 0)
