"""From what --model says to a folder: a path, or a Hugging Face id that is downloaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from nanocore.protocol.errors import ConfigError, ModelFileError, quoted
from nanocore.worker.loading.gguf.gguf_files import first_file, gguf_in_folder, is_gguf
from nanocore.worker.loading.hub import download

_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_HUB_ID = re.compile(f"({_WORD}/{_WORD})(?::([A-Za-z0-9][A-Za-z0-9._/-]*))?")


class HubModel(NamedTuple):
    """A repository of the hub; quantization: of which of its GGUF models, or None."""

    repository: str
    quantization: str | None


def resolve_model(name: str, revision: str | None = None) -> Path:
    """The folder of a model, downloaded first if it is a Hugging Face id that is not cached.

    Raises:
        ConfigError, ModelFileError: see `locate_model`; or the model cannot be downloaded.
    """
    found = locate_model(name, revision)
    return found if isinstance(found, Path) else download(*found, revision)


def locate_model(name: str, revision: str | None = None) -> Path | HubModel:
    """Return the folder of a model that is on this machine, or which one of the hub is meant.

    Of a model in GGUF format it is the path of its file, or of the first of them.

    Args:
        name: an existing folder or GGUF file, or an id `org/name`, of GGUF models also
            `org/name:QUANTIZATION`. What exists is preferred.
        revision: branch, tag or commit of an id; None is its main branch.

    Raises:
        ConfigError: a revision of a folder.
        ModelFileError: neither folder, file nor id; not accessible.
    """
    try:
        name.encode()  # messages are UTF-8
        path = Path(name).expanduser()
        is_folder, is_there = path.is_dir(), path.exists()
    except (OSError, RuntimeError, UnicodeError) as error:  # no permission, no such user's home
        why = getattr(error, "strerror", None) or error
        raise ModelFileError(f"--model {quoted(name)}: {why}") from None
    if name and is_folder:
        if revision is not None:
            raise ConfigError(f"--revision {revision}: {path} is a folder, which has no revisions")
        return gguf_in_folder(path) or path
    if name and is_there:
        if not is_gguf(path):
            raise ModelFileError(f"--model {name}: give a folder, or a file named *.gguf")
        if revision is not None:
            raise ConfigError(f"--revision {revision}: {path} is a file, which has no revisions")
        return first_file(path)
    if name.startswith(("/", "./", "../", "~")) or (name.endswith(".gguf") and ":" not in name):
        raise ModelFileError(f"--model {name}: there is no such file or folder")
    found = _HUB_ID.fullmatch(name)
    if found is None or "--" in found[1] or ".." in name:
        raise ModelFileError(
            f"--model {name!r}: there is no such file or folder, and it is no Hugging Face id "
            "(org/name)"
        )
    return HubModel(found[1], found[2])


def model_name(given: str | None, found: Path) -> str:
    """Return what clients call a model: the id it was asked for by, else its path."""
    if given is None or Path(given).expanduser().exists():
        return str(found)
    return given


def display_name(path: Path) -> str:
    """Display name of a model's folder or file: its id, if it lies in the hub's cache."""
    for folder in (path, *path.parents):
        cached = re.fullmatch(r"models--(.+)", folder.parent.parent.name)
        if folder.parent.name == "snapshots" and cached:
            return cached[1].replace("--", "/")
    return path.absolute().name
