"""The files that clients may read: what their tokenizer needs, as it was when the engine started.

They are read before torch is imported, and a client that launched the engine hears at once which
they are: it makes its tokenizer while the model loads. Their contents lie in the user's cache
folder, where that client finds them.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import get_args

from nanocore.engine_core.process.parent import ParentLink
from nanocore.protocol.errors import ModelFileError, StartFile, StartReport
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

    Raises:
        ModelFileError: one of them cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._contents: dict[str, bytes] = {}
        self.entries: list[ModelFile] = []
        if is_gguf(folder):
            for name, content in gguf_model_files(folder).items():
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

    def report_to(self, parent: ParentLink) -> None:
        """Tell the launching client which they are, after their contents are in the cache."""
        cache = FileCache()
        for entry in self.entries:
            if not cache.has(entry.sha256):
                cache.write(entry.sha256, self._contents[entry.name])
        entries = [StartFile(entry.name, entry.num_bytes, entry.sha256) for entry in self.entries]
        parent.report(StartReport(files=entries))


def read_files(folder: Path, parent: ParentLink | None) -> ServedFiles:
    """Read the files of a model, and report them to a client that launched the engine."""
    files = ServedFiles(folder)
    if parent is not None:
        files.report_to(parent)
    return files
