"""JSON files of a model folder, which anybody may have written: bounded, and never a surprise.

What is no regular file is not opened (a pipe would be waited for), what is too large is not read,
and text that is no JSON, or nested without end, is an error like any other.
"""

from __future__ import annotations

import codecs
import functools
import logging
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from nanocore.protocol.errors import ModelFileError

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_INDEX_BYTES: Final = 128 * 2**20
"""Ten times the index of the largest checkpoints."""

MAX_SETTINGS_BYTES: Final = 4 * 2**20
"""As Python objects they may take fifty times that."""


def read_json(path: Path, kind: type[T], max_bytes: int) -> T:
    """The file's value.

    Raises:
        FileNotFoundError: it is not there.
        ModelFileError: it cannot be read, is too large, or is not of this kind.
    """
    try:
        if path.exists() and not path.is_file():
            raise ModelFileError(f"{path} is not a file")
        if (num_bytes := path.stat().st_size) > max_bytes:
            raise ModelFileError(f"{path}: {num_bytes} bytes, and no model needs {max_bytes}")
        content = path.read_bytes()
        if content.startswith(codecs.BOM_UTF8):
            note_oddity(f"{path} begins with a byte order mark, which is skipped")
        return msgspec.json.decode(content.removeprefix(codecs.BOM_UTF8), type=kind)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror or error}") from None
    except RecursionError:
        raise ModelFileError(f"{path}: JSON nested too deep") from None
    except ValueError as error:  # msgspec's errors are, and those of text that is no UTF-8
        raise ModelFileError(f"{path}: {error}; download it again") from None


@functools.cache
def note_oddity(text: str) -> None:
    """Log, once, how a model's files were understood that are not as they should be."""
    logger.warning("%s", text)
