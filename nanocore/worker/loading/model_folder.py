"""From what --model says to a folder: a path, or a Hugging Face id that is downloaded.

Downloads go through huggingface_hub and its cache: resumable, shared with other programs, and
controlled by the hub's own variables (HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN). Only
configuration, tokenizer and safetensors files are fetched: nothing that could run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from nanocore.protocol.errors import ConfigError, ModelFileError, shorten
from nanocore.protocol.messages import ModelFileName
from nanocore.worker.loading.gguf.gguf_files import first_file, gguf_in_folder, is_gguf

_ALLOWED = [
    "config.json",
    "quantize_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    *get_args(ModelFileName),
]
_IGNORED = ["*/*.safetensors", "consolidated*"]
"""Weights in subfolders, and Mistral's second copy of the weights."""
_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_HUB_ID = re.compile(f"{_WORD}/{_WORD}")


def resolve_model(name: str, revision: str | None = None) -> Path:
    """The folder of a model, downloaded first if it is a Hugging Face id that is not cached.

    Of a model in GGUF format it is the path of its file, or of the first of them.

    Args:
        name: an existing folder or GGUF file, or an id `org/name`. What exists is preferred.
        revision: branch, tag or commit of an id; None is its main branch.

    Raises:
        ConfigError: a revision of a folder.
        ModelFileError: neither folder nor id; not found, not accessible, not reachable.
    """
    try:
        path = Path(name).expanduser()
        is_folder, is_there = path.is_dir(), path.exists()
    except (OSError, RuntimeError) as error:  # no permission, too long, no such user's home
        why = getattr(error, "strerror", None) or error
        raise ModelFileError(f"--model {shorten(name)}: {why}") from None
    if name and is_folder:
        if revision is not None:
            raise ConfigError(f"--revision {revision}: {path} is a folder, which has no revisions")
        return gguf_in_folder(path) or path
    if name and is_there:
        if not is_gguf(path):
            raise ModelFileError(f"--model {name} is a file: give the folder that it is in")
        if revision is not None:
            raise ConfigError(f"--revision {revision}: {path} is a file, which has no revisions")
        return first_file(path)
    if name.startswith(("/", "./", "../", "~")):
        raise ModelFileError(f"--model {name}: there is no such folder")
    if not _HUB_ID.fullmatch(name) or "--" in name or ".." in name:
        raise ModelFileError(
            f"--model {name!r}: there is no such folder, and it is not a Hugging Face id (org/name)"
        )
    return _download(name, revision)


def display_name(folder: Path) -> str:
    """Display name of a model folder: its id, if it lies in the hub's cache, else its name."""
    cached = re.fullmatch(r"models--(.+)", folder.parent.parent.name)
    if folder.parent.name == "snapshots" and cached:
        return cached[1].replace("--", "/")
    return folder.resolve().name


def _download(hub_id: str, revision: str | None) -> Path:
    """The snapshot in the hub's cache, brought up to date if the hub can be reached."""
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ModuleNotFoundError:
        raise ModelFileError(
            f"--model {hub_id}: there is no such folder, and downloading it needs huggingface_hub: "
            "in the repository, pip install '.[engine]'"
        ) from None
    what = f"{hub_id} at revision {revision}" if revision else hub_id
    try:
        return Path(
            hub.snapshot_download(
                hub_id, revision=revision, allow_patterns=_ALLOWED, ignore_patterns=_IGNORED
            )
        )
    except errors.GatedRepoError:
        remedy = (
            f"is gated: accept its terms at {hub.constants.ENDPOINT}/{hub_id}, then "
            "run `hf auth login` or set HF_TOKEN"
        )
    except errors.RepositoryNotFoundError:
        remedy = (
            "does not exist on the hub, or is private: check the spelling; for a private one "
            "run `hf auth login` or set HF_TOKEN"
        )
    except errors.RevisionNotFoundError:
        remedy = "does not exist: see the branches and tags of the model's page"
    except errors.LocalEntryNotFoundError as error:
        remedy = f"is not, or not completely, in the cache at {hub.constants.HF_HUB_CACHE}, and "
        if hub.constants.HF_HUB_OFFLINE:
            remedy += "HF_HUB_OFFLINE forbids downloading: unset it"
        else:
            remedy += (
                f"{hub.constants.ENDPOINT} cannot be reached ({_root(error)}): check the network"
            )
    except Exception as error:  # the hub's HTTP library, and so its errors, change by version
        remedy = f"could not be downloaded ({type(error).__name__}: {error}); start again to resume"
    raise ModelFileError(f"--model {what} {remedy}")


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
