"""EngineLink: a client's tie to the engine at one endpoint, over one session and the next.

A session that is lost is not brought back: what was open in it fails, once, and with what became of
the engine, which one new HELLO finds out. The session which that HELLO opened serves what comes
next. If nothing was open nobody is told, and the next call opens a session. However many ask for
it, one opens it. An engine that was launched and has ended is not waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from nanocore.client.connection import NO_SESSION, EngineConnection
from nanocore.client.file_cache import FileCache
from nanocore.client.launcher import STOP_TIMEOUT_S, EngineProcess
from nanocore.client.model_files import ModelFiles
from nanocore.client.tokenizer_loader import TokenizerLoader
from nanocore.protocol.errors import (
    ClientStateError,
    EngineDeadError,
    NanocoreError,
    ProtocolError,
)
from nanocore.protocol.messages import Welcome
from nanocore.protocol.sockets import ClientKeys

Result = TypeVar("Result")
REOPEN_TIMEOUT_S: Final = 10.0
EXPLAIN_TIMEOUT_S: Final = 0.5
"""Those who wait are told of a loss by then, whether or not its cause is known."""


@dataclass(frozen=True, slots=True)
class Session:
    """A connection, and what is read over it: another engine may serve another model."""

    connection: EngineConnection
    files: ModelFiles
    tokenizer: TokenizerLoader


class EngineLink:
    """Made by `open`, and lives in its event loop.

    Args:
        endpoint, keys: of the engine. process: its process, if we launched it.
        tokenizer_folder: where the user has the tokenizer's files; None reads them from the engine.
    """

    def __init__(
        self,
        endpoint: str,
        keys: ClientKeys | None,
        tokenizer_folder: Path | None,
        process: EngineProcess | None,
    ) -> None:
        self.endpoint = endpoint
        self._keys = keys
        self._tokenizer_folder = tokenizer_folder
        self._session: Session | None = None
        self._ended: NanocoreError | None = None  # for good
        self._opening: asyncio.Task[Session] | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._exit: asyncio.Task[None] | None = None
        if process is not None:
            self._exit = self._start(self._watch(process))

    async def open(self, timeout_s: float) -> None:
        """Open the first session; waits for an engine to listen, unless ours does so already.

        Raises:
            NanocoreError: as `handshake.say_hello`.
        """
        try:
            self._session = await self._new_session(timeout_s, patient=self._exit is None)
        except EngineDeadError as error:
            raise await self._last_word(error) from None

    @property
    def welcome(self) -> Welcome:
        """What the engine said of itself when the last session was opened."""
        return self._last.connection.welcome

    @property
    def session_is_open(self) -> bool:
        """Whether the last session goes on; the next call opens another if not."""
        return self._last.connection.end is None

    async def session(self) -> Session:
        """An open session: the last one, or a new one if that has ended.

        Raises:
            EngineDeadError: there is no engine any more, or it does not answer.
            NanocoreError: as `handshake.say_hello`.
        """
        if self.session_is_open:
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

    def abort(self, request_id: str) -> None:
        """End a request; those of sessions that are over have ended."""
        self._last.connection.abort([request_id])

    async def close(self) -> None:
        """Say BYE, and end everything that goes on. Idempotent."""
        self._ended = ClientStateError("this client was closed")
        for task in (self._exit, self._opening):
            if task is not None:
                task.cancel()
        if self._session is not None:
            await self._session.connection.close()
            self._close_tokenizer(self._session)
        await asyncio.gather(*self._background, return_exceptions=True)

    def release(self) -> None:
        """Free the socket, when the event loop that would close it in order is over."""
        if self._session is not None:
            self._session.connection.release()

    # -- inside -----------------------------------------------------------------------------------

    @property
    def _last(self) -> Session:
        if self._session is None:
            raise ClientStateError("this client is not open yet: wait until it is entered")
        return self._session

    async def _new_session(self, timeout_s: float, patient: bool) -> Session:
        connection = await EngineConnection.open(
            self.endpoint, timeout_s, self._keys, patient=patient, explain=self._explain
        )
        files = ModelFiles(connection, FileCache())
        model = connection.welcome.model.model
        return Session(connection, files, TokenizerLoader(self._tokenizer_folder, files, model))

    def _reopen(self) -> asyncio.Task[Session]:
        """The task that opens the next session."""
        if self._opening is None or self._opening.done():
            self._opening = self._start(self._open_next())
        return self._opening

    async def _open_next(self) -> Session:
        old = self._last
        try:
            self._session = await self._new_session(REOPEN_TIMEOUT_S, patient=False)
        except EngineDeadError as error:
            text = f"{old.connection.cause}; {error}"
            raise await self._last_word(EngineDeadError(text)) from None
        self._close_tokenizer(old)
        return self._session

    async def _explain(self, loss: NanocoreError) -> NanocoreError:
        """What became of the engine of the session that is lost; see `EngineConnection`."""
        old = self.welcome
        try:
            async with asyncio.timeout(EXPLAIN_TIMEOUT_S):
                new = (await asyncio.shield(self._reopen())).connection.welcome
        except TimeoutError:
            error = EngineDeadError(f"{loss}; {self.endpoint} has not answered since")
            return await self._last_word(error)
        except EngineDeadError as gone:
            return gone
        except NanocoreError as refusal:
            return EngineDeadError(f"{loss}; {refusal}")
        again = "send the requests that were open again"
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
        if self._exit is not None:
            await asyncio.wait({self._exit}, timeout=STOP_TIMEOUT_S)
        return self._ended or error

    async def _watch(self, process: EngineProcess) -> None:
        """Tell everyone who waits when our engine dies, by whatever cause."""
        code = await process.wait_exit()
        self._ended = EngineDeadError(f"the engine process exited with code {code}")
        if self._session is not None:
            self._session.connection.fail(self._ended)

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
