"""A small engine without a model, that keeps to the protocol except for the defects it is given.

It runs in a thread and answers at once; its tokens are a function of the prompt, the seed and the
position. A defect is a name that stands beside what it breaks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from nanocore.protocol.codec import (
    InvalidSubmitError,
    abort_handles,
    encode,
    engine_decoder,
    pack_int32,
    returned_id,
    unpack_int32,
)
from nanocore.protocol.errors import ProtocolError
from nanocore.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Bye,
    Control,
    Draining,
    Error,
    Event,
    Hello,
    Message,
    Op,
    Output,
    Ping,
    Pong,
    Refused,
    Reply,
    Submit,
    Welcome,
)
from nanocore.protocol.metrics import Stats
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.protocol.sockets.curve import EngineKeys
from nanocore.protocol.sockets.engine_socket import bind_engine_socket
from nanocore.protocol.sockets.options import SendResult
from tests.conformance.fake_grammar import UncompilableError
from tests.conformance.fake_model import (
    CHUNK_BYTES,
    FILES,
    INSTANCE,
    LIMITS,
    MAX_NUM_CLIENTS,
    NUM_BLOCKS,
    PING_INTERVAL_MS,
    VOCAB_SIZE,
    Client,
    FakeModel,
    Request,
    model_card,
    right_digests,
)
from tests.conformance.fake_sampling import LogprobColumns
from tests.conformance.fake_watch import FakeWatch
from tests.protocol_files.lines import NEW_IN_1_5, NEW_IN_1_9

NEWER_FIELDS = dict.fromkeys(NEW_IN_1_5, 5) | {"structured_outputs": 6, "pooling": 7}
NEWER_FIELDS |= dict.fromkeys(NEW_IN_1_9, 9)
"""The minor versions that brought fields of clients' messages."""


class FakeEngine(threading.Thread):
    """Serves until `stop`. defects: names of what it does wrong. timeout_s: of silent sessions.

    minor: the protocol's; it knows no field of a later one. structured: whether it has structured
    outputs; SUBMITs with these are answered some messages later, the newest first.
    """

    def __init__(
        self,
        endpoint: str,
        *defects: str,
        keys: EngineKeys | None = None,
        timeout_s: float = 1e-3 * LIMITS.session_timeout_ms,
        minor: int = PROTOCOL_VERSION[1],
        structured: bool = True,
    ) -> None:
        super().__init__(name="fake engine", daemon=True)
        self._socket = bind_engine_socket(endpoint, keys)
        self._defects, self._minor = {*defects}, minor
        self._decoder = engine_decoder()
        self._clients: dict[bytes, Client] = {}
        self._stopping = threading.Event()
        self._timeout_s = timeout_s
        self._pauses: set[str] = set()  # session ids
        self._is_draining = False
        self._num_handles = self._num_sessions = self._num_aborts = 0
        self._num_errors = self._num_steps = self._num_tokens = 0
        self._model = FakeModel(self._defects)
        self._watch = FakeWatch(self._defects)
        self._structured = structured and minor >= 6 and not self.has("structured-at-will")
        self._compiling: list[tuple[Client, Submit]] = []
        self._aborted: set[tuple[str, str]] = set()  # (session, request id) of what compiles
        self._kept: dict[bytes, dict[int, Request]] = {}
        self.failure: BaseException | None = None

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self.join()

    def run(self) -> None:
        """The thread's body."""
        try:
            while not self._stopping.is_set():
                busy = not self._pauses and any(c.requests for c in self._clients.values())
                waiting = any(client.waiting for client in self._clients.values())
                idle = not self._socket.wait(0 if busy else 1 if waiting else PING_INTERVAL_MS)
                # One message a turn: a peer that sends quickly must not keep steps from running.
                if (received := self._socket.receive()) is not None:
                    self._receive(*received)
                    idle = False
                for client in list(self._clients.values()):
                    self._flush(client)
                    self._check_silence(client)
                    if idle and not busy and not self.has("no-pings"):
                        self._send(client, Ping())
                if idle:
                    self._compile()
                self._end_overdue()
                if not self._pauses or self.has("pause-ignored"):
                    self._step()
                if self._is_draining and not any(c.requests for c in self._clients.values()):
                    self._take_leave()
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self._socket.close()

    def has(self, defect: str) -> bool:
        """Whether this engine does that wrong."""
        return defect in self._defects

    def _receive(self, routing_id: bytes, frames: list[bytes]) -> None:
        lost = routing_id not in self._clients and self._clients and frames[0] != b"\1"
        if self.has("session-follows") and lost:
            client = self._clients[routing_id] = self._clients.pop(next(iter(self._clients)))
            client.routing_id = routing_id
        client = self._clients.get(routing_id)
        if self.has("frames-end-others") and len(frames) > 2 and client is not None:
            self._clients = {routing_id: client}
        if client is not None:
            client.heard_s = time.monotonic()
            if self.has("deaf-after-hello") and not client.num_messages:
                client.num_messages += 1
                return
        try:
            message = self._decode(frames)
            if client is not None:
                self._handle(client, message)
            elif isinstance(message, Hello):
                self._welcome(routing_id, message)
            elif not isinstance(message, Bye) and not self.has("no-session-unsaid"):
                raise ProtocolError("HELLO comes first", "no_session")
        except InvalidSubmitError as error:
            self._refuse(routing_id, "invalid_request", str(error), error.request_id)
        except ProtocolError as error:
            self._num_errors += 1
            if self.has("session-ends-on-garbage"):
                self._clients.pop(routing_id, None)
            if self.has("garbage-ends-requests") and client is not None:
                client.requests.clear()
            if not (self.has("silent-on-garbage") and error.code == "protocol_error"):
                if not (self.has("unknown-op-unsaid") and error.code == "unknown_op"):
                    code = "invalid_request" if self.has("wrong-code") else error.code
                    self._refuse(routing_id, code, str(error))

    def _check_silence(self, client: Client) -> None:
        silent = time.monotonic() - client.heard_s > self._timeout_s
        if silent and not self.has("no-timeout"):
            if self.has("bye-at-timeout"):
                self._send(client, Bye(reason="you are silent"))
            self._end_session(client)

    def _end_session(self, client: Client) -> None:
        del self._clients[client.routing_id]
        if not self.has("pause-outlives-session"):
            self._pauses.discard(client.session)

    def _end_overdue(self) -> None:
        """End the requests whose time is over."""
        reason: Any = "abort" if self.has("timeout-is-abort") else "timeout"
        for client in list(self._clients.values()):
            for request in [*client.requests.values()]:
                if time.monotonic() > request.deadline_s:
                    del client.requests[request.handle]
                    self._watch.ended(request.handle, reason)
                    event = Event(handle=request.handle, finish_reason=reason)
                    self._send(client, Output(events=[event]))

    def _drain(self) -> None:
        """Take no more requests, and say so."""
        self._is_draining = not self.has("drain-takes-more")
        for client in self._clients.values():
            if client.minor >= 9 and not self.has("drain-untold"):
                self._send(client, Draining(deadline_ms=30_000))

    def _take_leave(self) -> None:
        """Say BYE: everything has ended."""
        for client in list(self._clients.values()):
            self._send(client, Bye(reason="drained"))
            self._end_session(client)

    def _decode(self, frames: list[bytes]) -> Message:
        if self.has("accepts-unknown-field") and frames[0] == bytes([Op.CONTROL]):
            with suppress(msgspec.MsgspecError, TypeError, UnicodeDecodeError):
                fields = msgspec.msgpack.decode(frames[1])
                known = {name: fields[name] for name in Control.__struct_fields__ if name in fields}
                return msgspec.convert(known, Control)
        if self.has("needs-sorted-fields") and frames[0] == bytes([Op.SUBMIT]):
            if frames[1][1:12] != b"\xaarequest_id":
                raise InvalidSubmitError("request_id comes first", None)
        if self.has("top-p-zero") and b"top_p\xcb\0\0\0\0\0\0\0\0" in b"".join(frames):
            frames = [frames[0], frames[1].replace(b"\xcb\0\0\0\0\0\0\0\0", b"\x01", 1)]
        try:
            message = self._decoder.decode(frames)
            _know_only(message, self._minor)
            return message
        except InvalidSubmitError as error:
            text = "bad request" if self.has("unnamed-field") else str(error)
            text = text.partition("; did you")[0] if self.has("no-guesses") else text
            text = text.partition(" - did you")[0] if self.has("no-guesses") else text
            text = text.replace("array", "list") if self.has("python-words") else text
            text += " (bytes)" if self.has("foreign-words") else ""
            raise InvalidSubmitError(text, error.request_id) from None

    def _welcome(self, routing_id: bytes, hello: Hello) -> None:
        if hello.protocol[0] != 1 and not self.has("other-major-welcome"):
            refused = Refused(message="no", supported=[] if self.has("no-versions") else [(1, 6)])
            self._socket.send(routing_id, encode(refused))
            return
        if len(self._clients) >= MAX_NUM_CLIENTS and not self.has("clients-endless"):
            retry = None if self.has("refusal-without-retry") else 0.5
            refused = Refused(message="full", supported=[(1, 6)], retry_after_s=retry)
            self._socket.send(routing_id, encode(refused))
            return
        self._num_sessions += 1
        number = 1 if self.has("one-session-id") else self._num_sessions
        client = self._clients[routing_id] = Client(routing_id, f"s{number}", hello.protocol[1])
        client.requests = self._kept.pop(routing_id, {})
        minor = min(self._minor, hello.protocol[1])
        minor = self._minor if self.has("minor-kept") else minor
        minor = hello.protocol[1] if self.has("minor-echoed") else minor
        digests = right_digests()
        if self.has("wrong-digest"):
            digests["tokenizer.json"] = "0" * 64
        card = model_card(digests, 0 if self.has("no-vocabulary") else VOCAB_SIZE)
        instance = f"{self._num_sessions:032x}" if self.has("instance-changes") else INSTANCE
        limits = msgspec.structs.replace(LIMITS, session_timeout_ms=int(1e3 * self._timeout_s))
        if self._minor < 7 or self.has("hidden-size-untold"):
            card = msgspec.structs.replace(card, hidden_size=None)
        if self._minor < 8 or self.has("fingerprint-misspelt"):
            numerics = "89ABCDEF" * 4 if self.has("fingerprint-misspelt") else None
            card = msgspec.structs.replace(card, numerics_fingerprint=numerics)
        if self._minor < 5:
            limits = msgspec.structs.replace(limits, max_logprobs=None)
        welcome = Welcome(
            protocol=(1, minor),
            session=client.session,
            engine_instance=instance,
            model=card,
            limits=limits,
            capabilities=[
                "prefix_caching",
                *(["structured_outputs"] if self._structured else []),
                *(["embeddings"] if self._minor >= 7 else []),
            ],
        )
        self._send(client, welcome)

    def _handle(self, client: Client, message: Message) -> None:
        match message:
            case Submit():
                self._submit(client, message)
            case Abort(request_ids=ids):
                for owner in self._clients.values() if self.has("foreign-abort") else [client]:
                    self._abort(owner, ids)
                handles = abort_handles(message)
                for owner in self._clients.values() if self.has("foreign-handles") else [client]:
                    self._abort_samples(owner, handles)
            case Ping(nonce=nonce):
                self._send(client, self._pong(nonce + 1 if self.has("wrong-nonce") else nonce))
            case Pong():
                if self.has("pong-answered"):
                    self._send(client, Pong())
            case Control():
                self._send(client, self._control(client, message))
                if message.operation == "drain":
                    if self.has("drain-aborts"):
                        for owner in self._clients.values():
                            self._abort(owner, [r.request_id for r in owner.requests.values()])
                    self._drain()
            case Bye():
                if self.has("bye-goes-on"):
                    self._kept[client.routing_id] = client.requests
                else:
                    self._num_aborts += 0 if self.has("bye-uncounted") else len(client.requests)
                if not self.has("bye-unheard"):
                    self._end_session(client)
            case Hello():
                if self.has("second-hello-welcome"):
                    client.requests.clear()
                    self._welcome(client.routing_id, message)
                else:
                    raise ProtocolError("HELLO in an open session")

    def _pong(self, nonce: int) -> Pong:
        num_steps = 10**9 - self._num_steps if self.has("steps-go-back") else self._num_steps
        step_age_ms = 99 if self.has("step-age-when-idle") else 0
        return Pong(nonce=nonce, num_steps=num_steps, step_age_ms=step_age_ms)

    def _submit(self, client: Client, submit: Submit) -> None:
        newer = submit.sampling and submit.sampling.skip_reading_prefix_cache
        if self.has("newer-fields-unanswered") and newer and not client.minor:
            return
        queued = sum(len(c.requests) for c in self._clients.values())
        code, text = self._model.objection(client, submit, queued)
        if self._is_draining:
            code, text = "draining", "the engine is about to end"
        if code:
            if self.has("duplicate-ends-first") and code == "duplicate_request_id":
                self._abort(client, [submit.request_id])
            knows = code in ("overloaded", "draining") and not self.has("retry-untold")
            retry = 0.5 if knows else None
            self._refuse(client.routing_id, code, text, submit.request_id, retry)
            return
        wanted = submit.sampling and submit.sampling.structured_outputs
        if wanted is not None and not self._structured and not self.has("structured-at-will"):
            text = "structured_outputs: the engine has no such capability"
            self._refuse(client.routing_id, "invalid_request", text, submit.request_id)
        elif wanted is not None or (self._compiling and self.has("plain-overtake")):
            self._compiling.append((client, submit))
        else:
            self._accept(client, submit)

    def _compile(self) -> None:
        """Answer the SUBMITs with structured outputs."""
        waiting, self._compiling = self._compiling[::-1], []
        aborted, self._aborted = self._aborted, set()
        for client, submit in waiting[: 1 if self.has("compiles-the-newest-only") else None]:
            try:
                texts = self._model.texts(submit.sampling or EngineSamplingParams())
                if client.routing_id in self._clients:
                    self._accept(client, submit, texts)
                    if (client.session, submit.request_id) in aborted:
                        self._abort(client, [submit.request_id])
            except UncompilableError as error:
                text = str(error)
                self._refuse(client.routing_id, "invalid_request", text, submit.request_id)

    def _accept(self, client: Client, submit: Submit, texts: list[str] | None = None) -> None:
        self._num_handles += 0 if self.has("handle-reused") and self._num_handles > 3 else 1
        sampling = submit.sampling or EngineSamplingParams()
        first = self._num_handles
        seed = first if sampling.seed is None else sampling.seed
        step = 2 if self.has("handles-apart") else 1
        samples = [
            Request(
                submit.request_id,
                first + step * i,
                list(unpack_int32(submit.prompt_token_ids)),
                sampling,
                (seed + (0 if self.has("seeds-same") else i))
                % (2**60 if self.has("seeds-do-not-wrap") else 2**53),
                index=i,
                texts=texts,
                deadline_s=self._model.deadline_s(submit),
            )
            for i in range(sampling.n)
        ]
        self._num_handles = samples[-1].handle
        told = Accepted(request_id=submit.request_id, handle=first, seed=seed)
        if self.has("seed-untold"):
            told = msgspec.structs.replace(told, seed=0)
        early = Output(handles=pack_int32([first]), tokens=pack_int32([1]))
        if self.has("output-before-accepted"):
            self._send(client, early)
        self._send(client, told)
        if submit.output_token_ids and (end := self._model.bring(samples[0], submit)) is not None:
            self._send(client, Output(events=[end]))
            return
        client.requests |= {request.handle: request for request in samples}
        for request in samples:
            self._watch.accepted(request, client.session)

    def _abort(self, client: Client, ids: list[str]) -> None:
        for request_id in ids:
            requests = [r for r in client.requests.values() if r.request_id == request_id]
            if not requests and self.has("abort-answered"):
                self._refuse(client.routing_id, "invalid_request", "no such request", request_id)
            for owner, submit in self._compiling:
                if (owner, submit.request_id) == (client, request_id):
                    if not self.has("compiling-not-aborted"):
                        self._aborted.add((client.session, request_id))
            if self.has("abort-of-one-sample"):
                requests = requests[:1]
            for request in [] if self.has("abort-ignored") else requests:
                self._end_sample(client, request)

    def _abort_samples(self, client: Client, handles: Iterable[int]) -> None:
        for handle in [] if self.has("handles-ignored") else handles:
            request = client.requests.get(handle)
            if request is not None and self.has("sample-ends-all"):
                self._abort(client, [request.request_id])
            elif request is not None:
                self._end_sample(client, request)

    def _end_sample(self, client: Client, request: Request) -> None:
        del client.requests[request.handle]
        self._watch.ended(request.handle, "abort")
        self._num_aborts += 1
        self._send(client, Output(events=[Event(handle=request.handle, finish_reason="abort")]))
        if self.has("id-free-early"):
            for sample in client.requests.values():
                sample.request_id += "'"

    def _control(self, client: Client, call: Control) -> Reply:
        call_id = call.call_id
        match call.operation:
            case "stats":
                return Reply(call_id=call_id, stats=self._stats())
            case "metrics" if self._minor >= 10:
                metrics = self._watch.metrics(self._num_steps, self._num_tokens)
                return Reply(call_id=call_id, metrics=metrics)
            case "steps" if self._minor >= 11:
                recent = self._watch.recent(call.after, client.session, self._stats())
                return Reply(call_id=call_id, steps=recent)
            case "drain":
                pass
            case "pause":
                self._pauses.add(client.session)
            case "resume" if self.has("pause-is-shared"):
                self._pauses.clear()
            case "resume":
                self._pauses.discard(client.session)
            case "reset_prefix_cache":
                if any(c.requests for c in self._clients.values()) and not self.has("reset-always"):
                    return Reply(call_id=call_id, ok=False, message="a request holds blocks")
                if not self.has("reset-never"):
                    self._model.cached.clear()
            case "read_file" if call.file in FILES or self.has("any-file"):
                content = FILES.get(call.file or "", b"root:x:0:0")
                offset = 0 if self.has("offset-ignored") and call.offset < 99 else call.offset
                return Reply(call_id=call_id, data=content[offset : offset + CHUNK_BYTES])
            case _:
                if not self.has("unknown-operation-done"):
                    return Reply(call_id=call_id, ok=False, message=f"no {call.operation}")
        return Reply(call_id=call_id + 1 if self.has("wrong-call-id") else call_id)

    def _stats(self) -> Stats:
        running = sum(len(client.requests) for client in self._clients.values())
        return Stats(
            num_requests_running=running,
            num_requests_waiting=0,
            kv_cache_usage_perc=0.0,
            num_blocks=NUM_BLOCKS,
            num_free_blocks=NUM_BLOCKS,
            prefix_cache_queries=0,
            prefix_cache_hits=0,
            num_preemptions=0,
            num_aborts=self._num_aborts,
            prompt_tokens=0,
            generation_tokens=0 if self.has("counters-stand") else self._num_tokens,
            num_steps=self._num_steps,
            paused=bool(self._pauses),
            num_clients=len(self._clients),
            num_protocol_errors=self._num_errors,
        )

    def _step(self) -> None:
        self._num_steps += 1
        sampled = [r for client in self._clients.values() for r in client.requests.values()]
        for client in list(self._clients.values()):
            if client.requests:
                if self.has("count-of-zero"):
                    one = pack_int32([next(iter(client.requests.values())).handle])
                    self._send(client, Output(handles=one, counts=bytes(4)))
                output = self._output(client)
                self._send(client, output, copies=self.has("outputs-to-all"))
                if self.has("token-after-end") and output.events:
                    handle = output.events[-1].handle
                    self._send(client, Output(handles=pack_int32([handle]), tokens=bytes(4)))
        if sampled:
            self._watch.step(self._num_steps, [one for one in sampled if one.output])

    def _output(self, client: Client) -> Output:
        handles, counts, tokens, events = [], [], [], []
        logprobs, prompt_logprobs = LogprobColumns(self._defects), LogprobColumns(self._defects)
        requests = list(client.requests.values())
        for i, request in enumerate(requests):
            late = self.has("prompt-logprobs-late") and not request.output
            if request.waits_for_prompt_logprobs and not late:
                self._model.add_prompt_logprobs(prompt_logprobs, request)
                if request.waits_for_prompt_logprobs:
                    continue
            token, event = self._model.next(request, self._num_steps)
            if event.finish_reason is not None:
                del client.requests[request.handle]
                self._watch.ended(request.handle, event.finish_reason)
                event = Event(handle=request.handle) if self.has("no-end") else event
            if self.has("token-lost") and request.num_tokens > 1 and i == len(requests) - 1 > 0:
                events += [event]
                continue
            if token is None:
                events += [event]
                continue
            self._model.add_logprobs(logprobs, request)
            handles.append(request.handle)
            given = [token, token] if self.has("counts-wrong") else [token]
            counts.append(1)
            tokens += given
            if event != Event(handle=request.handle):
                events += [event, event] if self.has("two-ends") else [event]
            if event.num_cached_tokens is not None and self.has("cached-twice"):
                events = [Event(handle=event.handle, num_cached_tokens=0), *events]
        self._num_tokens += len(tokens)
        return Output(
            handles=pack_int32(handles),
            tokens=pack_int32(tokens),
            counts=pack_int32(counts) if len(handles) % 2 else None,
            events=events,
            logprobs=logprobs.columns(),
            prompt_logprobs=prompt_logprobs.columns(),
        )

    def _refuse(
        self,
        routing_id: bytes,
        code: str,
        text: str,
        request_id: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        if request_id is not None and not self.has("long-ids-returned"):
            request_id = returned_id(request_id)
        error = Error(code=code, message=text, request_id=request_id, retry_after_s=retry_after_s)
        client = self._clients.get(routing_id)
        if client is None:
            self._socket.send(routing_id, encode(error))
        else:
            self._send(client, error)

    def _send(self, client: Client, message: Message, *, copies: bool = False) -> None:
        for one in self._clients.values() if copies else [client]:
            quiet = isinstance(message, Output) and not message.events
            if one.waiting and quiet and self.has("drops-for-slow"):
                continue
            one.waiting.append(encode(message))
            self._flush(one)

    def _flush(self, client: Client) -> None:
        while client.waiting:
            result = self._socket.send(client.routing_id, client.waiting[0])
            if result is SendResult.FULL:
                return
            client.waiting.popleft()


def _know_only(message: Message, minor: int) -> None:
    """Refuse what an engine of an older minor version would."""
    newer = {name for name, since in NEWER_FIELDS.items() if since > minor}
    if isinstance(message, Abort) and message.handles and "handles" in newer:
        raise ProtocolError("ABORT: the map has the unknown field `handles`")
    if isinstance(message, Control) and message.after and minor < 11:
        raise ProtocolError("CONTROL: the map has the unknown field `after`")
    if isinstance(message, Submit):
        names = {*msgspec.to_builtins(message.sampling or EngineSamplingParams())}
        names |= {name for name in NEW_IN_1_9 if getattr(message, name, None)}
        for name in names:
            if name in newer:
                text = f"SUBMIT: the map has the unknown field `{name}`"
                raise InvalidSubmitError(text, message.request_id)


@contextmanager
def fake_engine(endpoint: str, *defects: str, **options: Any) -> Iterator[FakeEngine]:
    """A fake engine that runs."""
    engine = FakeEngine(endpoint, *defects, **options)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
    assert engine.failure is None
