"""SessionManager: keeps a client connected, from one session to the next.

A lost session is not restored. The next one, with whichever engine then serves at one of the
endpoints, continues the open requests (`Resubmission`). With resume=False they fail, and a new
HELLO finds the cause. If nothing was open, nothing fails, and the next call opens a session. One
task opens it for all callers. A session with a draining engine stays open in addition to the next
one until its requests have ended.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from nanocore.client.connection.client_session import ClientSession
from nanocore.client.connection.engine_connection import NO_SESSION, EngineConnection
from nanocore.client.connection.engine_process import STOP_TIMEOUT_S
from nanocore.client.connection.engine_supervisor import EngineSupervisor
from nanocore.client.connection.remote_files import RemoteFiles
from nanocore.client.connection.request_table import OpenRequest
from nanocore.client.connection.resubmission import Resubmission, files_digest
from nanocore.client.connection.tokenizer_loader import TokenizerLoader, TokenizerPreload
from nanocore.client.requests.request_stream import RequestStream
from nanocore.client.requests.sample import Sample
from nanocore.protocol.errors import (
    ClientStateError,
    EngineDeadError,
    EngineDrainingError,
    EngineOverloadedError,
    NanocoreError,
    ProtocolError,
)
from nanocore.protocol.messages import Welcome
from nanocore.protocol.sockets.curve import ClientKeys
from nanocore.system.cache_folder import FileCache

Result = TypeVar("Result")
REOPEN_TIMEOUT_S: Final = 10.0
NEXT_ENDPOINT_TIMEOUT_S: Final = 2.0
"""Timeout of a handshake if there is another endpoint to try."""
DIAGNOSIS_TIMEOUT_S: Final = 0.5
"""Time after which requests and calls fail even if the cause of the loss is still unknown."""
SESSION_TIMEOUT_MS: Final = 3000
"""Sent by clients that can resume, so that an engine soon ends the requests of a lost client."""
_RESTART_POLL_S: Final = 0.01


class SessionManager:
    """Sessions of one client. Made by `open`; belongs to one event loop.

    Args:
        endpoints: of engines with the same model; the first that replies is used until it is lost.
        keys: for all of them. supervisor: of the engine, if this client launched it.
        tokenizer_folder: of the tokenizer's files; None reads them from the engine.
        resume_timeout_s: how long requests wait for an engine that continues them; None: they fail.
        preload: of the first engine's tokenizer.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        keys: ClientKeys | None,
        tokenizer_folder: Path | None,
        supervisor: EngineSupervisor | None,
        resume_timeout_s: float | None,
        preload: TokenizerPreload | None = None,
    ) -> None:
        self._endpoints = endpoints
        self._keys = keys
        self._tokenizer_folder = tokenizer_folder
        self._preload = preload
        self._supervisor = supervisor
        self._resume_timeout_s = resume_timeout_s
        self._session: ClientSession | None = None
        self._draining: list[ClientSession] = []  # with requests that may not have ended
        self._ended: NanocoreError | None = None  # for good
        self._opening: asyncio.Task[ClientSession] | None = None
        self._background: set[asyncio.Task[Any]] = set()
        on_progress = supervisor.progress if supervisor is not None else lambda: None
        # Other clients' requests may crash a shared engine, so one more death is allowed.
        num_fatal_deaths = 3 if supervisor is not None else 4
        self._resubmission = Resubmission(
            self._usable_session, self._remaining_s, on_progress, num_fatal_deaths
        )
        if supervisor is not None:
            supervisor.on_ended(self._engine_ended)

    async def open(self, timeout_s: float) -> None:
        """Open the first session; wait until an engine listens, unless it was launched here.

        Raises:
            NanocoreError: as `handshake.say_hello`.
        """
        try:
            self._session = await self._first_session(timeout_s)
        except EngineDeadError as error:
            raise await self._final_error(error) from None

    @property
    def welcome(self) -> Welcome:
        """WELCOME of the last session."""
        return self.last.connection.welcome

    @property
    def is_draining(self) -> bool:
        """Whether the last session's engine drains; with several endpoints the next call moves
        on."""
        return self.last.connection.is_draining and len(self._endpoints) == 1

    async def session(self, wait_s: float = 0.0) -> ClientSession:
        """Return an open session: the last one, or a new one if that has ended.

        wait_s: limit of waiting for an engine, as for requests that have lost theirs.

        Raises:
            EngineDeadError: there is no engine any more, or it does not reply.
            NanocoreError: as `handshake.say_hello`.
        """
        since_s = time.monotonic()
        until_s = since_s + wait_s if 0.0 < wait_s < math.inf else None
        try:
            async with asyncio.timeout_at(until_s):
                while (session := await self._try_session(since_s, wait_s > 0.0)) is None:
                    await asyncio.sleep(_RESTART_POLL_S)
                return session
        except TimeoutError:
            text = f"no engine has served within the request's timeout_s={wait_s:g}"
            raise EngineDeadError(text) from None

    async def _try_session(self, since_s: float, may_wait: bool) -> ClientSession | None:
        """Return a session, or None if it makes sense to wait and try again."""
        await self._resubmission.wait_for_trial()
        try:
            return await self._usable_session()
        except (EngineDeadError, EngineOverloadedError) as error:
            # The engine drains and there is no other: let its own refusal say so.
            if self.last.connection.error is None:
                return self.last
            is_worthwhile = may_wait and self._remaining_s(time.monotonic() - since_s) > 0
            if is_worthwhile and isinstance(error, EngineDeadError):
                return None
            raise

    def abort(self, request_id: str) -> None:
        """Abort a request in any session, or while it waits for an engine."""
        for session in self._sessions():
            session.connection.abort(request_id)
        self._resubmission.abort(request_id)

    def leave(self, stream: RequestStream, sample: Sample | None) -> None:
        """Abort a request, or this sample of it, that has no reader any more."""
        for session in self._sessions():
            session.connection.leave(stream, sample)
        self._resubmission.leave(stream, sample)

    async def close(self) -> None:
        """Say BYE, and end all requests and tasks. Idempotent."""
        self._ended = ClientStateError("this client was closed")
        if self._opening is not None:
            self._opening.cancel()
        await self._resubmission.close(self._ended)
        for session in self._sessions():
            await session.connection.close()
            self._close_tokenizer(session)
        await asyncio.gather(*self._background, return_exceptions=True)

    def release(self) -> None:
        """Free the sockets after the event loop that would close them has ended."""
        for session in self._sessions():
            session.connection.release()

    @property
    def last(self) -> ClientSession:
        """The last session; if it has ended, the next call opens a new one."""
        if self._session is None:
            raise ClientStateError("this client is not open yet: wait until it is entered")
        return self._session

    def _sessions(self) -> Iterator[ClientSession]:
        if self._session is not None:
            yield self._session
        yield from self._draining

    async def _usable_session(self) -> ClientSession:
        """Return a session whose engine takes new requests, if there is one."""
        last = self.last.connection
        if last.error is None and not (last.is_draining and len(self._endpoints) > 1):
            return self.last
        if self._ended is not None:
            raise self._ended
        opening = self._reopen()
        try:
            # Shielded: other callers may wait for the same task.
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if opening.cancelled() and self._ended is not None:  # cancelled by `close`
                raise self._ended from None
            raise

    async def _first_session(self, timeout_s: float) -> ClientSession:
        # With several endpoints, waiting for one would keep others from being tried.
        if len(self._endpoints) == 1:
            wait_for_listener = self._supervisor is None
            return await self._new_session(self._endpoints[0], timeout_s, wait_for_listener)
        deadline_s = time.monotonic() + timeout_s
        return await self._session_of_any(
            self._endpoints, timeout_s, lambda: time.monotonic() <= deadline_s
        )

    async def _session_of_any(
        self, endpoints: Sequence[str], timeout_s: float, may_try_again: Callable[[], bool]
    ) -> ClientSession:
        if len(endpoints) > 1:
            timeout_s = min(timeout_s, NEXT_ENDPOINT_TIMEOUT_S)
        while True:
            errors: list[NanocoreError] = []
            for endpoint in endpoints:
                try:
                    return await self._new_session(endpoint, timeout_s, wait_for_listener=False)
                except (EngineDeadError, EngineOverloadedError) as error:
                    errors.append(error)
            if len(errors) > 1:
                errors = [EngineDeadError("; ".join(map(str, errors)))]
            if isinstance(errors[0], EngineOverloadedError) or not may_try_again():
                raise errors[0]
            await asyncio.sleep(_RESTART_POLL_S)

    async def _new_session(
        self, endpoint: str, timeout_s: float, wait_for_listener: bool
    ) -> ClientSession:
        connection = await EngineConnection.open(
            endpoint,
            timeout_s,
            self._keys,
            wait_for_listener=wait_for_listener,
            diagnose=functools.partial(self._diagnose, endpoint),
            take_over=self._take_over,
        )
        if self._resume_timeout_s is not None:
            connection.request_session_timeout(SESSION_TIMEOUT_MS)
        files, card = RemoteFiles(connection, FileCache()), connection.welcome.model
        tokenizer = TokenizerLoader(self._tokenizer_folder, files, card, self._preload)
        old = self._session
        if old is not None and old.tokenizer.is_loaded:
            before = old.connection.welcome.model
            if (before.model, files_digest(before)) == (card.model, files_digest(card)):
                tokenizer = old.tokenizer  # loading it again may take a second
        return ClientSession(endpoint, connection, files, tokenizer, self.leave)

    def _reopen(self) -> asyncio.Task[ClientSession]:
        if self._opening is None or self._opening.done():
            self._opening = self._start(self._open_next())
        return self._opening

    async def _open_next(self) -> ClientSession:
        old = self.last
        # Try the endpoints in order, starting with the last one unless its engine is draining.
        at = self._endpoints.index(old.endpoint)
        endpoints = [*self._endpoints[at + 1 :], *self._endpoints[:at]]
        if not old.connection.is_draining or not endpoints:
            endpoints.insert(0, old.endpoint)
        try:
            may_try_again = functools.partial(self._may_listen_again, time.monotonic())
            self._session = await self._session_of_any(endpoints, REOPEN_TIMEOUT_S, may_try_again)
        except EngineDeadError as error:
            first = old.connection.first_error
            text = str(error) if first is None else f"{first}; {error}"
            raise await self._final_error(EngineDeadError(text)) from None
        self._draining = [one for one in self._draining if one.connection.error is None]
        if old.connection.error is None:
            self._draining.append(old)
        if self._session.tokenizer is not old.tokenizer:
            self._close_tokenizer(old)
        return self._session

    def _may_listen_again(self, since_s: float) -> bool:
        """Whether a launched engine is being restarted, or its death may not be noticed yet."""
        if self._supervisor is None or self._ended is not None:
            return False
        return self._supervisor.is_restarting or time.monotonic() - since_s <= STOP_TIMEOUT_S

    def _take_over(
        self, request: OpenRequest, error: NanocoreError, connection: EngineConnection
    ) -> bool:
        """Return whether this request continues with another engine, or has no reader any more."""
        stream = request.stream
        if stream.finished:
            return True
        if self._resume_timeout_s is None or self._ended is not None:
            return False
        if isinstance(error, EngineOverloadedError):
            # A request that was accepted once must not fail because the next engine is busy. A new
            # one moves to another engine, or its caller waits.
            has_other = isinstance(error, EngineDrainingError) and len(self._endpoints) > 1
            is_taken = has_other or bool(stream.resumes)
        else:
            is_taken = isinstance(error, EngineDeadError) or (
                isinstance(error, ProtocolError) and error.code == NO_SESSION
            )
        if is_taken:
            self._resubmission.take(request, error, connection)
        return is_taken

    def _remaining_s(self, seconds: float) -> float:
        """Return how much longer requests wait for an engine, after waiting this many seconds."""
        if self._ended is not None or self._resume_timeout_s is None:
            return 0.0
        if self._supervisor is not None and self._supervisor.is_restarting:
            return math.inf
        return self._resume_timeout_s - seconds

    async def _diagnose(self, endpoint: str, loss: NanocoreError) -> NanocoreError:
        """Open the next session, and return the cause of the loss of the last one."""
        old = self.welcome
        try:
            async with asyncio.timeout(DIAGNOSIS_TIMEOUT_S):
                new = (await asyncio.shield(self._reopen())).connection.welcome
        except TimeoutError:
            error = EngineDeadError(f"{loss}; {endpoint} has not answered since")
            return await self._final_error(error)
        except EngineDeadError as gone:
            return gone
        except NanocoreError as refusal:
            return EngineDeadError(f"{loss}; {refusal}")
        again = "repeat the requests that were open"
        if self._resume_timeout_s is not None:
            again = "requests continue, repeat other calls"
        if new.engine_instance != old.engine_instance:
            return EngineDeadError(
                f"the engine is gone, and a new engine serves at {self.last.endpoint}, without the "
                f"old one's requests: {again}"
            )
        return ProtocolError(
            "the engine closed this session, or the connection broke: it closes the session of a "
            f"client that is silent for {old.limits.session_timeout_ms / 1e3:.0f} s (was the event "
            "loop blocked?) or does not read its output; the engine's log has the reason. A new "
            f"session is open: {again}",
            NO_SESSION,
        )

    async def _final_error(self, error: NanocoreError) -> NanocoreError:
        # For a launched engine the exit code says more: wait until it is known.
        if self._supervisor is not None:
            deadline_s = time.monotonic() + STOP_TIMEOUT_S
            while not (self._ended or self._supervisor.is_restarting):
                if time.monotonic() > deadline_s:
                    break
                await asyncio.sleep(_RESTART_POLL_S)
        return self._ended or error

    def _engine_ended(self, error: NanocoreError) -> None:
        if self._ended is None:
            self._ended = error
            if self._session is not None:
                self._session.connection.fail(error)

    def _close_tokenizer(self, session: ClientSession) -> None:
        self._start(session.tokenizer.close())

    def _start(self, coroutine: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Start a task that `close` awaits; its error is retrieved even if nothing waits for it."""
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled():
            task.exception()
