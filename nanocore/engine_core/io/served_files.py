"""The files that clients may read: what their tokenizer needs, as it was when the engine started.

They are read before torch is imported, and a client that launched the engine hears at once which
they are: it makes its tokenizer while the model loads. Their contents lie in the user's cache
folder, where that client finds them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import get_args

from nanocore.protocol.errors import ModelFileError, NanocoreError, StartFile, StartReport
from nanocore.protocol.messages import (
    MAX_FILE_BYTES,
    MAX_FILE_CHUNK_BYTES,
    ModelFile,
    ModelFileName,
)
from nanocore.system.cache_folder import FileCache
from nanocore.worker.loading.gguf.gguf_files import is_gguf
from nanocore.worker.loading.gguf.model_files import gguf_model_files

logger = logging.getLogger(__name__)


class ServedFiles:
    """Contents of the files of `ModelFileName` that a model has. No other file can be named.

    They are read once, at the start: what is served matches the digests in the model card, whatever
    happens to the folder later.

    Args:
        folder: the model's, or its first GGUF file.
        in_process: see `gguf_model_files`.

    Raises:
        ModelFileError: one of them cannot be read.
    """

    def __init__(self, folder: Path, in_process: bool = True) -> None:
        self.folder = folder
        self._contents: dict[str, bytes] = {}
        self.entries: list[ModelFile] = []
        if is_gguf(folder):
            for name, content in gguf_model_files(folder, in_process).items():
                self._add(name, content)
            return
        for name in get_args(ModelFileName):
            path = folder / name
            try:
                if not path.is_file():
                    continue
                num_bytes = path.stat().st_size
                if num_bytes > MAX_FILE_BYTES:
                    logger.warning(
                        "%s has %d bytes: files above %d are not served to clients",
                        path,
                        num_bytes,
                        MAX_FILE_BYTES,
                    )
                    continue
                content = path.read_bytes()
            except OSError as error:
                raise ModelFileError(f"{path}: {error.strerror}") from None
            self._add(name, content)

    def _add(self, name: str, content: bytes) -> None:
        self._contents[name] = content
        digest = hashlib.sha256(content).hexdigest()
        self.entries.append(ModelFile(name=name, num_bytes=len(content), sha256=digest))

    def chunk(self, name: str | None, offset: int) -> bytes | None:
        """Return MAX_FILE_CHUNK_BYTES or fewer from `offset` on; None: there is no such file."""
        content = self._contents.get(name or "")
        return None if content is None else content[offset : offset + MAX_FILE_CHUNK_BYTES]

    def content(self, name: ModelFileName) -> bytes | None:
        return self._contents.get(name)

    def put_into_cache(self) -> list[StartFile]:
        """Return the files, whose contents the user's cache has now, if it can be used."""
        cache = FileCache()
        for entry in self.entries:
            if not cache.has(entry.sha256):
                cache.write(entry.sha256, self._contents[entry.name])
        return [StartFile(entry.name, entry.num_bytes, entry.sha256) for entry in self.entries]


class ServedFilesLoad:
    """Loads a model's files in a thread, and reports them to a launching client.

    Args:
        folder: None if it is not known yet. report: None if no client launched the engine.
    """

    def __init__(self, folder: Path | None, report: Callable[[StartReport], None] | None) -> None:
        self._report = report
        self._files: ServedFiles | None = None
        self._thread = Thread(target=self._load, args=(folder,), name="files", daemon=True)
        if folder is not None:
            self._thread.start()

    def wait(self, folder: Path) -> ServedFiles:
        """Return the files of this folder, with which the engine has begun or not.

        Raises:
            ModelFileError: see `ServedFiles`.
        """
        if self._thread.ident is not None:
            self._thread.join()
        if self._files is None or self._files.folder != folder:
            self._files = ServedFiles(folder)
            self._tell(self._files)
        return self._files

    def _load(self, folder: Path) -> None:
        try:
            self._files = ServedFiles(folder, in_process=False)
            self._tell(self._files)
        except NanocoreError:
            self._files = None  # `wait` raises it, in its place among a start's errors

    def _tell(self, files: ServedFiles) -> None:
        if self._report is not None:
            self._report(StartReport(files=files.put_into_cache()))
