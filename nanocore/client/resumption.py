"""Resumption: requests that have lost their engine, until another one has them.

What they have produced is with the client, so whichever engine serves next goes on where the last
one stopped. Waits for one as long as it is told to, and then fails them all.

A request may be what engines die of. One that was open in two deaths, and got nothing between them,
is tried alone, before the others; if the engine dies of it again, that request alone fails.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

from nanocore.client.connection import EngineConnection, EngineStoppedError
from nanocore.client.part import Part
from nanocore.client.resubmission import resubmissions, why_another_model
from nanocore.client.resume import Resume
from nanocore.client.sample import Sample
from nanocore.client.session import Session
from nanocore.client.stream import RequestStream
from nanocore.protocol.errors import (
    EngineDeadError,
    EngineDrainingError,
    EngineOverloadedError,
    NanocoreError,
)
from nanocore.protocol.messages import Event, Welcome

logger = logging.getLogger(__name__)

NUM_SUSPECT_DEATHS: Final = 2
"""With so many a request is tried alone."""
FIRST_RETRY_S: Final = 0.01
LAST_RETRY_S: Final = 0.2
_SHORTEST_TRY_S: Final = 0.1
MAX_REFUSAL_S: Final = 1.0
"""An engine that is too busy, or ends, is not asked again before its own hint, nor before this."""


@dataclass(slots=True, eq=False)
class _Lost:
    """A request that no engine has, or some samples of it.

    welcome: of the engine that had it. was_killed: that one did not say that it would end.
    """

    stream: RequestStream
    welcome: Welcome
    error: NanocoreError
    was_killed: bool
    lost_s: float = field(default_factory=time.monotonic)
    parts: list[Part] = field(default_factory=list)

    @property
    def samples(self) -> list[Sample]:
        return [sample for part in self.parts for sample in part.samples]

    def fail(self, error: NanocoreError) -> None:
        for part in self.parts:
            part.fail(error)

    def end(self, event: Event) -> None:
        for part in self.parts:
            part.end(event)


@dataclass(slots=True)
class _Case:
    """What speaks against a request.

    num_deaths: of engines that had it, since it last got on. num_tokens: that it had when it was
    last sent again. was_alone: when that happened.
    """

    num_deaths: int = 0
    num_tokens: int = 0
    was_alone: bool = False


class Resumption:
    """Belongs to a link, and lives in its event loop.

    Args:
        reach: opens a session with whichever engine serves now.
        left_s: for how long it is worthwhile to wait for that, so many seconds after the loss.
        resumed: called when one of them has got on.
        num_fatal_deaths: what a request fails of, the last of them alone.
    """

    def __init__(
        self,
        reach: Callable[[], Awaitable[Session]],
        left_s: Callable[[float], float],
        resumed: Callable[[], None],
        num_fatal_deaths: int,
    ) -> None:
        self._reach = reach
        self._left_s = left_s
        self._resumed = resumed
        self._num_fatal_deaths = num_fatal_deaths
        self._lost: dict[RequestStream, _Lost] = {}
        self._cases: WeakKeyDictionary[RequestStream, _Case] = WeakKeyDictionary()
        self._not_before_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._tried: RequestStream | None = None  # alone
        self._news: asyncio.Future[None] | None = None  # of that one
        self._settled = asyncio.Event()
        self._settled.set()

    def __len__(self) -> int:
        """Requests that no engine has."""
        return len(self._lost)

    def take(self, part: Part, error: NanocoreError, connection: EngineConnection) -> None:
        """Go on with this part as soon as there is an engine."""
        was_killed = part.last_word is None and not (
            connection.is_draining or isinstance(error, (EngineStoppedError, EngineOverloadedError))
        )
        if isinstance(error, EngineOverloadedError):
            is_quick = isinstance(error, EngineDrainingError)
            wait_s = LAST_RETRY_S if is_quick else min(error.retry_after_s, MAX_REFUSAL_S)
            self._not_before_s = time.monotonic() + wait_s
        self._take(part, _Lost(part.stream, connection.welcome, error, was_killed))
        if part.stream.deadline_s is not None:
            asyncio.get_running_loop().call_at(part.stream.deadline_s, self._end_overdue)
        if part.stream is self._tried:
            self._tell()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="nanocore-resume")

    def abort(self, request_id: str) -> None:
        """End a request that waits here, as its caller wants."""
        for lost in [one for one in self._lost.values() if one.stream.request_id == request_id]:
            del self._lost[lost.stream]
            lost.end(Event(handle=0, finish_reason="abort"))

    def leave(self, stream: RequestStream, sample: Sample | None) -> None:
        """Nobody reads a request, or this sample of it, any more."""
        lost = self._lost.get(stream)
        if lost is None:
            return
        for part in lost.parts:
            part.samples = [one for one in part.samples if sample not in (None, one)]
        if not lost.samples:
            del self._lost[stream]

    async def settle(self) -> None:
        """Wait while a request is tried alone."""
        await self._settled.wait()

    async def close(self, error: NanocoreError) -> None:
        """Fail what waits. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._give_up(error)

    # -- inside -----------------------------------------------------------------------------------

    def _take(self, part: Part, lost: _Lost) -> None:
        self._lost.setdefault(part.stream, lost).parts.append(part)

    async def _run(self) -> None:
        """Until none is left. One task does it all, so nothing is sent twice."""
        try:
            while self._lost:
                session = await self._reached()
                if session is None:
                    return
                await self._send_all(session)
        except Exception as error:  # nobody may wait for ever for a request that nobody sends
            logger.exception("internal error: the requests that lost their engine fail")
            self._give_up(EngineDeadError(f"internal error: {type(error).__name__}: {error}"))
        finally:
            self._settled.set()

    async def _reached(self) -> Session | None:
        """A session; None if there will be none, and who waited was told so."""
        first = next(iter(self._lost.values()))
        number = len(self._lost)
        lost = "1 request has lost its" if number == 1 else f"{number} requests have lost their"
        logger.warning("%s engine: %s", lost, first.error)
        delay_s, since_s = FIRST_RETRY_S, time.monotonic()
        await asyncio.sleep(self._not_before_s - since_s)
        left_s = self._left_s(time.monotonic() - since_s)
        while True:
            error: NanocoreError = first.error
            try:
                async with asyncio.timeout(max(_SHORTEST_TRY_S, left_s)):
                    session = await self._reach()
                if not self._was_cut_by(session):
                    return session
            except TimeoutError:  # somebody is there, and says nothing
                pass
            except NanocoreError as refusal:
                error = refusal
            may_pass = isinstance(error, (EngineDeadError, EngineOverloadedError))
            left_s = self._left_s(time.monotonic() - since_s)
            if not may_pass or left_s <= 0:
                self._give_up(error)
                return None
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LAST_RETRY_S)

    def _was_cut_by(self, session: Session) -> bool:
        """Whether its engine ends, and has not said good-bye yet: it takes nothing back."""
        instance = session.connection.welcome.engine_instance
        return any(
            lost.welcome.engine_instance == instance
            and any(part.last_word is not None for part in lost.parts)
            for lost in self._lost.values()
        )

    async def _send_all(self, session: Session) -> None:
        """Submit them again; those that engines may die of first, and each alone."""
        reached_s = time.monotonic()
        for lost in self._lost.values():
            self._count_death(lost, session)
        self._fail_killers()
        suspects = [one for one in self._lost if self._case(one).num_deaths >= NUM_SUSPECT_DEATHS]
        for stream in suspects:
            self._settled.clear()
            if session.connection.end is not None:
                return
            if stream in self._lost:
                await self._try_alone(session, stream, reached_s)
        self._settled.set()
        while self._lost and session.connection.end is None:
            if not await self._send(session, next(iter(self._lost)), reached_s):
                return

    async def _try_alone(self, session: Session, stream: RequestStream, reached_s: float) -> None:
        """Returns when it has got on, or is lost again."""
        self._tried, self._news = stream, asyncio.get_running_loop().create_future()
        self._case(stream).was_alone = True
        try:
            if await self._send(session, stream, reached_s):
                await self._news
        finally:
            self._tried = self._news = None
        if stream not in self._lost:
            self._case(stream).was_alone = False

    async def _send(self, session: Session, stream: RequestStream, reached_s: float) -> bool:
        """Submit one of them again; False if it is to be tried later."""
        lost = self._lost.pop(stream)
        connection, num_tokens = session.connection, stream.num_arrived
        why = _why_not(lost, connection.welcome)
        if why is not None:
            text = f"{lost.error}; another engine serves at {session.endpoint}, but {why}"
            lost.fail(EngineDeadError(text))
            self._tell()
            return True
        resume = _resume(lost, connection.welcome, reached_s)
        self._case(stream).num_tokens = num_tokens
        stream.resumes.append(resume)
        stream.progress.at_next(lambda: self._got_on(stream, resume))
        unsent = []
        try:
            unsent = resubmissions(stream, lost.samples, connection.uses)
            while unsent:
                part, message = unsent[0]
                await connection.submit(stream, message, part)
                unsent.pop(0)
        except EngineDeadError as error:
            for part, _ in unsent:
                self._take(part, _Lost(stream, connection.welcome, error, was_killed=False))
            return False
        except NanocoreError as error:
            stream.fail(error)
        except BaseException:  # whoever closes us fails what waits
            lost.parts = [part for part, _ in unsent] or lost.parts
            self._lost[stream] = lost
            raise
        return True

    def _got_on(self, stream: RequestStream, resume: Resume) -> None:
        """It has got a token, its end, or an error."""
        resume.next_s = time.monotonic()
        if stream is self._tried:
            self._tell()
        self._resumed()

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _case(self, stream: RequestStream) -> _Case:
        return self._cases.setdefault(stream, _Case())

    def _count_death(self, lost: _Lost, session: Session) -> None:
        """Whether its engine has died of it, for all we know."""
        new = session.connection.welcome
        if not lost.was_killed or new.engine_instance == lost.welcome.engine_instance:
            return  # only the session was lost, or it was counted
        lost.was_killed = False
        case = self._case(lost.stream)
        if lost.stream.num_arrived > case.num_tokens:
            case.num_deaths, case.was_alone = 0, False
        else:
            case.num_deaths += 1

    def _fail_killers(self) -> None:
        for lost in [*self._lost.values()]:
            case = self._case(lost.stream)
            if case.num_deaths >= self._num_fatal_deaths and case.was_alone:
                del self._lost[lost.stream]
                lost.fail(
                    EngineDeadError(
                        f"{case.num_deaths} engines died while this request was open, the last one "
                        f"while it was alone there ({lost.error}): it is not sent again; other "
                        "requests go on"
                    )
                )
                self._resumed()

    def _end_overdue(self) -> None:
        now_s = time.monotonic()
        for lost in [*self._lost.values()]:
            deadline_s = lost.stream.deadline_s
            if deadline_s is not None and now_s >= deadline_s:
                del self._lost[lost.stream]
                lost.end(Event(handle=0, finish_reason="timeout"))

    def _give_up(self, error: NanocoreError) -> None:
        lost, self._lost = self._lost, {}
        for one in lost.values():
            one.fail(_in_full(one.error, error))


def _why_not(lost: _Lost, new: Welcome) -> str | None:
    """What keeps an engine from going on with it; None: nothing does."""
    if lost.stream.num_arrived and new.protocol < (1, 9):
        return f"it speaks protocol {new.protocol}, which cannot go on with a request"
    return why_another_model(lost.welcome.model, new.model)


def _resume(lost: _Lost, new: Welcome, reached_s: float) -> Resume:
    """The record of it; what is not exact is also for the log."""
    before, now = lost.welcome.model.numerics_fingerprint, new.model.numerics_fingerprint
    num_tokens = lost.stream.num_arrived
    is_exact = not num_tokens or (now is not None and now == before)
    if not is_exact:
        logger.warning(
            "request %r goes on after %d tokens with an engine that does not promise the same bits "
            "(numerics_fingerprint %s, and was %s)",
            lost.stream.request_id,
            num_tokens,
            now,
            before,
        )
    return Resume(num_tokens, is_exact, new.engine_instance, lost.lost_s, reached_s)


def _in_full(loss: NanocoreError, error: NanocoreError) -> NanocoreError:
    """What was lost, and why it is not to be had again."""
    if str(loss) in str(error) or not isinstance(error, EngineDeadError):
        return error
    return EngineDeadError(f"{loss}; {error}")
