"""Resubmission: requests whose engine was lost are sent again to the engine that serves next.

The client sends their tokens so far. The next engine counts these as output, so limits, penalties,
stop rules and grammars continue; sampling noise depends only on seed and position. Samples with
tokens differ, so each becomes a separate request with its own seed.

A request may crash engines. One that was open in two crashes and got no token in between is sent
again alone, before the others. If the engine dies again, only that request fails.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from nanocore.client.connection.client_session import ClientSession
from nanocore.client.connection.engine_connection import EngineConnection, EngineStoppedError
from nanocore.client.connection.request_table import OpenRequest
from nanocore.client.requests.request_outputs import Resume
from nanocore.client.requests.request_stream import RequestStream
from nanocore.client.requests.sample import Sample
from nanocore.protocol.codec import pack_int32
from nanocore.protocol.errors import (
    EngineDeadError,
    EngineDrainingError,
    EngineOverloadedError,
    NanocoreError,
    counted,
)
from nanocore.protocol.fields import MAX_EXACT_INT
from nanocore.protocol.messages import Event, ModelCard, Submit, Welcome

logger = logging.getLogger(__name__)

SHORTEST_TIMEOUT_S: Final = 1e-3
"""Timeout of a request whose deadline is over: the engine ends it."""
NUM_SUSPECT_DEATHS: Final = 2
"""Deaths of engines after which a request is sent alone."""
FIRST_RETRY_S: Final = 0.01
LAST_RETRY_S: Final = 0.2
_SHORTEST_TRY_S: Final = 0.1
MAX_REFUSAL_S: Final = 1.0
"""Longest pause before a busy or draining engine is tried again, even if it asks for more."""


class _LostRequest(msgspec.Struct, eq=False):
    """Samples of one request that has lost its engine.

    welcome: of the lost engine. was_killed: that engine had not announced its end.
    """

    stream: RequestStream
    welcome: Welcome
    error: NanocoreError
    was_killed: bool
    lost_s: float = msgspec.field(default_factory=time.monotonic)
    parts: list[OpenRequest] = msgspec.field(default_factory=list)

    @property
    def samples(self) -> list[Sample]:
        return [sample for part in self.parts for sample in part.samples]

    def fail(self, error: NanocoreError) -> None:
        for part in self.parts:
            part.fail(error)

    def end(self, event: Event) -> None:
        for part in self.parts:
            part.end(event)


class Resubmission:
    """Resubmission policy of one client, in its event loop.

    Args:
        open_session: opens a session with whichever engine serves now.
        remaining_s: how much longer to wait for an engine, after waiting for the given seconds.
        on_progress: called when a resubmitted request got a token or ended.
        num_fatal_deaths: deaths of engines after which a request fails, the last one alone.
    """

    def __init__(
        self,
        open_session: Callable[[], Awaitable[ClientSession]],
        remaining_s: Callable[[float], float],
        on_progress: Callable[[], None],
        num_fatal_deaths: int,
    ) -> None:
        self._open_session = open_session
        self._remaining_s = remaining_s
        self._on_progress = on_progress
        self._num_fatal_deaths = num_fatal_deaths
        self._lost: dict[RequestStream, _LostRequest] = {}
        self._not_before_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._tried: RequestStream | None = None  # the request that is sent alone
        self._trial_over: asyncio.Future[None] | None = None
        self._no_trial = asyncio.Event()
        self._no_trial.set()

    def __len__(self) -> int:
        return len(self._lost)

    def take(
        self, request: OpenRequest, error: NanocoreError, connection: EngineConnection
    ) -> None:
        """Continue this request as soon as there is an engine. error: why it was lost."""
        was_killed = request.abort is None and not (
            connection.is_draining or isinstance(error, (EngineStoppedError, EngineOverloadedError))
        )
        if isinstance(error, EngineOverloadedError):
            is_quick = isinstance(error, EngineDrainingError)
            wait_s = LAST_RETRY_S if is_quick else min(error.retry_after_s, MAX_REFUSAL_S)
            self._not_before_s = time.monotonic() + wait_s
        self._add(request, _LostRequest(request.stream, connection.welcome, error, was_killed))
        if request.stream.deadline_s is not None:
            asyncio.get_running_loop().call_at(request.stream.deadline_s, self._end_overdue)
        if request.stream is self._tried:
            self._end_trial()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="nanocore-resume")

    def abort(self, request_id: str) -> None:
        """End a request that waits here."""
        for lost in [one for one in self._lost.values() if one.stream.request_id == request_id]:
            del self._lost[lost.stream]
            lost.end(Event(handle=0, finish_reason="abort"))

    def leave(self, stream: RequestStream, sample: Sample | None) -> None:
        """Forget a request, or this sample of it, that has no reader any more."""
        lost = self._lost.get(stream)
        if lost is None:
            return
        for part in lost.parts:
            part.samples = [one for one in part.samples if sample not in (None, one)]
        if not lost.samples:
            del self._lost[stream]

    async def wait_for_trial(self) -> None:
        """Wait while a request is sent alone, because new ones could die with it."""
        await self._no_trial.wait()

    async def close(self, error: NanocoreError) -> None:
        """Fail waiting requests. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail_all(error)

    def _add(self, request: OpenRequest, lost: _LostRequest) -> None:
        self._lost.setdefault(request.stream, lost).parts.append(request)

    async def _run(self) -> None:
        # One task does all of it, so nothing is sent twice.
        try:
            while self._lost:
                session = await self._wait_for_session()
                if session is None:
                    return
                await self._send_all(session)
        except Exception as error:  # otherwise requests would wait forever
            logger.exception("internal error: the requests that lost their engine fail")
            self._fail_all(EngineDeadError(f"internal error: {type(error).__name__}: {error}"))
        finally:
            self._no_trial.set()

    async def _wait_for_session(self) -> ClientSession | None:
        """Open a session, or return None: there will be none, and the requests have failed."""
        first = next(iter(self._lost.values()))
        number = len(self._lost)
        lost = "1 request has lost its" if number == 1 else f"{number} requests have lost their"
        logger.warning("%s engine: %s", lost, first.error)
        delay_s, since_s = FIRST_RETRY_S, time.monotonic()
        await asyncio.sleep(self._not_before_s - since_s)
        remaining_s = self._remaining_s(time.monotonic() - since_s)
        while True:
            error: NanocoreError = first.error
            try:
                async with asyncio.timeout(max(_SHORTEST_TRY_S, remaining_s)):
                    session = await self._open_session()
                if not self._has_aborted_ours(session):
                    return session
            except TimeoutError:  # something listens, but does not reply
                pass
            except NanocoreError as refusal:
                error = refusal
            may_pass = isinstance(error, (EngineDeadError, EngineOverloadedError))
            remaining_s = self._remaining_s(time.monotonic() - since_s)
            if not may_pass or remaining_s <= 0:
                self._fail_all(error)
                return None
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LAST_RETRY_S)

    def _has_aborted_ours(self, session: ClientSession) -> bool:
        """Whether the engine is stopping although it has not said BYE: it would refuse requests."""
        instance = session.connection.welcome.engine_instance
        return any(
            lost.welcome.engine_instance == instance
            and any(part.abort is not None for part in lost.parts)
            for lost in self._lost.values()
        )

    async def _send_all(self, session: ClientSession) -> None:
        reached_s = time.monotonic()
        for lost in self._lost.values():
            _count_death(lost, session)
        self._fail_killers()
        # Suspects first, one at a time: if the engine dies, exactly one request is to blame, and
        # the death does not count against the others.
        suspects = [one for one in self._lost if one.num_deaths >= NUM_SUSPECT_DEATHS]
        for stream in suspects:
            self._no_trial.clear()
            if session.connection.error is not None:
                return
            if stream in self._lost:
                await self._send_alone(session, stream, reached_s)
        self._no_trial.set()
        while self._lost and session.connection.error is None:
            if not await self._send(session, next(iter(self._lost)), reached_s):
                return

    async def _send_alone(
        self, session: ClientSession, stream: RequestStream, reached_s: float
    ) -> None:
        """Send a request alone; return when it got a token, ended, or is lost again."""
        self._tried, self._trial_over = stream, asyncio.get_running_loop().create_future()
        stream.was_alone = True
        try:
            if await self._send(session, stream, reached_s):
                await self._trial_over
        finally:
            self._tried = self._trial_over = None
        if stream not in self._lost:
            stream.was_alone = False

    async def _send(self, session: ClientSession, stream: RequestStream, reached_s: float) -> bool:
        """Submit one request again; False if the session ended meanwhile."""
        lost = self._lost.pop(stream)
        connection = session.connection
        obstacle = _obstacle(lost, connection.welcome)
        if obstacle is not None:
            text = f"{lost.error}; another engine serves at {session.endpoint}, but {obstacle}"
            lost.fail(EngineDeadError(text))
            self._end_trial()
            return True
        stream.resumes.append(_make_resume(lost, connection.welcome, reached_s))
        stream.progress.at_next(lambda: self._progressed(stream))
        unsent: list[tuple[OpenRequest, Submit]] = []
        try:
            unsent = resubmissions(stream, lost.samples, connection.uses)
            while unsent:
                await connection.submit(*unsent[0])
                unsent.pop(0)
        except EngineDeadError as error:
            for request, _ in unsent:
                self._add(
                    request, _LostRequest(stream, connection.welcome, error, was_killed=False)
                )
            return False
        except NanocoreError as error:
            stream.fail(error)
        except BaseException:  # cancelled: `close` fails lost requests
            lost.parts = [request for request, _ in unsent] or lost.parts
            self._lost[stream] = lost
            raise
        return True

    def _progressed(self, stream: RequestStream) -> None:
        now_s = time.monotonic()
        for resume in stream.resumes:  # engines may have died one after the other without a token
            if resume.next_s is None:
                resume.next_s = now_s
        if stream is self._tried:
            self._end_trial()
        self._on_progress()

    def _end_trial(self) -> None:
        if self._trial_over is not None and not self._trial_over.done():
            self._trial_over.set_result(None)

    def _fail_killers(self) -> None:
        """Fail requests that were alone in the last of too many deaths."""
        for lost in [*self._lost.values()]:
            stream = lost.stream
            if stream.num_deaths >= self._num_fatal_deaths and stream.was_alone:
                del self._lost[stream]
                lost.fail(
                    EngineDeadError(
                        f"{stream.num_deaths} engines died while this request was open, the last "
                        f"one while it was alone there ({lost.error}): it is not sent again; other "
                        "requests continue"
                    )
                )
                self._on_progress()

    def _end_overdue(self) -> None:
        now_s = time.monotonic()
        for lost in [*self._lost.values()]:
            deadline_s = lost.stream.deadline_s
            if deadline_s is not None and now_s >= deadline_s:
                del self._lost[lost.stream]
                lost.end(Event(handle=0, finish_reason="timeout"))

    def _fail_all(self, error: NanocoreError) -> None:
        lost, self._lost = self._lost, {}
        for one in lost.values():
            if str(one.error) in str(error) or not isinstance(error, EngineDeadError):
                one.fail(error)
            else:
                one.fail(EngineDeadError(f"{one.error}; {error}"))


def resubmissions(
    stream: RequestStream, samples: Sequence[Sample], is_used: Callable[[str], bool]
) -> list[tuple[OpenRequest, Submit]]:
    """Return messages that resubmit these unfinished samples.

    is_used: whether a request id is in use at the new engine.
    """
    message = stream.message
    assert message is not None, "it was sent"
    if stream.deadline_s is not None:
        left_s = max(SHORTEST_TIMEOUT_S, stream.deadline_s - time.monotonic())
        message = replace(message, timeout_s=left_s)
    sampling = message.sampling
    assert sampling is not None, "this client always sends them"
    if stream.seed is not None and sampling.pooling is None:  # embeddings have no seed
        sampling = replace(sampling, seed=stream.seed)
    if len(samples) == len(stream.samples) and not stream.num_arrived:
        # No sample has tokens: they can share the prompt again, as one request.
        for sample in samples:
            sample.begin_again()
        request = OpenRequest(stream, samples, _free_id(stream.request_id, is_used))
        message = replace(message, request_id=request.request_id, sampling=sampling)
        return [(request, message)]
    assert sampling.seed is not None, "a request that has tokens was accepted"
    made = []
    for sample in samples:
        is_single = len(stream.samples) == 1
        name = stream.request_id if is_single else f"{stream.request_id}#{sample.index}"
        request = OpenRequest(stream, [sample], _free_id(name, is_used))
        # The engine seeds the samples of a request with seed, seed + 1, ...
        own = replace(sampling, n=1, seed=(sampling.seed + sample.index) % (MAX_EXACT_INT + 1))
        sample.begin_again()
        if sample.prompt_logprobs is None or sample.arrived_token_ids:  # they come first
            own = replace(own, prompt_logprobs=None)
        token_ids = pack_int32(sample.arrived_token_ids)
        submit = replace(
            message, request_id=request.request_id, sampling=own, output_token_ids=token_ids
        )
        made.append((request, submit))
    return made


def files_digest(card: ModelCard) -> frozenset[tuple[str, str]]:
    """Return names and digests of the tokenizer's files."""
    return frozenset((file.name, file.sha256) for file in card.files)


def _free_id(name: str, is_used: Callable[[str], bool]) -> str:
    return name if len(name) <= 256 and not is_used(name) else uuid.uuid4().hex


def _count_death(lost: _LostRequest, session: ClientSession) -> None:
    """Count an engine's death against the request, unless it got tokens since it was last sent."""
    new = session.connection.welcome
    if not lost.was_killed or new.engine_instance == lost.welcome.engine_instance:
        return  # only the session was lost, or the death was already counted
    lost.was_killed = False
    stream = lost.stream
    if stream.num_arrived > (stream.resumes[-1].num_output_tokens if stream.resumes else 0):
        stream.num_deaths, stream.was_alone = 0, False
    else:
        stream.num_deaths += 1


def _obstacle(lost: _LostRequest, new: Welcome) -> str | None:
    """Return why this engine cannot continue the request; None if it can."""
    if lost.stream.num_arrived and new.protocol < (1, 9):
        return f"it speaks protocol {new.protocol}, which cannot continue a request"
    old = lost.welcome.model
    for name in ("architecture", "vocab_size", "eos_token_ids", "hidden_size"):
        before, now = getattr(old, name), getattr(new.model, name)
        if before != now:
            return f"{name} is {now}, and was {before}"
    if files_digest(old) != files_digest(new.model):
        return "its tokenizer's files are others"
    return None


def _make_resume(lost: _LostRequest, new: Welcome, reached_s: float) -> Resume:
    before, now = lost.welcome.model.numerics_fingerprint, new.model.numerics_fingerprint
    num_tokens = lost.stream.num_arrived
    is_exact = not num_tokens or (now is not None and now == before)
    if not is_exact:
        logger.warning(
            "request %r continues after %s with an engine that may compute other bits "
            "(numerics_fingerprint %s, and was %s)",
            lost.stream.request_id,
            counted(num_tokens, "token"),
            now,
            before,
        )
    return Resume(num_tokens, is_exact, new.engine_instance, lost.lost_s, reached_s)
