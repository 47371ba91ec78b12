"""TokenizerLoader: a session's tokenizer, loaded on first use, or while the engine starts."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from nanocore.client.chat.chat_messages import LONG_CHARS
from nanocore.client.connection.remote_files import RemoteFiles
from nanocore.client.tokenizer import MAX_QUICK_CHARS, Tokenizer, needed_files
from nanocore.protocol.errors import InvalidRequestError, StartFile
from nanocore.protocol.messages import ModelCard
from nanocore.system.cache_folder import FileCache

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
NUM_THREADS: Final = 2


class TokenizerPreload:
    """Makes the tokenizer of a launched engine while that loads its model.

    The engine says which files it will offer, and the user's cache folder has their contents.
    Belongs to one asyncio event loop.
    """

    def __init__(self) -> None:
        self._offered: dict[str, str] = {}
        self._making: asyncio.Task[Tokenizer | None] | None = None

    def begin(self, files: Sequence[StartFile]) -> None:
        self._offered = {file.name: file.sha256 for file in files}
        self._making = asyncio.create_task(asyncio.to_thread(_from_cache, files))

    async def take(self, offered: Mapping[str, str]) -> Tokenizer | None:
        """Return the tokenizer, once; None unless it was made of these files.

        offered: digests of the engine's files by name.
        """
        making, self._making = self._making, None
        if making is None or self._offered != offered:
            return None
        return await making


def _from_cache(files: Sequence[StartFile]) -> Tokenizer | None:
    by_name = {file.name: file for file in files}
    contents = FileCache().read_all(by_name[name] for name in needed_files(by_name))
    try:
        return None if contents is None else Tokenizer(contents, "the launched engine")
    except InvalidRequestError:
        return None  # the first who needs it hears why


class TokenizerLoader:
    """Loads the tokenizer on first use. Belongs to one asyncio event loop.

    Args:
        folder: of the tokenizer's files; None reads them from the engine.
        files, model: the engine's.
        preload: may have made it.
    """

    def __init__(
        self,
        folder: Path | None,
        files: RemoteFiles,
        model: ModelCard,
        preload: TokenizerPreload | None = None,
    ) -> None:
        self._folder = folder
        self._files = files
        self._model, self._vocab_size = model.model, model.vocab_size
        self._preload = preload
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
            # lock while it makes a vocabulary, so that part still blocks the event loop.
            if self._folder is not None:
                own = await asyncio.to_thread(Tokenizer.from_folder, self._folder)
                if (size := own.backend.get_vocab_size()) > self._vocab_size:
                    sizes = f"{size} tokens, and {self._model} {self._vocab_size}"
                    logger.warning("%s has %s: is it of another model?", self._folder, sizes)
                return own
            if self._preload is not None:
                made = await self._preload.take(self._files.digests)
                if made is not None:
                    return made
            names = needed_files(self._files.digests)
            contents: dict[str, bytes] = {name: await self._files.read(name) for name in names}
            return await asyncio.to_thread(Tokenizer, contents, f"the engine of {self._model}")
        except BaseException:
            self._loading = None
            raise
