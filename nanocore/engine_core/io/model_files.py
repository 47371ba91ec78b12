"""The model's files that clients need to tokenize and chat, served chunk by chunk.

They are read once, when the engine starts: what is served is what the digests in the model card
name, whatever happens to the folder later. No other file can be named.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import get_args

from nanocore.protocol.errors import ModelFileError
from nanocore.protocol.messages import (
    MAX_FILE_BYTES,
    MAX_FILE_CHUNK_BYTES,
    ModelFile,
    ModelFileName,
)
from nanocore.worker.loading.gguf.gguf_files import is_gguf
from nanocore.worker.loading.gguf.tokenizer_files import gguf_model_files

logger = logging.getLogger(__name__)


class ModelFiles:
    """The contents of those files of `ModelFileName` that a model folder has.

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
        """At most MAX_FILE_CHUNK_BYTES from `offset` on, empty at the end; None: no such file."""
        content = self._contents.get(name or "")
        return None if content is None else content[offset : offset + MAX_FILE_CHUNK_BYTES]
