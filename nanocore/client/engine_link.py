"""EngineLink: a client's tie to its engine, over one session and the next.

A session that is lost is not brought back: the next one, with whichever engine serves then at one
of the endpoints, goes on with the requests that were open (`Resumption`). Without resuming they
fail, once, and with what became of the engine, which one new HELLO finds out; if nothing was open
nobody is told, and the next call opens a session. However many ask for it, one opens it. A session
with an engine that drains stays open beside the next one until its requests have ended.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from nanocore.client.connection import NO_SESSION, EngineConnection
from nanocore.client.engine_keeper import EngineKeeper
from nanocore.client.file_cache import FileCache
from nanocore.client.launcher import STOP_TIMEOUT_S
from nanocore.client.model_files import ModelFiles
from nanocore.client.part import Part
from nanocore.client.resubmission import files_digest
from nanocore.client.resumption import Resumption
from nanocore.client.sample import Sample
from nanocore.client.session import Session
from nanocore.client.stream import RequestStream
from nanocore.client.tokenizer_loader import TokenizerLoader
from nanocore.protocol.errors import (
    ClientStateError,
    EngineDeadError,
    EngineDrainingError,
    EngineOverloadedError,
    NanocoreError,
    ProtocolError,
)
from nanocore.protocol.messages import Welcome
from nanocore.protocol.sockets import ClientKeys

Result = TypeVar("Result")
REOPEN_TIMEOUT_S: Final = 10.0
NEXT_ENDPOINT_TIMEOUT_S: Final = 2.0
"""For an answer, if there is another engine to ask."""
EXPLAIN_TIMEOUT_S: Final = 0.5
"""Those who wait are told of a loss by then, whether or not its cause is known."""
SESSION_TIMEOUT_MS: Final = 3000
"""Asked for by who can go on after it: an engine is not to work longer for a client that is gone.
"""
_RESTART_POLL_S: Final = 0.01


class EngineLink:
    """Made by `open`, and lives in its event loop.

    Args:
        endpoints: of engines of one model; the first that answers serves until it is lost.
        keys: for all of them. keeper: of the engine, if we launched it.
        tokenizer_folder: where the user has the tokenizer's files; None reads them from the engine.
        resume_timeout_s: how long requests wait for an engine to go on with; None: they fail.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        keys: ClientKeys | None,
        tokenizer_folder: Path | None,
        keeper: EngineKeeper | None,
        resume_timeout_s: float | None,
    ) -> None:
        self._endpoints = endpoints
        self._keys = keys
        self._tokenizer_folder = tokenizer_folder
        self._keeper = keeper
        self._resume_timeout_s = resume_timeout_s
        self._session: Session | None = None
        self._draining: list[Session] = []  # whose requests have not ended, for all we know
        self._ended: NanocoreError | None = None  # for good
        self._opening: asyncio.Task[Session] | None = None
        self._background: set[asyncio.Task[Any]] = set()
        resumed = keeper.progress if keeper is not None else lambda: None
        # Others than us may have sent what a shared engine died of.
        num_fatal_deaths = 3 if keeper is not None else 4
        self._resumption = Resumption(self._usable_session, self._left_s, resumed, num_fatal_deaths)
        if keeper is not None:
            keeper.on_ended(self._engine_ended)

    async def open(self, timeout_s: float) -> None:
        """Open the first session; waits for an engine to listen, unless ours does so already.

        Raises:
            NanocoreError: as `handshake.say_hello`.
        """
        try:
            self._session = await self._first_session(timeout_s)
        except EngineDeadError as error:
            raise await self._last_word(error) from None

    @property
    def endpoint(self) -> str:
        """Where the last session's engine listens."""
        return self._last.endpoint

    @property
    def welcome(self) -> Welcome:
        """What the engine said of itself when the last session was opened."""
        return self._last.connection.welcome

    @property
    def session_is_open(self) -> bool:
        """Whether the last session goes on; the next call opens another if not."""
        return self._last.connection.end is None

    @property
    def is_draining(self) -> bool:
        """Whether the last session's engine is about to end; with several, the next call moves."""
        return self._last.connection.is_draining and len(self._endpoints) == 1

    async def session(self, patience_s: float = 0.0) -> Session:
        """An open session: the last one, or a new one if that has ended.

        patience_s: how long to wait for an engine at most, as requests do that have lost theirs.

        Raises:
            EngineDeadError: there is no engine any more, or it does not answer.
            NanocoreError: as `handshake.say_hello`.
        """
        since_s = time.monotonic()
        until_s = since_s + patience_s if 0.0 < patience_s < math.inf else None
        try:
            async with asyncio.timeout_at(until_s):
                while (session := await self._try_session(since_s, patience_s > 0.0)) is None:
                    await asyncio.sleep(_RESTART_POLL_S)
                return session
        except TimeoutError:
            text = f"no engine has served within the request's timeout_s={patience_s:g}"
            raise EngineDeadError(text) from None

    async def _try_session(self, since_s: float, is_patient: bool) -> Session | None:
        """As `session`; None: there may be one later, and it is worthwhile to wait."""
        await self._resumption.settle()
        try:
            return await self._usable_session()
        except (EngineDeadError, EngineOverloadedError) as error:
            if self.session_is_open:  # it drains, and there is no other
                return self._last
            may_wait = is_patient and self._left_s(time.monotonic() - since_s) > 0
            if may_wait and isinstance(error, EngineDeadError):
                return None
            raise

    def abort(self, request_id: str) -> None:
        """End a request; those of sessions that are over have ended, or wait for an engine."""
        for session in self._sessions():
            session.connection.abort(request_id)
        self._resumption.abort(request_id)

    def leave(self, stream: RequestStream, sample: Sample | None) -> None:
        """Nobody reads a request, or this sample of it, any more: it is aborted where it is."""
        for session in self._sessions():
            session.connection.leave(stream, sample)
        self._resumption.leave(stream, sample)

    async def close(self) -> None:
        """Say BYE, and end everything that goes on. Idempotent."""
        self._ended = ClientStateError("this client was closed")
        if self._opening is not None:
            self._opening.cancel()
        await self._resumption.close(self._ended)
        for session in self._sessions():
            await session.connection.close()
            self._close_tokenizer(session)
        await asyncio.gather(*self._background, return_exceptions=True)

    def release(self) -> None:
        """Free the sockets, when the event loop that would close them in order is over."""
        for session in self._sessions():
            session.connection.release()

    # -- inside -----------------------------------------------------------------------------------

    @property
    def _last(self) -> Session:
        if self._session is None:
            raise ClientStateError("this client is not open yet: wait until it is entered")
        return self._session

    def _sessions(self) -> Iterator[Session]:
        """Those that may be open."""
        if self._session is not None:
            yield self._session
        yield from self._draining

    async def _usable_session(self) -> Session:
        """One whose engine takes new requests, as far as there is another."""
        last = self._last.connection
        if last.end is None and not (last.is_draining and len(self._endpoints) > 1):
            return self._last
        if self._ended is not None:
            raise self._ended
        opening = self._reopen()
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if opening.cancelled() and self._ended is not None:  # not we were cancelled
                raise self._ended from None
            raise

    async def _first_session(self, timeout_s: float) -> Session:
        """With the first engine that answers; waits for one, if there is but one to ask."""
        if len(self._endpoints) == 1:
            patient = self._keeper is None
            return await self._new_session(self._endpoints[0], timeout_s, patient)
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                return await self._session_of_any(self._endpoints, timeout_s)
            except EngineDeadError:
                if time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(_RESTART_POLL_S)

    async def _session_of_any(self, endpoints: Sequence[str], timeout_s: float) -> Session:
        """With the first of them that answers now."""
        errors: list[NanocoreError] = []
        if len(endpoints) > 1:
            timeout_s = min(timeout_s, NEXT_ENDPOINT_TIMEOUT_S)
        for endpoint in endpoints:
            try:
                return await self._new_session(endpoint, timeout_s, patient=False)
            except (EngineDeadError, EngineOverloadedError) as error:
                errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        raise EngineDeadError("; ".join(map(str, errors)))

    async def _new_session(self, endpoint: str, timeout_s: float, patient: bool) -> Session:
        connection = await EngineConnection.open(
            endpoint,
            timeout_s,
            self._keys,
            patient=patient,
            explain=functools.partial(self._explain, endpoint),
            rescue=self._rescue,
        )
        if self._resume_timeout_s is not None:
            connection.ask_for_session_timeout(SESSION_TIMEOUT_MS)
        files, card = ModelFiles(connection, FileCache()), connection.welcome.model
        tokenizer = TokenizerLoader(self._tokenizer_folder, files, card.model)
        old = self._session
        if old is not None and old.tokenizer.is_loaded:
            before = old.connection.welcome.model
            if (before.model, files_digest(before)) == (card.model, files_digest(card)):
                tokenizer = old.tokenizer  # to load it again may take a second
        return Session(endpoint, connection, files, tokenizer, self.leave)

    def _reopen(self) -> asyncio.Task[Session]:
        """The task that opens the next session."""
        if self._opening is None or self._opening.done():
            self._opening = self._start(self._open_next())
        return self._opening

    async def _open_next(self) -> Session:
        old = self._last
        at = self._endpoints.index(old.endpoint)
        endpoints = [*self._endpoints[at + 1 :], *self._endpoints[:at]]
        if not old.connection.is_draining or not endpoints:
            endpoints.insert(0, old.endpoint)
        try:
            self._session = await self._session_of_any_or_ours(endpoints)
        except EngineDeadError as error:
            cause = old.connection.cause
            text = str(error) if cause is None else f"{cause}; {error}"
            raise await self._last_word(EngineDeadError(text)) from None
        self._draining = [one for one in self._draining if one.connection.end is None]
        if old.connection.end is None:
            self._draining.append(old)
        if self._session.tokenizer is not old.tokenizer:
            self._close_tokenizer(old)
        return self._session

    async def _session_of_any_or_ours(self, endpoints: Sequence[str]) -> Session:
        """Waits for the engine that we keep as long as it is being restarted."""
        since_s = time.monotonic()
        while True:
            try:
                return await self._session_of_any(endpoints, REOPEN_TIMEOUT_S)
            except EngineDeadError:
                if self._keeper is None or self._ended is not None:
                    raise
                is_noticed = self._keeper.is_restarting
                if not is_noticed and time.monotonic() - since_s > STOP_TIMEOUT_S:
                    raise
            await asyncio.sleep(_RESTART_POLL_S)

    def _rescue(self, part: Part, error: NanocoreError, connection: EngineConnection) -> bool:
        """Whether this part of a request goes on with another engine, or nobody wants it."""
        stream = part.stream
        if stream.finished:
            return True
        if self._resume_timeout_s is None or self._ended is not None:
            return False
        if isinstance(error, EngineOverloadedError):
            # Accepted once, it does not fail of this; else there is another, or its caller waits.
            has_other = isinstance(error, EngineDrainingError) and len(self._endpoints) > 1
            is_ours = has_other or bool(stream.resumes)
        else:
            is_ours = isinstance(error, EngineDeadError) or (
                isinstance(error, ProtocolError) and error.code == NO_SESSION
            )
        if is_ours:
            self._resumption.take(part, error, connection)
        return is_ours

    def _left_s(self, seconds: float) -> float:
        """How long requests wait on for an engine, so many seconds after they lost theirs."""
        if self._ended is not None or self._resume_timeout_s is None:
            return 0.0
        if self._keeper is not None and self._keeper.is_restarting:
            return math.inf
        return self._resume_timeout_s - seconds

    async def _explain(self, endpoint: str, loss: NanocoreError) -> NanocoreError:
        """What became of the engine of the session that is lost; see `EngineConnection`."""
        old = self.welcome
        try:
            async with asyncio.timeout(EXPLAIN_TIMEOUT_S):
                new = (await asyncio.shield(self._reopen())).connection.welcome
        except TimeoutError:
            error = EngineDeadError(f"{loss}; {endpoint} has not answered since")
            return await self._last_word(error)
        except EngineDeadError as gone:
            return gone
        except NanocoreError as refusal:
            return EngineDeadError(f"{loss}; {refusal}")
        again = "send the requests that were open again"
        if self._resume_timeout_s is not None:
            again = "requests go on, send other calls again"
        if new.engine_instance != old.engine_instance:
            return EngineDeadError(
                f"the engine is gone, and a new engine serves at {self.endpoint}, which knows "
                f"nothing of the old one's requests: {again}"
            )
        return ProtocolError(
            "the engine closed this session, or the connection broke: it closes the session of a "
            f"client of which it has heard nothing for {old.limits.session_timeout_ms / 1e3:.0f} s "
            "(did the event loop stand still?) or that does not read what it is sent; its log says "
            f"why. A new session is open: {again}",
            NO_SESSION,
        )

    async def _last_word(self, error: NanocoreError) -> NanocoreError:
        """Of an engine that does not listen any more; if it is ours, its exit code says more."""
        if self._keeper is not None:
            deadline_s = time.monotonic() + STOP_TIMEOUT_S
            while not (self._ended or self._keeper.is_restarting):
                if time.monotonic() > deadline_s:
                    break
                await asyncio.sleep(_RESTART_POLL_S)
        return self._ended or error

    def _engine_ended(self, error: NanocoreError) -> None:
        """The keeper's call: there will be none any more. Tells everyone who waits."""
        if self._ended is None:
            self._ended = error
            if self._session is not None:
                self._session.connection.fail(error)

    def _close_tokenizer(self, session: Session) -> None:
        self._start(session.tokenizer.close())

    def _start(self, coroutine: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """A task that `close` awaits; its failure is looked at, even if nobody waits any more."""
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled():
            task.exception()
