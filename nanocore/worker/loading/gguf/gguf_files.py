"""GGUF files of a model: one, or the parts into which llama.cpp has split it.

Everywhere a model in this format goes by the path of its first file.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePath
from typing import Final, TypeVar

from nanocore.protocol.errors import ModelFileError, quoted, shorten
from nanocore.worker.config.json_settings import Settings
from nanocore.worker.loading.gguf.header import Header, read_header

SUFFIX: Final = ".gguf"
_SPLIT: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAX_FILES: Final = 1000
_OTHERS: Final = re.compile(r"mmproj.*|(.*[-._])?imatrix([-._].*)?")
"""Names of files that are no model: what turns images into embeddings, and what quantizers use."""
_Path = TypeVar("_Path", bound=PurePath)


def is_gguf(path: Path) -> bool:
    """Whether a model's path is that of a GGUF file, and not of a folder."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def gguf_in_folder(folder: Path) -> Path | None:
    """The model's first file, where a folder has no safetensors; None if it has no GGUF file.

    Raises ModelFileError: it has several models.
    """
    if (
        next(folder.glob("*.safetensors"), None) is not None
        or (folder / "model.safetensors.index.json").exists()
    ):
        return None
    files = [path for path in folder.glob("*.gguf") if is_model(path)]
    firsts = sorted({first_file(path) for path in files})
    if len(firsts) > 1:
        names = ", ".join(path.name for path in firsts[:4])
        raise ModelFileError(
            f"{folder} has {len(firsts)} models ({shorten(names)}): give the path of one file"
        )
    return firsts[0] if firsts else None


def is_model(path: PurePath) -> bool:
    """Whether a GGUF file is that of a language model, by its name."""
    return _OTHERS.fullmatch(path.name) is None


def first_file(path: _Path) -> _Path:
    """The first of the files that this one belongs to."""
    split = _SPLIT.fullmatch(path.name)
    if split is None:
        return path
    return path.with_name(f"{split['stem']}-00001-of-{split['count']}{SUFFIX}")


def read_headers(first: Path) -> list[Header]:
    """The headers of a model's files, in their order.

    Raises ModelFileError: see `read_header`; or a file is missing, or of another model.
    """
    header = read_header(first)
    count = _setting(header, "split.count", 1)
    split = _SPLIT.fullmatch(first.name)
    if count == 1:
        return [header]
    if split is None or int(split["count"]) != count or not count <= _MAX_FILES:
        raise ModelFileError(
            f"{first} has split.count = {count}, but its name does not match "
            f"(NAME-00001-of-{count:05}.gguf): restore its original name"
        )
    headers = [
        read_header(first.with_name(f"{split['stem']}-{i:05}-of-{count:05}{SUFFIX}"))
        for i in range(1, count + 1)
    ]
    _check_split(first, headers, count)
    return headers


def _check_split(first: Path, headers: list[Header], count: int) -> None:
    names: dict[str, Path] = {}
    for i, header in enumerate(headers):
        found = _setting(header, "split.no", -1), _setting(header, "split.count", 1)
        if found != (i, count):
            raise ModelFileError(
                f"{header.path}: split.no and split.count are {found[0]} and {found[1]}, not {i} "
                f"and {count}: it is not of the same model, or not by its name"
            )
        for tensor in header.tensors:
            if tensor.name in names:
                raise ModelFileError(
                    f"{header.path}: tensor {quoted(tensor.name)} is also in "
                    f"{names[tensor.name].name}: download the model again"
                )
            names[tensor.name] = header.path
    expected = _setting(headers[0], "split.tensors.count", len(names))
    if expected != len(names):
        raise ModelFileError(
            f"{first}: {expected} tensors by its split.tensors.count, and its {count} files have "
            f"{len(names)}: they are not of the same model"
        )


def _setting(header: Header, key: str, default: int) -> int:
    return Settings(header.path, header.metadata).get(key, int, default)
