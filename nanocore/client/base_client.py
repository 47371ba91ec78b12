"""Base of AsyncEngineClient: launching or joining an engine, and the model's files."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from os import PathLike
from types import NoneType
from typing import Final, Self, TypeVar

from nanocore.client.arguments import (
    EngineArgument,
    check_count,
    check_endpoints,
    check_timeout,
    engine_flags,
    folder_path,
)
from nanocore.client.connection.client_session import ClientSession
from nanocore.client.connection.engine_supervisor import EngineSupervisor
from nanocore.client.connection.session_manager import SessionManager
from nanocore.client.connection.tokenizer_loader import TokenizerPreload
from nanocore.client.requests.submission import SubmitTicket
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import ClientStateError, ConfigError, InvalidRequestError
from nanocore.protocol.messages import Limits, ModelCard
from nanocore.protocol.sockets.curve import ClientKeys, client_keys
from nanocore.system.endpoint_lock import own_default_endpoint

Result = TypeVar("Result")
_ELSEWHERE: Final = (
    "this client belongs to the event loop in which it was entered, and this is another one: enter "
    "and use it within one asyncio.run(), and in one thread, or make a client for each"
)


class BaseClient:
    """Launching, connecting and closing; AsyncEngineClient adds the requests."""

    def __init__(
        self,
        *,
        endpoints: Sequence[str],
        tokenizer: str | PathLike[str] | None,
        timeout_s: float,
        resume_timeout_s: float | None,
        keys: ClientKeys | None = None,
        new_supervisor: Callable[[], EngineSupervisor] | None = None,
    ) -> None:
        self._endpoints = endpoints
        self._keys = keys
        self._new_supervisor = new_supervisor  # if we launch an engine
        self._resume_timeout_s = resume_timeout_s
        self._tokenizer_folder = None if tokenizer is None else folder_path("tokenizer", tokenizer)
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None  # while it is entered
        self._supervisor: EngineSupervisor | None = None
        self._manager: SessionManager | None = None
        self._tickets: dict[SubmitTicket, None] = {}
        self.tokenizer_preload: TokenizerPreload | None = None
        """Preload for the engine that this client will connect to; set before it is entered."""

    @classmethod
    def launch(
        cls,
        model: str | PathLike[str] | None = None,
        *,
        tokenizer: str | PathLike[str] | None = None,
        start_timeout_s: float = 600.0,
        resume: bool = True,
        max_restarts: int = 5,
        standby: bool = False,
        **engine_args: EngineArgument,
    ) -> Self:
        """Launch an engine process, which ends with the client.

        If the engine dies it is restarted, and requests continue where they stopped.

        Args:
            model: model folder, or id on the hub; None is the demo model.
            tokenizer: folder with the tokenizer's files; None reads them from the engine.
            start_timeout_s: how long the engine may take to load.
            resume: False lets requests fail when their engine dies.
            max_restarts: consecutive restarts before giving up. The count starts again when a
                request progresses, or after 30 s of serving.
            standby: keep a second engine process, with its model loaded, that takes over when the
                first one dies. The weights take twice the memory.
            engine_args: flags of `nanocore-engine`, e.g. max_num_seqs=8; False is --no-flag, and
                None leaves a flag out.

        Raises (at once):
            ConfigError: a value that no flag can have.
        Raises (on entering):
            EngineStartError: with the engine's own reason.
        """
        if not isinstance(model, (str, PathLike, NoneType)):
            raise ConfigError(f"model={model!r}: a folder, an id on the hub, or None")
        flags = engine_flags({"model": model, **engine_args})
        timeout_s = check_timeout("start_timeout_s", start_timeout_s)
        max_restarts = check_count("max_restarts", max_restarts) if resume else 0
        return cls(
            endpoints=(),
            tokenizer=tokenizer,
            timeout_s=timeout_s,
            resume_timeout_s=timeout_s if resume else None,
            new_supervisor=lambda: EngineSupervisor(flags, max_restarts, standby),
        )

    @classmethod
    def connect(
        cls,
        endpoint: str | Sequence[str] | None = None,
        *,
        curve_dir: str | PathLike[str] | None = None,
        tokenizer: str | PathLike[str] | None = None,
        timeout_s: float = 10.0,
        resume: bool = True,
        resume_timeout_s: float = 60.0,
    ) -> Self:
        """Join a running engine, by default at the user's default endpoint.

        The model's files need not be on this machine: see `get_tokenizer`. If the engine is lost,
        requests continue with the next one at this endpoint, or at another one of several.

        Args:
            endpoint: ipc:///path/engine.sock or tcp://host:port; or several, of engines that serve
                the same model, of which one is used as long as it serves.
            curve_dir: folder with this client's keys and the engine's, for tcp alone.
            tokenizer: folder with the tokenizer's files; None reads them from the engine.
            timeout_s: how long entering waits until an engine listens there and replies.
            resume: False lets requests fail with their session.
            resume_timeout_s: how long requests wait for an engine that continues them.

        Raises (at once):
            ConfigError: tcp without keys, or a default endpoint in another user's directory.
            KeyFileError: keys that cannot be used.
        Raises (on entering):
            EngineDeadError: no reply. ProtocolError: the engine speaks another version.
            EngineOverloadedError: it has as many clients as it serves.
        """
        endpoints = [own_default_endpoint()] if endpoint is None else check_endpoints(endpoint)
        resume_timeout_s = check_timeout("resume_timeout_s", resume_timeout_s)
        folder = None if curve_dir is None else folder_path("curve_dir", curve_dir)
        return cls(
            endpoints=endpoints,
            tokenizer=tokenizer,
            timeout_s=check_timeout("timeout_s", timeout_s),
            resume_timeout_s=resume_timeout_s if resume else None,
            keys=[client_keys(one, folder) for one in endpoints][-1],
        )

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise ClientStateError("this client is open already: enter it once")
        self._loop = asyncio.get_running_loop()
        try:
            endpoints = self._endpoints
            if self._new_supervisor is not None:
                self._supervisor = self._new_supervisor()
                self.tokenizer_preload = TokenizerPreload()
                self._supervisor.on_files(self.tokenizer_preload.begin)
                await self._supervisor.start(self._timeout_s)
                endpoints = [self._supervisor.endpoint]
            manager = SessionManager(
                endpoints,
                self._keys,
                self._tokenizer_folder,
                self._supervisor,
                self._resume_timeout_s,
                self.tokenizer_preload,
            )
            self._manager = manager
            await manager.open(self._timeout_s)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the session, and the engine if it is ours. Idempotent."""
        if self._loop is None:
            return
        elsewhere = asyncio.get_running_loop() is not self._loop
        if elsewhere and self._loop.is_running():
            raise ClientStateError(_ELSEWHERE)
        manager, supervisor = self._manager, self._supervisor
        self._loop = self._manager = self._supervisor = None
        try:
            if manager is not None:
                manager.release() if elsewhere else await manager.close()
        finally:
            if supervisor is not None:
                await supervisor.stop()
        if elsewhere:
            raise ClientStateError(f"{_ELSEWHERE}; it is closed now")

    @property
    def endpoint(self) -> str:
        """Endpoint of the engine, ipc:// or tcp://; a private one if this client launched it."""
        if self._manager is None and self._endpoints:
            return self._endpoints[0]
        return self._entered().last.endpoint

    @property
    def model_card(self) -> ModelCard:
        """Model card that the engine sent."""
        return self._entered().welcome.model

    @property
    def limits(self) -> Limits:
        """Limits of the engine; max_num_seqs: requests that it runs at once."""
        return self._entered().welcome.limits

    @property
    def engine_instance(self) -> str:
        """Id of the engine's run; it changes with every start."""
        return self._entered().welcome.engine_instance

    @property
    def is_connected(self) -> bool:
        """Whether a session is open; if not, the next call opens one."""
        return self._entered().last.connection.error is None

    @property
    def is_draining(self) -> bool:
        """Whether the engine takes no new requests, and no other known engine does."""
        return self._entered().is_draining

    # -- the model's files ------------------------------------------------------------------------

    async def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, from the given folder or from the engine.

        Waits for a new engine if the last one was lost, as requests do.

        Raises:
            InvalidRequestError: there is none, or its files are damaged.
            ProtocolError, EngineDeadError: the engine sends something else, or nothing.
        """
        return await (await self._session(math.inf)).tokenizer.get()

    async def encode(
        self, text: str, add_special_tokens: bool = True, max_tokens: float = math.inf
    ) -> list[int]:
        """Tokenize a text with `Tokenizer.encode`; a long text delays no other calls.

        Raises:
            InvalidRequestError, ProtocolError, EngineDeadError: as `get_tokenizer`; or the text is
                no Unicode. ContextLengthError: it has far more than max_tokens.
        """
        session = await self._session(math.inf)
        return await session.tokenizer.encode(text, add_special_tokens, max_tokens)

    async def with_tokenizer(
        self, work: Callable[[Tokenizer], Result], is_long: bool = False
    ) -> Result:
        """Run work in a thread and return its result; it may take long.

        is_long: the work has more than LONG_CHARS characters; it delays only other long work.

        Raises:
            InvalidRequestError, ProtocolError, EngineDeadError: as `get_tokenizer`; and what work
                raises.
        """
        return await (await self._session(math.inf)).tokenizer.run(work, is_long)

    async def read_file(self, name: str) -> bytes:
        """Read a file of the model; `model_card.files` names those that the engine serves.

        Raises:
            InvalidRequestError: it serves no such file.
            ProtocolError, EngineDeadError: the engine sends something else, or nothing.
        """
        if not isinstance(name, str):
            raise InvalidRequestError(f"a file's name is a str, not {type(name).__name__}")
        return await (await self._session()).files.read(name)

    def _entered(self) -> SessionManager:
        if self._manager is None:
            raise ClientStateError("this client is not open: use it inside `async with`")
        return self._manager

    def _check_loop(self) -> SessionManager:
        # An asyncio client serves one event loop: in another one every wait would last
        # forever.
        manager = self._entered()
        if asyncio.get_running_loop() is not self._loop:
            raise ClientStateError(_ELSEWHERE)
        return manager

    async def _session(self, wait_s: float = 0.0) -> ClientSession:
        return await self._check_loop().session(wait_s)
