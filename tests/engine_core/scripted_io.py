"""A message handler driven by hand, over fake peers, for tests and for fuzzing.

No thread runs and nothing sleeps: whoever drives it calls what the io thread would call.
"""

from __future__ import annotations

import copy
from queue import SimpleQueue
from typing import TypeVar

import numpy as np

from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.core import EngineCore
from nanocore.engine_core.io.admission import Admission
from nanocore.engine_core.io.control_handler import MAX_CALLS, ControlHandler, ServedFiles
from nanocore.engine_core.io.handshake import welcome
from nanocore.engine_core.io.limits import QueueLimit
from nanocore.engine_core.io.message_handler import MessageHandler
from nanocore.engine_core.io.session import MAX_BACKLOG_BYTES, MAX_BACKLOGS_BYTES, Session
from nanocore.engine_core.log.metrics import EngineMetrics
from nanocore.engine_core.mailbox import AddRequest, GrammarDone, Inbox, Outbox, Shutdown
from nanocore.engine_core.scheduling.columns import TokenColumns
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.protocol.codec import encode
from nanocore.protocol.messages import Event, Hello, Message, ModelCard, Output, Submit, Welcome
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.protocol.structured_outputs import StructuredOutputs
from tests.fakes import FakeGrammars, FakePeers, PipelinedExecutor, make_scheduler

T = TypeVar("T")
TOKENIZER = bytes(range(256)) * 300  # more than a chunk
MAX_NUM_CLIENTS = 3
MAX_NUM_QUEUED_REQS = 8
SHUTDOWN_TIMEOUT_S = 30.0
CACHE_LABELS = {"block_size": "4", "num_gpu_blocks": "64"}
CARD = ModelCard(
    model="fake",
    architecture="Fake",
    dtype="float32",
    vocab_size=50,
    max_model_len=64,
    eos_token_ids=[],
    block_size=4,
    num_blocks=16,
)


class Io:
    """A message handler and its surroundings, one client "a" already in session.

    now_s: the time, which stands still unless a test moves it. admission: in place of the real one.
    num_steps: of the step loop, as a test has it. grammars: compile when a test says so. core: the
    step loop; it takes events from the inbox when a test calls `work`.
    """

    def __init__(
        self,
        files: ServedFiles,
        peers: FakePeers | None = None,
        *,
        admission: Admission | None = None,
        max_backlogs_bytes: int = MAX_BACKLOGS_BYTES,
        shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S,
    ) -> None:
        self.peers = peers or FakePeers()
        self.inbox: Inbox = SimpleQueue()
        self.outbox = Outbox()
        self.now_s = 1000.0
        self.num_steps = 0
        self.grammars = FakeGrammars()
        self.scheduler, executor = make_scheduler()
        worker = PipelinedExecutor(executor)
        self.core = EngineCore(self.scheduler, worker, self.inbox, self.outbox)
        self.counters = self.scheduler.counters
        self.counters.num_free_rows = 0  # what comes has to wait
        queue_limit = QueueLimit(MAX_NUM_QUEUED_REQS, 10_000, self.counters)
        self.metrics = EngineMetrics(self.scheduler, queue_limit.rejections, CACHE_LABELS)
        config = EngineConfig(
            max_num_seqs=4, max_num_queued_reqs=MAX_NUM_QUEUED_REQS, max_num_queued_tokens=10_000
        )
        self.handler = MessageHandler(
            self.peers,
            self.inbox,
            welcome(CARD, config, ["prefix_caching"], MAX_NUM_CLIENTS, "0" * 32),
            admission or Admission(CARD, EngineConfig(), queue_limit, self.grammars),
            ControlHandler(self.inbox, files, self.metrics),
            num_steps=lambda: self.num_steps,
            step_age_ms=lambda: 0,
            shutdown_timeout_s=shutdown_timeout_s,
            max_backlogs_bytes=max_backlogs_bytes,
        )
        self.receive(Hello(protocol=(1, 0)))
        assert isinstance(self.take_sent()[0], Welcome)
        self.session = self.handler.sessions.by_peer[b"a"]

    def receive(self, message: Message, routing_id: bytes = b"a") -> None:
        self.receive_frames(encode(message), routing_id)

    def receive_frames(self, frames: list[bytes], routing_id: bytes = b"a") -> None:
        self.handler.receive(routing_id, frames, self.now_s)

    def submit(self, request_id: str) -> int:
        """Submit a request; returns its handle."""
        self.receive(Submit(request_id=request_id, prompt_token_ids=b"\1\0\0\0"))
        return self.next_event(AddRequest).request.handle

    def step(self, *tokens: tuple[int, int], finish: tuple[int, ...] = (), client: int = 1) -> None:
        """Deliver a step's output of (handle, token) pairs."""
        self.handler.deliver(step_output(client, *tokens, finish=finish), self.now_s)

    def submit_structured(self, request_id: str, what: str, n: int = 1, peer: bytes = b"a") -> None:
        """Submit a request whose output is to be what a FakeGrammars makes of a regex."""
        wanted = StructuredOutputs(regex=what)
        params = EngineSamplingParams(n=n, structured_outputs=wanted)
        self.receive(
            Submit(request_id=request_id, prompt_token_ids=b"\1\0\0\0", sampling=params), peer
        )

    def compile(self, num: int = 1) -> None:
        """Finish the oldest compilations; deliver what they came to, as the step loop would.

        Other events stay in the inbox.
        """
        for _ in range(num):
            self.grammars.finish()
        for event in [self.inbox.get_nowait() for _ in range(self.inbox.qsize())]:
            if isinstance(event, GrammarDone):
                self.handler.deliver(event, self.now_s)
            else:
                self.inbox.put(event)

    def work(self) -> None:
        """Let the step loop take what is in its inbox, and deliver what it has to say."""
        self.core.drain_inbox(wait=False)
        for event in self.outbox.drain():
            assert not isinstance(event, Shutdown)
            self.handler.deliver(event, self.now_s)

    def flush(self) -> None:
        self.handler.flush(self.now_s)

    def check_sessions(self) -> None:
        self.handler.check_sessions(self.now_s)

    def take_sent(self) -> list[Message]:
        messages = [message for _, message in self.peers.sent]
        self.peers.sent.clear()
        return messages

    def take_one(self, kind: type[T]) -> T:
        """The one message that was sent."""
        (message,) = self.take_sent()
        assert isinstance(message, kind)
        return message

    def next_event(self, kind: type[T]) -> T:
        event = self.inbox.get_nowait()
        assert isinstance(event, kind)
        return event

    def in_session(self) -> set[bytes]:
        """The peers that have a session."""
        return set(self.handler.sessions.by_peer)

    def check_tables(self) -> None:
        """What must hold between any two messages."""
        table = self.handler.sessions
        sessions = table.by_peer.values()
        owned = [
            (handle, request_id)
            for session in sessions
            for request_id, handles in session.requests.items()
            for handle in handles
        ]
        assert len(dict(owned)) == len(owned), "a handle of two requests"
        assert dict(owned) == table.request_ids
        assert {s.client: s for s in sessions} == table.by_client
        assert all(key == s.routing_id for key, s in table.by_peer.items())
        assert table.by_peer.keys() == self.peers.admitted
        assert len(table) <= MAX_NUM_CLIENTS
        assert {s.client: s for s in sessions if s.backlog is not None} == table.slow
        for session in sessions:
            assert 0 <= session.num_calls <= MAX_CALLS
            assert session.backlog is None or session.backlog.num_bytes <= MAX_BACKLOG_BYTES


def step_output(
    client: int, *tokens: tuple[int, int], finish: tuple[int, ...] = ()
) -> ClientOutput:
    """A client's share of a step, from (handle, token) pairs. finish: handles that end."""
    handles, ids = zip(*tokens, strict=True) if tokens else ((), ())
    events = [Event(handle=handle, finish_reason="length") for handle in finish]
    columns = TokenColumns(np.array(handles, np.uint32), np.array(ids, np.int32))
    return ClientOutput(client, columns, events)


def waiting_siblings(session: Session | None) -> list[list[bytes]]:
    """The frames of each message that waits for this client, in order; they go on waiting."""
    backlog = None if session is None else copy.deepcopy(session.backlog)
    messages = []
    while backlog is not None and (frames := backlog.next()) is not None:
        messages.append(frames)
        backlog.drop_next()
    return messages


def columns(output: Message) -> tuple[list[int], list[int], list[int] | None]:
    """(handles, tokens, counts) of an OUTPUT."""
    assert isinstance(output, Output)
    counts = None if output.counts is None else np.frombuffer(output.counts, "<u4").tolist()
    handles = np.frombuffer(output.handles, "<u4").tolist()
    return handles, np.frombuffer(output.tokens, "<i4").tolist(), counts
