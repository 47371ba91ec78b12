"""The message handler under anything that clients, their connections and a step loop may do.

Beside the desk run models of both sides: each client reads what it is sent, as the SDK would, and
the step loop runs what it is given. A failure is shrunk to the shortest trace of messages, steps,
stalls and disappearances that shows it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nanocore.demo_model import demo_model_folder
from nanocore.engine_core.io.control_handler import ServedFiles
from nanocore.engine_core.io.handshake import SESSION_TIMEOUT_S
from nanocore.engine_core.mailbox import (
    AbortRequests,
    AddRequest,
    ControlCall,
    ControlReply,
    GrammarDone,
)
from nanocore.engine_core.requests.readiness import GRAMMAR
from nanocore.engine_core.scheduling.columns import TokenColumns
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.protocol.codec import encode, unpack_output
from nanocore.protocol.messages import (
    Abort,
    Accepted,
    Bye,
    Control,
    Error,
    Event,
    FinishReason,
    Hello,
    Message,
    Output,
    Ping,
    Pong,
    Refused,
    Reply,
    Submit,
    Welcome,
)
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.protocol.sockets.options import SendResult
from nanocore.protocol.structured_outputs import StructuredOutputs
from tests.campaign import examples
from tests.engine_core.scripted_io import MAX_NUM_CLIENTS, Io
from tests.fakes import FakePeers

FILES = ServedFiles(demo_model_folder())
IDS = ["x", "y", "z"]
BAD_SUBMITS = [{"prompt_token_ids": b""}, {"cache_salt": ""}, {"priority": 2**40}]
NO_MESSAGES = [[b"?", b""], [b""], [b"\x10"], [b"\x14", b"\xc1"], [b"\x01", b"\x80"]]
MAX_BACKLOGS_BYTES = 2**20
PEERS = st.sampled_from([0, 0, 0, 1, 1, 2, 3])
TIMEOUTS_S = st.sampled_from([None, None, 1, 5, 40])
LOOK_BYTES = 2**20  # an unread answer is noticed a MiB late at most
NUM_CHUNKS = 120  # of 22 KB: more than both limits together


class StrictPeers(FakePeers):
    """Who has no session is told nothing but why a message of its own was for nothing."""

    def send(self, routing_id: bytes, frames: Sequence[bytes]) -> SendResult:
        result = super().send(routing_id, frames)
        if result is SendResult.SENT and routing_id not in self.admitted:
            assert isinstance(self.sent[-1][1], (Error, Refused)), "to a closed session"
        return result


@dataclass
class Client:
    """One connection. last_seen_s: when it last sent something that says it is alive.

    num_samples: of each request there was, by its first handle. owed: answers by kind, or by
    request id, that it waits for. num_tokens: by handle.
    """

    routing_id: bytes
    num_samples: dict[int, int]
    is_open: bool = False
    last_seen_s: float = 0.0
    owed: Counter[object] = field(default_factory=Counter)
    num_tokens: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    def read(self, message: Message) -> None:
        match message:
            case Accepted(request_id=request_id, handle=handle):
                self.settle(request_id)
                for sample in range(handle, handle + self.num_samples[handle]):
                    assert sample not in self.num_tokens
                    self.num_tokens[sample] = 0
            case Error(request_id=request_id, code=code):
                self.settle("error" if request_id is None else request_id)
                assert code in (
                    "protocol_error",
                    "unknown_op",
                    "no_session",
                    "overloaded",
                    "invalid_request",
                    "duplicate_request_id",
                )
            case Output():
                self._read_output(message)
            case Ping():
                pass
            case _:
                self.settle(type(message))

    def settle(self, kind: object) -> None:
        self.owed[kind] -= 1
        assert self.owed[kind] >= 0, f"{kind} was not asked for"

    def _read_output(self, output: Output) -> None:
        handles, counts, tokens = unpack_output(output)
        stream = iter(tokens)
        for handle, count in zip(handles, counts or [1] * len(handles), strict=True):
            assert handle not in self.ended
            for token in itertools.islice(stream, count):
                assert token == self.num_tokens[handle], "tokens come whole and in order"
                self.num_tokens[handle] += 1
        for event in output.events:
            assert event.handle in self.num_tokens
            assert event.handle not in self.ended, "a request ends once"
            self.ended.add(event.handle)


class MessageHandlerMachine(RuleBasedStateMachine):
    """One engine's desk; of its four peers three can be in session at once, and are at first."""

    @initialize()
    def start(self) -> None:
        self.io = Io(FILES, StrictPeers(), max_backlogs_bytes=MAX_BACKLOGS_BYTES)
        self.num_samples: dict[int, int] = {}
        self.clients = [Client(name, self.num_samples) for name in (b"a", b"b", b"c", b"d")]
        self.clients[0].is_open = True
        self.clients[0].last_seen_s = self.io.now_s
        self.hello(1)
        self.hello(2)
        self.num_gone = 0
        self.owners: dict[int, int] = {}  # of every request there was: its client's number
        self.given: set[int] = set()  # to the step loop
        self.compiling: dict[int, list[int]] = {}  # of these: all samples, by each one's handle
        self.running: dict[int, int] = {}  # how many tokens each has
        self.aborting: set[int] = set()
        self.deadlines_s: dict[int, float] = {}  # of requests that have one and were not told
        self.last_noted = 0
        self.calls: list[ControlCall] = []
        self.pausing: set[int] = set()

    # What clients do.

    def send(self, peer: int, frames: list[bytes], owed: object, is_valid: bool = True) -> None:
        client = self.clients[peer]
        is_full = self.is_full(client)
        if client.is_open and is_valid:
            client.last_seen_s = self.io.now_s
        if client.is_open or not is_full:  # for a guest nothing is kept
            client.owed[owed if client.is_open else "error"] += 1
        self.io.receive_frames(frames, client.routing_id)

    def is_full(self, client: Client) -> bool:
        return self.io.peers.state.get(client.routing_id) is SendResult.FULL

    @rule(peer=PEERS)
    def hello(self, peer: int) -> None:
        client = self.clients[peer]
        if client.is_open:
            self.send(peer, encode(Hello(protocol=(1, 4))), "error")
            return
        has_room = len(self.io.handler.sessions) < MAX_NUM_CLIENTS
        client.is_open = has_room
        client.last_seen_s = self.io.now_s
        if has_room or not self.is_full(client):
            client.owed[Welcome if has_room else Refused] += 1
        self.io.receive(Hello(protocol=(1, 4)), client.routing_id)

    def clients_gone(self) -> list[int]:
        """The numbers of those whose connection has ended, while their session is still open."""
        sessions = self.io.handler.sessions.by_client
        states = self.io.peers.state
        return [i for i, one in sessions.items() if states.get(one.routing_id) is SendResult.GONE]

    @rule(
        peer=PEERS,
        request_ids=st.lists(st.sampled_from(IDS), min_size=1, max_size=3),
        n=st.sampled_from([1, 1, 2, 3]),
        timeout_s=TIMEOUTS_S,
    )
    def submit(self, peer: int, request_ids: list[str], n: int, timeout_s: float | None) -> None:
        if not self.clients[peer].is_open:
            self.hello(peer)
        for request_id in request_ids:
            params = EngineSamplingParams(n=n) if n > 1 else None
            submit = Submit(
                request_id=request_id,
                prompt_token_ids=b"\1\0\0\0",
                sampling=params,
                timeout_s=timeout_s,
            )
            self.send(peer, encode(submit), request_id)
            self.note_deadlines(peer, request_id, timeout_s)

    def note_deadlines(self, peer: int, request_id: str, timeout_s: float | None) -> None:
        """Of a request that was submitted just now, if it was taken."""
        session = self.io.handler.sessions.by_peer.get(self.clients[peer].routing_id)
        handles = () if session is None else session.requests.get(request_id, ())
        new = [handle for handle in handles if handle > self.last_noted]
        if new and timeout_s is not None:
            self.deadlines_s |= dict.fromkeys(new, self.io.now_s + timeout_s)
        self.last_noted = max([self.last_noted, *new])

    @rule(
        peer=PEERS,
        request_id=st.sampled_from(IDS),
        regex=st.sampled_from(["a", "b", "c", "d", "e", "bad", "bad b", "busy"]),
        n=st.sampled_from([1, 1, 2]),
        timeout_s=TIMEOUTS_S,
    )
    def submit_structured(
        self, peer: int, request_id: str, regex: str, n: int, timeout_s: float | None
    ) -> None:
        if not self.clients[peer].is_open:
            self.hello(peer)
        wanted = StructuredOutputs(regex=regex)
        params = EngineSamplingParams(n=n, structured_outputs=wanted)
        submit = Submit(
            request_id=request_id,
            prompt_token_ids=b"\1\0\0\0",
            sampling=params,
            timeout_s=timeout_s,
        )
        self.send(peer, encode(submit), request_id)
        self.note_deadlines(peer, request_id, timeout_s)

    @rule(num=st.integers(1, 3))
    def compile(self, num: int) -> None:
        for _ in range(min(num, len(self.io.grammars.waiting))):
            self.io.grammars.finish()

    @rule(peer=PEERS, request_id=st.sampled_from(IDS), bad=st.sampled_from(BAD_SUBMITS))
    def submit_badly(self, peer: int, request_id: str, bad: dict) -> None:
        client = self.clients[peer]
        fields = {"request_id": request_id, "prompt_token_ids": b"\1\0\0\0"} | bad
        frames = encode(Submit(**fields))
        before = dict(self.io.handler.sessions.request_ids)
        self.send(peer, frames, request_id)
        if client.is_open:
            after = self.io.handler.sessions.request_ids
            assert before.items() >= after.items(), "nothing new"

    @rule(
        peer=PEERS,
        request_ids=st.lists(st.sampled_from(IDS), max_size=4),
        handles=st.lists(st.integers(0, 12), max_size=3),
    )
    def abort(self, peer: int, request_ids: list[str], handles: list[int]) -> None:
        session = self.io.handler.sessions.by_peer.get(self.clients[peer].routing_id)
        requests = {} if session is None else session.requests
        own = {handle for request_id in request_ids for handle in requests.get(request_id, ())}
        own = {handle for handle in own if handle not in self.compiling}
        self.work()
        if session is not None:
            own |= {h for h in handles if h in self.running and self.owners[h] == session.client}
        before = set(self.aborting)
        column = np.array(handles, "<u4").tobytes()
        self.send(peer, encode(Abort(request_ids=request_ids, handles=column)), "nothing")
        self.work()
        assert self.aborting == before | own, "one's own, and no other's"

    @rule(peer=PEERS, operation=st.sampled_from(["stats", "pause", "resume"]))
    def call(self, peer: int, operation: str) -> None:
        self.send(peer, encode(Control(call_id=1, operation=operation)), Reply)

    @rule(peer=PEERS)
    def read_much(self, peer: int) -> None:
        chunk = encode(Control(call_id=1, operation="read_file", file="tokenizer.json"))
        for _ in range(NUM_CHUNKS if self.is_full(self.clients[peer]) else 1):
            self.send(peer, chunk, Reply)
            if self.clients[peer].routing_id not in self.io.in_session():
                break

    @rule(peer=PEERS, garbage=st.none() | st.sampled_from(NO_MESSAGES))
    def ping(self, peer: int, garbage: list[bytes] | None) -> None:
        if garbage is None:
            self.send(peer, encode(Ping()), Pong)
        else:
            self.send(peer, garbage, "error", is_valid=False)

    @rule(peer=PEERS, end=st.sampled_from(["bye", "gone", "gone unnoticed"]))
    def leave(self, peer: int, end: str) -> None:
        """By BYE, or the connection ends and the client makes another."""
        client = self.clients[peer]
        if end == "bye":
            self.io.receive(Bye(), client.routing_id)
            self.close(client)
            return
        self.io.peers.state[client.routing_id] = SendResult.GONE
        if end == "gone":
            self.io.handler.peer_gone(client.routing_id)
            assert client.routing_id not in self.io.in_session()
        self.num_gone += 1
        self.clients[peer] = Client(b"%d" % self.num_gone, self.num_samples)

    def close(self, client: Client) -> None:
        """Its session has ended: what it waits for will not come, and the next one is new."""
        client.is_open = False
        client.owed.clear()
        client.num_tokens.clear()
        client.ended.clear()

    # What becomes of their connections.

    @rule(peer=PEERS)
    def stop_reading(self, peer: int) -> None:
        """From now on; what the step loop produces next finds it so."""
        self.io.peers.state[self.clients[peer].routing_id] = SendResult.FULL
        self.step(picks=255, ends=4)

    @rule(peer=PEERS)
    def read_again(self, peer: int) -> None:
        self.io.peers.state.pop(self.clients[peer].routing_id, None)
        self.io.flush()

    @rule(seconds=st.sampled_from([1, 1, 10, 31]))
    def wait(self, seconds: int) -> None:
        io = self.io
        slow = {client.routing_id for client in self.clients if self.is_full(client)}
        io.now_s += seconds
        self.end_overdue()
        io.flush()
        io.check_sessions()
        assert not self.clients_gone()
        for client in filter(lambda one: one.is_open, self.clients):
            is_silent = io.now_s - client.last_seen_s > SESSION_TIMEOUT_S
            is_closed = client.routing_id not in io.in_session()
            assert is_closed >= is_silent
            if is_closed:
                assert is_silent or client.routing_id in slow
                self.read()
                self.close(client)

    def end_overdue(self) -> None:
        """Requests past their deadlines are aborted, and those of a client that turns out gone."""
        io = self.io
        self.work()
        by_client = io.handler.sessions.by_client
        waiting = {handle for handle in self.deadlines_s if handle in self.compiling}
        known = waiting | {h for h in self.running if self.owners[h] in by_client}
        left = {handle: s for handle, s in self.deadlines_s.items() if handle in known}
        assert io.handler.requests.deadlines.next_s <= min(left.values(), default=math.inf)
        overdue = {handle for handle, s in left.items() if s <= io.now_s}
        io.handler.requests.end_overdue(io.now_s)
        expected = self.aborting | (overdue & self.running.keys())
        self.work()
        assert expected <= self.aborting
        # Telling a client about the end of its request may show that the client is gone.
        assert all(self.owners[h] not in by_client for h in self.aborting - expected)
        dropped = {handle for handle in waiting - overdue if handle not in self.compiling}
        assert not dropped or self.num_gone > 0
        assert not any(handle in self.compiling for handle in overdue)
        for handle in overdue:  # they are told once
            del self.deadlines_s[handle]

    # What the step loop does.

    @rule(picks=st.integers(0, 2**8 - 1), ends=st.integers(0, 2**8 - 1))
    def step(self, picks: int, ends: int) -> None:
        """A token for some requests, the end of some of these, and of all that are aborted."""
        self.work()
        # None of the others waits any more.
        self.io.counters.dequeued_reqs = len(self.given) - len(self.compiling)
        outputs: dict[int, tuple[list[tuple[int, int]], list[Event]]] = {}
        for i, handle in enumerate(list(self.running)):
            tokens, events = outputs.setdefault(self.owners[handle], ([], []))
            if handle in self.aborting:
                events.append(Event(handle=handle, finish_reason="abort"))
            elif picks >> i & 1:
                tokens.append((handle, self.running[handle]))
                self.running[handle] += 1
                if ends >> i & 1:
                    events.append(Event(handle=handle, finish_reason="length"))
        for client, (tokens, events) in outputs.items():
            if not tokens and not events:
                continue
            is_slow = client in self.io.handler.sessions.slow
            handles, ids = zip(*tokens, strict=True) if tokens else ((), ())
            columns = TokenColumns(np.array(handles, np.uint32), np.array(ids, np.int32))
            self.io.handler.deliver(ClientOutput(client, columns, events), self.io.now_s)
            assert is_slow or client not in self.clients_gone(), "sending has told that it is gone"
            for event in events:
                del self.running[event.handle]
        self.aborting.clear()

    @rule()
    def answer_calls(self) -> None:
        for call in self.calls:
            reply = ControlReply(call.client, Reply(call_id=call.call_id))
            self.io.handler.deliver(reply, self.io.now_s)
        self.calls.clear()

    def work(self) -> None:
        """Take what is in the inbox."""
        while not self.io.inbox.empty():
            match self.io.inbox.get_nowait():
                case AddRequest(request):
                    handles = [sample.handle for sample in request.samples]
                    assert self.given.isdisjoint(handles), "a handle used again"
                    self.given.update(handles)
                    self.num_samples[request.handle] = len(handles)
                    self.owners |= dict.fromkeys(handles, request.client)
                    if GRAMMAR in request.waits_for:
                        self.compiling |= dict.fromkeys(handles, handles)
                    else:
                        self.running |= dict.fromkeys(handles, 0)
                case GrammarDone(handle, compiled) as event:
                    handles = self.take_compiling(handle)
                    if not isinstance(compiled, Exception):
                        self.running |= dict.fromkeys(handles, 0)
                    if handles:
                        self.io.handler.deliver(event, self.io.now_s)
                case AbortRequests(handles, reason):
                    assert handles
                    assert len(set(handles)) == len(handles)
                    known = self.running.keys() | self.compiling.keys()
                    assert known >= set(handles), "aborts what has ended"
                    self.aborting.update(one for one in handles if one in self.running)
                    self.end_compiling(handles, reason)
                case ControlCall() as call:
                    self.calls.append(call)
                    change = self.pausing.add if call.operation == "pause" else self.pausing.discard
                    if call.operation != "stats":
                        change(call.client)

    def take_compiling(self, handle: int) -> list[int]:
        """All samples of a request that is compiled no longer."""
        handles = self.compiling.get(handle, [])
        for sample in handles:
            del self.compiling[sample]
        return handles

    def end_compiling(self, handles: list[int], reason: FinishReason) -> None:
        """The step loop ends them at once, all samples of a client together."""
        ends: dict[int, list[Event]] = {}
        for handle in handles:
            for sample in self.take_compiling(handle):
                event = Event(handle=sample, finish_reason=reason)
                ends.setdefault(self.owners[sample], []).append(event)
        columns = TokenColumns(np.zeros(0, np.uint32), np.zeros(0, np.int32))
        for client, events in ends.items():
            self.io.handler.deliver(ClientOutput(client, columns, events), self.io.now_s)

    # What holds after each.

    def read(self) -> None:
        """Clients read what they were sent."""
        alive = {client.routing_id: client for client in self.clients}
        for routing_id, message in self.io.peers.sent:
            alive[routing_id].read(message)
        self.io.peers.sent.clear()

    @invariant()
    def check(self) -> None:
        self.io.check_tables()
        self.work()
        self.read()
        table = self.io.handler.sessions
        held_bytes = [one.backlog.num_bytes for one in table.slow.values() if one.backlog]
        assert sum(held_bytes) <= MAX_BACKLOGS_BYTES + len(held_bytes) * LOOK_BYTES
        for client in self.clients:
            session = table.by_peer.get(client.routing_id)
            if client.is_open and session is None:
                assert self.is_full(client), "no other session ends unasked"
                self.close(client)
            assert client.is_open == (session is not None)
            if session is not None:
                own = {h for h in self.running if self.owners[h] == session.client}
                known = {h for handles in session.requests.values() for h in handles}
                waiting = {handle for handle in known if handle in self.compiling}
                assert known - waiting == own
                assert all(self.owners[handle] == session.client for handle in client.num_tokens)
                if session.backlog is None:
                    unanswered = [i for i, own in session.requests.items() if own[0] in waiting]
                    assert +self.answers(client) == Counter(unanswered)
        gone = {h for h in self.running if self.owners[h] not in table.by_client}
        assert gone <= self.aborting, "nobody waits for these"
        assert self.pausing <= table.by_client.keys()

    def answers(self, client: Client) -> Counter[object]:
        """What a client that reads still waits for, but for what the step loop is to say."""
        return Counter({k: n for k, n in client.owed.items() if k not in ("nothing", Reply)})

    def teardown(self) -> None:
        if not hasattr(self, "io"):
            return
        self.io.peers.state = {
            routing_id: state
            for routing_id, state in self.io.peers.state.items()
            if state is SendResult.GONE
        }
        self.io.flush()
        self.answer_calls()
        for peer, client in enumerate(self.clients):
            if client.is_open:
                self.abort(peer, IDS, [])
        self.step(0, 0)
        self.check()
        for client in self.clients:
            assert not +Counter({k: n for k, n in client.owed.items() if k != "nothing"})
            if client.is_open:
                assert client.ended == client.num_tokens.keys(), "each request has ended, once"
            self.io.receive(Bye(), client.routing_id)
            client.is_open = False
        for routing_id in self.io.in_session():
            self.io.handler.peer_gone(routing_id)
        self.work()
        self.step(0, 0)
        table = self.io.handler.sessions
        assert not any([table.by_peer, table.by_client, table.slow, table.request_ids])
        assert not self.running
        assert not self.pausing
        self.io.outbox.close()


TestMessageHandler = MessageHandlerMachine.TestCase
TestMessageHandler.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None, derandomize=True
)
