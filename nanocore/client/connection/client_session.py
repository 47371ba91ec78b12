"""ClientSession: a connection, the model's files, and its tokenizer, loaded on first use."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from nanocore.client.chat.chat_messages import LONG_CHARS
from nanocore.client.connection.engine_connection import EngineConnection
from nanocore.client.connection.remote_files import RemoteFiles
from nanocore.client.requests.request_stream import Leave
from nanocore.client.tokenizer import MAX_QUICK_CHARS, Tokenizer, needed_files


@dataclass(frozen=True, slots=True)
class ClientSession:
    """One session; the next engine may serve another model. leave: aborts a request in any
    session."""

    endpoint: str
    connection: EngineConnection
    files: RemoteFiles
    tokenizer: TokenizerLoader
    leave: Leave


Result = TypeVar("Result")
NUM_THREADS: Final = 2


class TokenizerLoader:
    """Loads the tokenizer on first use. Belongs to one asyncio event loop.

    Args:
        folder: of the tokenizer's files; None reads them from the engine.
        files: the engine's. model: name of the engine's model, for error messages.
    """

    def __init__(self, folder: Path | None, files: RemoteFiles, model: str) -> None:
        self._folder = folder
        self._files = files
        self._model = model
        self._loading: asyncio.Task[Tokenizer] | None = None
        self._threads = ThreadPoolExecutor(NUM_THREADS, "nanocore-text")
        self._long_threads = ThreadPoolExecutor(NUM_THREADS, "nanocore-long-text")
        self._is_closed = False

    @property
    def is_loaded(self) -> bool:
        """Whether it is there, and can be used for long."""
        loading = self._loading
        if loading is None or not loading.done() or loading.cancelled():
            return False
        return loading.exception() is None and not self._is_closed

    async def get(self) -> Tokenizer:
        """Load and return the tokenizer; raises InvalidRequestError if its files are damaged."""
        if self._loading is None:
            self._loading = asyncio.create_task(self._load(), name="nanocore-tokenizer")
            # Retrieve the error even if no caller waits any more.
            self._loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._loading)

    async def encode(
        self, text: str, add_special_tokens: bool = True, max_tokens: float = math.inf
    ) -> list[int]:
        """Tokenize a text with `Tokenizer.encode`; a long text delays no other work.

        Raises:
            InvalidRequestError, ProtocolError, EngineDeadError: as `get` and `Tokenizer.encode`.
        """
        tokenizer = await self.get()
        if len(text) <= MAX_QUICK_CHARS:
            return tokenizer.encode(text, add_special_tokens)
        return await self.run(
            lambda tokenizer: tokenizer.encode(text, add_special_tokens, max_tokens),
            is_long=len(text) > LONG_CHARS,
        )

    async def run(self, work: Callable[[Tokenizer], Result], is_long: bool = False) -> Result:
        """Run work in a thread and return its result: rendering a chat may take long.

        is_long: it has more than LONG_CHARS characters; separate threads keep it from delaying
        other work. Work whose caller was cancelled is not started.

        Raises:
            InvalidRequestError, ProtocolError, EngineDeadError: as `get`. Errors of the work.
        """
        tokenizer = await self.get()
        if self._is_closed:
            return await asyncio.to_thread(work, tokenizer)
        threads = self._long_threads if is_long else self._threads
        return await asyncio.get_running_loop().run_in_executor(threads, work, tokenizer)

    async def close(self) -> None:
        """End the tokenizer's processes and their work.

        Waits until loading has ended, which fails once the session is closed.
        """
        self._is_closed = True
        for threads in (self._threads, self._long_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._loading is not None:
            (loaded,) = await asyncio.gather(self._loading, return_exceptions=True)
            if isinstance(loaded, Tokenizer):
                loaded.close()

    async def _load(self) -> Tokenizer:
        try:
            # In a thread, because a file may be large. `tokenizers` 0.23 holds the interpreter's
            # lock while it parses, so that part still blocks the event loop.
            if self._folder is not None:
                return await asyncio.to_thread(Tokenizer.from_folder, self._folder)
            names = needed_files(self._files.names)
            contents: dict[str, bytes] = {name: await self._files.read(name) for name in names}
            return await asyncio.to_thread(Tokenizer, contents, f"the engine of {self._model}")
        except BaseException:
            self._loading = None
            raise
