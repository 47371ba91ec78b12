"""Tokenizer files of a GGUF model: from the cache folder, or converted and put there.

Converting 262,144 tokens takes a second or two. What was made of a header by this code is found
again by a digest of both.
"""

from __future__ import annotations

import hashlib
import logging
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from nanocore.protocol.errors import ModelFileError, StartFile
from nanocore.system.cache_folder import CacheFolder, FileCache
from nanocore.worker.config.json_settings import Settings
from nanocore.worker.loading.gguf.gguf_files import read_headers
from nanocore.worker.loading.gguf.tokenizer_files import convert_model_files, tokenizer_beside

logger = logging.getLogger(__name__)

_MAX_INDEX_BYTES: Final = 4096

_known: dict[tuple[Any, ...], dict[str, bytes]] = {}
"""The last model's, by its path and the state of its files."""


def gguf_model_files(first: Path) -> dict[str, bytes]:
    """Return the contents by name.

    Raises ModelFileError: see `convert_model_files`.
    """
    header = read_headers(first)[0]
    key = (first.absolute(), *map(_state, (first, tokenizer_beside(first))))
    if key not in _known:
        digest = _digest(first, header.num_bytes)
        found = _cached(digest)
        if not found:
            found = convert_model_files(first)
            _keep(digest, found)
        _known.clear()
        _known[key] = found
    return _known[key]


def generation_settings(first: Path) -> Settings:
    """generation_config.json's. Raises ModelFileError: the vocabulary is damaged."""
    source = f"{first} (settings as generation_config.json has them)"
    return Settings(source, msgspec.json.decode(gguf_model_files(first)["generation_config.json"]))


def _state(path: Path | None) -> tuple[int, int] | None:
    info = None if path is None else path.stat()
    return None if info is None else (info.st_size, info.st_mtime_ns)


def _digest(first: Path, num_bytes: int) -> str:
    try:
        with first.open("rb") as file:
            digest = hashlib.sha256(file.read(num_bytes))
        digest.update(_code_digest())
        beside = tokenizer_beside(first)
        if beside is not None:
            logger.info("%s is used in place of the vocabulary of %s", beside, first.name)
            digest.update(beside.read_bytes())
        return digest.hexdigest()
    except OSError as error:
        raise ModelFileError(f"{error.filename or first}: {error.strerror}") from None


@cache
def _code_digest() -> bytes:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).digest()


@cache
def _index() -> CacheFolder:
    return CacheFolder("converted", "vocabularies are converted at each start")


def _cached(digest: str) -> dict[str, bytes] | None:
    index = _index().read(digest, _MAX_INDEX_BYTES) or b""
    try:
        return FileCache().read_all(msgspec.json.decode(index, type=list[StartFile]))
    except msgspec.DecodeError:  # there is none, or it is damaged
        return None


def _keep(digest: str, files: dict[str, bytes]) -> None:
    cache, entries = FileCache(), []
    for name, content in files.items():
        sha256 = hashlib.sha256(content).hexdigest()
        cache.write(sha256, content)
        entries.append(StartFile(name, len(content), sha256))
    _index().write(digest, msgspec.json.encode(entries))
