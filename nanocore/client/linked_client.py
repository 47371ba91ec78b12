"""A client's beginning and end: it launches or joins an engine, and lives in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from os import PathLike
from types import NoneType, TracebackType
from typing import Final, Self

from nanocore.client.arguments import check_endpoint, check_timeout, folder_path
from nanocore.client.engine_flags import EngineArgument, engine_flags
from nanocore.client.engine_link import EngineLink, Session
from nanocore.client.launcher import EngineProcess
from nanocore.protocol.errors import ClientStateError, ConfigError
from nanocore.protocol.messages import ModelCard
from nanocore.protocol.sockets import ClientKeys, client_keys
from nanocore.system.endpoint_lock import own_default_endpoint

_ELSEWHERE: Final = (
    "this client belongs to the event loop in which it was entered, and this is another one: enter "
    "and use it within one asyncio.run(), and in one thread, or make a client for each"
)


class LinkedClient:
    """What an AsyncEngineClient is before it asks anything: see there."""

    def __init__(
        self,
        *,
        endpoint: str | None,
        engine_flags: Sequence[str],
        tokenizer: str | PathLike[str] | None,
        timeout_s: float,
        keys: ClientKeys | None = None,
    ) -> None:
        self._endpoint = endpoint  # None: we launch an engine
        self._keys = keys
        self._engine_flags = engine_flags
        self._tokenizer_folder = None if tokenizer is None else folder_path("tokenizer", tokenizer)
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None  # while it is entered
        self._process: EngineProcess | None = None
        self._link: EngineLink | None = None

    @classmethod
    def launch(
        cls,
        model: str | PathLike[str] | None = None,
        *,
        tokenizer: str | PathLike[str] | None = None,
        start_timeout_s: float = 600.0,
        **engine_args: EngineArgument,
    ) -> Self:
        """A client with an engine process of its own, which ends with it.

        Args:
            model: model folder, or id on the hub; None is the bundled demo model.
            tokenizer: folder with the tokenizer's files; None reads them from the engine.
            start_timeout_s: how long the engine may take to load.
            engine_args: flags of `nanocore-engine`, e.g. max_num_seqs=8; False is --no-flag, and
                None leaves a flag out.

        Raises (at once):
            ConfigError: a value that no flag can have.
        Raises (on entering):
            EngineStartError: with the engine's own reason.
        """
        if not isinstance(model, (str, PathLike, NoneType)):
            raise ConfigError(f"model={model!r}: a folder, an id on the hub, or None")
        return cls(
            endpoint=None,
            engine_flags=engine_flags({"model": model, **engine_args}),
            tokenizer=tokenizer,
            timeout_s=check_timeout("start_timeout_s", start_timeout_s),
        )

    @classmethod
    def connect(
        cls,
        endpoint: str | None = None,
        *,
        curve_dir: str | PathLike[str] | None = None,
        tokenizer: str | PathLike[str] | None = None,
        timeout_s: float = 10.0,
    ) -> Self:
        """A client of a running engine, by default the user's default one.

        Nothing of the model needs to be on this machine: see `get_tokenizer`.

        Args:
            endpoint: ipc:///path/engine.sock or tcp://host:port.
            curve_dir: folder with this client's keys and the engine's, for tcp alone.
            tokenizer: folder with the tokenizer's files; None reads them from the engine.
            timeout_s: how long entering waits for an engine to listen there, and to answer.

        Raises (at once):
            ConfigError: tcp without keys, or a default endpoint in another user's directory.
            KeyFileError: keys that cannot be used.
        Raises (on entering):
            EngineDeadError: nobody answers. ProtocolError: the engine speaks another version.
            EngineOverloadedError: it has as many clients as it serves.
        """
        endpoint = own_default_endpoint() if endpoint is None else check_endpoint(endpoint)
        folder = None if curve_dir is None else folder_path("curve_dir", curve_dir)
        return cls(
            endpoint=endpoint,
            engine_flags=(),
            tokenizer=tokenizer,
            timeout_s=check_timeout("timeout_s", timeout_s),
            keys=client_keys(endpoint, folder),
        )

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise ClientStateError("this client is open already: enter it once")
        self._loop = asyncio.get_running_loop()
        try:
            endpoint = self._endpoint
            if endpoint is None:
                self._process = EngineProcess(self._engine_flags)
                await self._process.wait_ready(self._timeout_s)
                endpoint = self._process.endpoint
            link = EngineLink(endpoint, self._keys, self._tokenizer_folder, self._process)
            self._link = link
            await link.open(self._timeout_s)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the session, and the engine if it is ours. Idempotent."""
        if self._loop is None:
            return
        elsewhere = asyncio.get_running_loop() is not self._loop
        if elsewhere and self._loop.is_running():
            raise ClientStateError(_ELSEWHERE)
        link, process = self._link, self._process
        self._loop = self._link = self._process = None
        try:
            if link is not None:
                link.release() if elsewhere else await link.close()
        finally:
            if process is not None:
                await process.stop()
        if elsewhere:
            raise ClientStateError(f"{_ELSEWHERE}; it is closed now")

    @property
    def endpoint(self) -> str:
        """Where the engine listens, as ipc:// or tcp://; of a launched one, a private place."""
        return self._endpoint or self._entered().endpoint

    @property
    def model_card(self) -> ModelCard:
        """What the engine says of its model."""
        return self._entered().welcome.model

    @property
    def max_num_seqs(self) -> int:
        """Requests that the engine runs at once; more of them wait."""
        return self._entered().welcome.limits.max_num_seqs

    @property
    def is_connected(self) -> bool:
        """Whether a session is open; if not, the next call opens one."""
        return self._entered().session_is_open

    # -- inside -----------------------------------------------------------------------------------

    def _entered(self) -> EngineLink:
        if self._link is None:
            raise ClientStateError("this client is not open: use it inside `async with`")
        return self._link

    def _check_loop(self) -> EngineLink:
        """The link, which serves one event loop: in another one every wait would be for ever."""
        link = self._entered()
        if asyncio.get_running_loop() is not self._loop:
            raise ClientStateError(_ELSEWHERE)
        return link

    async def _session(self) -> Session:
        return await self._check_loop().session()
