"""The model's files, read from the engine and cached on disk: a client needs no copy of the model.

CONTROL read_file returns one chunk; several are in flight at once. The engine is not trusted: sizes
and digests are validated before anything is fetched, every chunk must have the expected size, every
wait has a limit, and the content must match its digest. A file's name is compared with the model
card and never becomes a path.

The cache is shared by all processes of the user (`system.cache_folder`). If it cannot be used, that
is logged, and files are fetched again.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from typing import Final

from nanocore.client.connection.engine_connection import EngineConnection
from nanocore.protocol.errors import EngineDeadError, InvalidRequestError, ProtocolError
from nanocore.protocol.messages import MAX_FILE_BYTES, ModelFile
from nanocore.system.cache_folder import FileCache

CHUNK_TIMEOUT_S: Final = 10.0
"""Limit for a chunk: engines answer read_file at once, even while they compute."""
MIN_CHUNK_BYTES: Final = 1024
"""Smallest chunk size accepted from an engine: smaller ones would take forever."""
_NUM_IN_FLIGHT: Final = 8
_SHA256: Final = re.compile("[0-9a-f]{64}")


class RemoteFiles:
    """The files that an engine's model card names.

    Args:
        connection: an open session with the engine.
        cache: for their contents.
    """

    def __init__(self, connection: EngineConnection, cache: FileCache) -> None:
        self._connection = connection
        self._cache = cache
        self._files: dict[str, ModelFile] = {f.name: f for f in connection.welcome.model.files}
        self._chunk_bytes = connection.welcome.limits.max_file_chunk_bytes

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of each readable file by name; empty for engines with a protocol before 1.3."""
        return {name: file.sha256 for name, file in self._files.items()}

    async def read(self, name: str) -> bytes:
        """Return a file's content, from the cache or the engine.

        Raises:
            InvalidRequestError: the engine does not offer this file.
            ProtocolError: the engine's offer or data is invalid. EngineDeadError: it does not
                reply.
        """
        file = self._files.get(name)
        if file is None:
            raise InvalidRequestError(
                f"the engine serves no file {name!r}; of this model it serves "
                f"{', '.join(self._files) or 'none'}"
            )
        self._check(file)
        content = await asyncio.to_thread(self._cache.read, file.sha256, file.num_bytes)
        if content is None:
            content = await self._fetch(file)
            await asyncio.to_thread(self._keep, file, content)
        return content

    def _check(self, file: ModelFile) -> None:
        if not 0 <= file.num_bytes <= MAX_FILE_BYTES:
            raise ProtocolError(
                f"the engine offers {file.name} with {file.num_bytes} bytes: at most "
                f"{MAX_FILE_BYTES} are taken; use tokenizer=FOLDER with a copy of the file"
            )
        if not _SHA256.fullmatch(file.sha256):
            raise ProtocolError(
                f"the engine offers {file.name} with the digest {file.sha256[:80]!r}: a SHA-256 "
                "is 64 lower-case hex digits"
            )
        if self._chunk_bytes < MIN_CHUNK_BYTES:
            raise ProtocolError(
                f"the engine sends files in chunks of {self._chunk_bytes} bytes: at least "
                f"{MIN_CHUNK_BYTES} are wanted"
            )

    async def _fetch(self, file: ModelFile) -> bytes:
        content = bytearray(file.num_bytes)
        offsets = iter(range(0, file.num_bytes, self._chunk_bytes))

        async def fetch_next() -> None:
            for offset in offsets:
                data = await self._chunk(file, offset)
                content[offset : offset + len(data)] = data

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(_NUM_IN_FLIGHT):
                    group.create_task(fetch_next())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first failure is the cause
        return bytes(content)

    async def _chunk(self, file: ModelFile, offset: int) -> bytes:
        try:
            async with asyncio.timeout(CHUNK_TIMEOUT_S):
                reply = await self._connection.calls.control(
                    "read_file", file=file.name, offset=offset
                )
        except TimeoutError:
            raise EngineDeadError(
                f"the engine did not send {file.name} within {CHUNK_TIMEOUT_S} s"
            ) from None
        if not reply.ok:
            raise ProtocolError(f"the engine offers {file.name} and refuses it: {reply.message}")
        data = reply.data or b""
        expected = min(self._chunk_bytes, file.num_bytes - offset)
        if len(data) != expected:
            raise ProtocolError(
                f"{file.name} at byte {offset}: the engine sent {len(data)} bytes instead of "
                f"{expected}"
            )
        return data

    def _keep(self, file: ModelFile, content: bytes) -> None:
        digest = hashlib.sha256(content).hexdigest()
        if digest != file.sha256:
            raise ProtocolError(
                f"the engine sent a {file.name} with the digest {digest}, and had promised "
                f"{file.sha256}: fetch it again, or use tokenizer=FOLDER"
            )
        self._cache.write(digest, content)
