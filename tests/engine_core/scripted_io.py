"""An io thread driven by hand over a scripted socket, for tests and for fuzzing.

No thread runs and nothing sleeps: whoever drives it calls what the thread's loop would call.
"""

from __future__ import annotations

from collections import deque
from queue import SimpleQueue

import numpy as np

from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.io.admission import Admission
from nanocore.engine_core.io.client_limit import ClientLimit
from nanocore.engine_core.io.control_desk import MAX_CALLS
from nanocore.engine_core.io.io_thread import IoThread
from nanocore.engine_core.io.model_files import ModelFiles
from nanocore.engine_core.io.queue_limit import QueueLimit
from nanocore.engine_core.io.session import MAX_BACKLOG_BYTES
from nanocore.engine_core.mailbox import AddRequest, Inbox, Outbox
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.engine_core.scheduling.scheduler import SchedulerCounters
from nanocore.protocol.codec import client_decoder, encode
from nanocore.protocol.messages import Event, Hello, Message, ModelCard, Output, Submit, Welcome
from nanocore.protocol.sockets import SendResult

TOKENIZER = bytes(range(256)) * 300  # more than a chunk
MAX_NUM_CLIENTS = 3
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


class FakeSocket:
    """An EngineSocket whose sends are answered as `state` says; what was sent is in `sent`."""

    def __init__(self) -> None:
        self.incoming: deque[tuple[bytes, list[bytes]]] = deque()
        self.sent: list[tuple[bytes, Message]] = []
        self.state: dict[bytes, SendResult] = {}
        self.admitted: set[bytes] = set()
        self.gone: list[bytes] = []
        self.is_busy = False

    def limit(self, max_connections: int, guest_timeout_s: float) -> None: ...

    def watch(self, fd: int) -> None: ...

    def wait(self, timeout_ms: int) -> set[int]:
        return set()

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        return self.incoming.popleft() if self.incoming else None

    def send(self, routing_id: bytes, frames: list[bytes]) -> SendResult:
        result = self.state.get(routing_id, SendResult.SENT)
        if result is SendResult.SENT:
            self.sent.append((routing_id, client_decoder().decode(frames)))
        return result

    def admit(self, routing_id: bytes) -> None:
        self.admitted.add(routing_id)

    def dismiss(self, routing_id: bytes) -> None:
        self.admitted.remove(routing_id)

    def take_gone(self) -> list[bytes]:
        gone, self.gone = self.gone, []
        return gone

    def close(self) -> None: ...


class Io:
    """An io thread driven by hand, one client "a" already in session."""

    def __init__(self, files: ModelFiles) -> None:
        self.socket = FakeSocket()
        self.inbox: Inbox = SimpleQueue()
        self.outbox = Outbox()
        queue_limit = QueueLimit(8, 10_000, SchedulerCounters())
        self.thread = IoThread(
            self.socket,  # type: ignore[arg-type]
            self.inbox,
            self.outbox,
            model=CARD,
            files=files,
            capabilities=["prefix_caching"],
            max_num_seqs=4,
            client_limit=ClientLimit(MAX_NUM_CLIENTS, max_connections=10),
            instance="0" * 32,
            queue_limit=queue_limit,
            admission=Admission(CARD, EngineConfig(), queue_limit),
            num_steps=lambda: 0,
            step_age_ms=lambda: 0,
        )
        self.receive(Hello(protocol=(1, 0)))
        assert isinstance(self.take_sent()[0], Welcome)
        self.session = self.thread._sessions[b"a"]

    def receive(self, message: Message) -> None:
        self.thread._receive(b"a", encode(message))

    def submit(self, request_id: str) -> int:
        """Submit a request; returns its handle."""
        self.receive(Submit(request_id=request_id, prompt_token_ids=b"\1\0\0\0"))
        event = self.inbox.get_nowait()
        assert isinstance(event, AddRequest)
        return event.request.handle

    def step(self, *tokens: tuple[int, int], finish: tuple[int, ...] = (), client: int = 1) -> None:
        """Deliver a step's output of (handle, token) pairs."""
        handles, ids = zip(*tokens, strict=True) if tokens else ((), ())
        events = [Event(handle=handle, finish_reason="length") for handle in finish]
        self.thread._deliver(
            ClientOutput(client, np.array(handles, np.uint32), np.array(ids, np.int32), events)
        )

    def take_sent(self) -> list[Message]:
        messages = [message for _, message in self.socket.sent]
        self.socket.sent.clear()
        return messages

    def check_tables(self) -> None:
        """What must hold between any two messages."""
        thread = self.thread
        owned = [
            (handle, request_id)
            for session in thread._sessions.values()
            for request_id, handle in session.requests.items()
        ]
        assert len(dict(owned)) == len(owned), "a handle of two requests"
        assert dict(owned) == thread._request_ids
        assert {s.client for s in thread._sessions.values()} == thread._clients.keys()
        assert all(key == s.routing_id for key, s in thread._sessions.items())
        assert thread._sessions.keys() == self.socket.admitted
        assert len(thread._sessions) <= MAX_NUM_CLIENTS
        slow = {s.client for s in thread._sessions.values() if s.backlog is not None}
        assert slow == thread._slow.keys()
        for session in thread._sessions.values():
            assert 0 <= session.num_calls <= MAX_CALLS
            assert session.backlog is None or session.backlog.num_bytes <= MAX_BACKLOG_BYTES


def columns(output: Message) -> tuple[list[int], list[int], list[int] | None]:
    """(handles, tokens, counts) of an OUTPUT."""
    assert isinstance(output, Output)
    counts = None if output.counts is None else np.frombuffer(output.counts, "<u4").tolist()
    handles = np.frombuffer(output.handles, "<u4").tolist()
    return handles, np.frombuffer(output.tokens, "<i4").tolist(), counts
