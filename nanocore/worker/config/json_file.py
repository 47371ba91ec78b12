"""JSON files of a model folder, which anybody may have written: bounded, and never a surprise.

What is no regular file is not opened (a pipe would be waited for), what is too large is not read,
and text that is no JSON, or nested without end, is an error like any other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, TypeVar

import msgspec

from nanocore.protocol.errors import ModelFileError

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
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror or error}") from None
    except RecursionError:
        raise ModelFileError(f"{path}: JSON nested too deep") from None
    except ValueError as error:  # msgspec's errors are, and those of text that is no UTF-8
        raise ModelFileError(f"{path}: {error}; download it again") from None
