"""Downloads from the Hugging Face hub: the folder of a model, or the files of one GGUF model.

Downloads go through huggingface_hub and its cache: resumable, shared with other programs, and
controlled by the hub's own variables (HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN). Of a folder
only configuration, tokenizer and safetensors files are fetched: nothing that could run.
"""

from __future__ import annotations

import errno
import glob
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Final, get_args

import msgspec

from nanocore.protocol.errors import ModelFileError, shorten
from nanocore.protocol.messages import ModelFileName
from nanocore.worker.config.json_settings import Settings
from nanocore.worker.loading.gguf.gguf_files import SUFFIX, first_file, is_model
from nanocore.worker.models import ARCHITECTURES

_ALLOWED: Final = [
    "config.json",
    "quantize_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    *get_args(ModelFileName),
]
_IGNORED: Final = ["*/*.safetensors", "consolidated*"]
"""Weights in subfolders, and Mistral's second copy of the weights."""
_QUANTIZATION: Final = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|MXFP4\w*|BF16|F16|FP16|F32|FP32))(?=$|[-.])", re.IGNORECASE
)
"""The part of a GGUF file's name that says how it is quantized."""
_UNREAD: Final = re.compile(r"(UD-)?I?Q[123]")
"""Quantizations with types that `gguf_format` does not read."""
_PREFERRED: Final = (
    "Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "IQ4_XS", "IQ4_NL", "MXFP4", "MXFP4_MOE", "Q5_K_M",
    "Q5_K_S", "Q5_0", "Q5_1", "Q6_K", "Q8_0", "BF16", "F16", "F32",
)  # fmt: skip
"""In the order in which one is chosen where none is named; the first is llama.cpp's choice, too."""
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)

logger = logging.getLogger(__name__)


def download(repository: str, quantization: str | None, revision: str | None) -> Path:
    """Return the snapshot's folder in the hub's cache, or the first file of its GGUF model.

    The snapshot is brought up to date if the hub can be reached.

    Args:
        repository: `org/name`.
        quantization: which GGUF model is meant, e.g. `Q4_K_M`, or the name of its file. None: the
            safetensors if there are any, else the first of `_PREFERRED`.
        revision: branch, tag or commit; None is the main branch.

    Raises:
        ModelFileError: it is not there, not accessible or not reachable, or has no such model.
    """
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors, utils
    except ModuleNotFoundError:
        raise ModelFileError(
            f"--model {repository}: there is no such file or folder, and downloading it needs "
            "huggingface_hub: in the repository, pip install '.[engine]'"
        ) from None
    for client in ("httpx", "httpx2"):  # the hub's; each of its requests would be in our log
        logging.getLogger(client).setLevel(logging.WARNING)
    # Its warnings, of each attempt that fails, say less than the error does in the end.
    utils.logging.set_verbosity_error()
    logger.info("%s: asking the model hub", repository)
    refusals = errors.GatedRepoError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError
    with _explained(repository, revision):
        is_reached = True
        try:
            names = hub.list_repo_files(repository, revision=revision)
        except refusals:
            raise
        except Exception:  # not reachable, or offline: then the cache has to do
            folder = hub.snapshot_download(repository, revision=revision, allow_patterns=[])
            files = (path for path in Path(folder).rglob("*") if path.is_file())
            names = [path.relative_to(folder).as_posix() for path in files]
            is_reached = False
        has_gguf = any(map(_is_gguf, names))
        has_safetensors = any(name.endswith(".safetensors") and "/" not in name for name in names)
        # Of a folder that is cached in part, the hub's library says what is missing.
        if quantization is None and (has_safetensors or not (has_gguf or is_reached)):
            folder = hub.snapshot_download(
                repository, revision=revision, allow_patterns=_ALLOWED, ignore_patterns=_IGNORED
            )
            return Path(folder)
        cache = f" in the cache at {hub.constants.HF_HUB_CACHE}, and the hub was not reached"
        chosen = choose_gguf(repository, names, quantization, "" if is_reached else cache)
        folder = hub.snapshot_download(
            repository, revision=revision, allow_patterns=[glob.escape(name) for name in chosen]
        )
        return Path(folder, chosen[0])


def choose_gguf(
    repository: str, names: Sequence[str], quantization: str | None, where: str = ""
) -> list[str]:
    """Return the files of one GGUF model among these names, in their order.

    where: words for errors.

    Raises ModelFileError: there is none, or the choice is not unique.
    """
    models = _gguf_models(names)
    what = f"--model {repository}"
    if not models:
        remedy = "leave it out: the model has no GGUF files" if quantization else (
            "it has neither safetensors nor GGUF files"
        )  # fmt: skip
        raise ModelFileError(f"{what}{f':{quantization}' if quantization else ''}: {remedy}")
    kinds = {first: quantization_of(first) for first in models}
    wanted = (quantization or "").upper()
    if wanted in ("", "LATEST"):  # Ollama's name for its default
        order = [kind for kind in _PREFERRED if kind in kinds.values()]
        found = [first for first, kind in kinds.items() if order and kind == order[0]]
        found = found or list(models)
    else:
        found = [
            first for first, kind in kinds.items()
            if wanted == kind or wanted in _names(models[first])
        ]  # fmt: skip
    there = ", ".join(kinds[first] or first for first in models)
    if not found:
        raise ModelFileError(
            f"{what}:{quantization}: there is no such file{where}; choose from {there}"
        )
    if all(_UNREAD.match(kinds[first]) for first in found):
        raise ModelFileError(
            f"{what}: {kinds[found[0]]} is not served, only four bits and more: it has {there}"
        )
    if len(found) > 1:
        raise ModelFileError(
            f"{what}: {len(found)} models could be meant ({', '.join(found[:4])}): name the file, "
            f"as in {repository}:{found[0]}"
        )
    logger.info("%s: taking %s, of %s", repository, found[0], there)
    return models[found[0]]


def _names(files: Sequence[str]) -> set[str]:
    return {name.upper() for file in files for name in (file, PurePosixPath(file).name)}


def _gguf_models(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of each GGUF model, by the first of them."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        path = PurePosixPath(name)
        if _is_gguf(name) and is_model(path):
            models.setdefault(str(first_file(path)), []).append(name)
    return models


class CachedModel(msgspec.Struct, frozen=True):
    """A model in the hub's cache. name: as --model takes it. used_s: Unix time of its last use."""

    name: str
    num_bytes: int
    used_s: float


def cached_models() -> list[CachedModel]:
    """Return the models in the hub's cache whose architecture is supported, the last used first.

    A GGUF model is listed whatever its architecture: that would take reading its header.
    """
    import huggingface_hub as hub

    try:
        repositories = hub.scan_cache_dir().repos
    except hub.CacheNotFound:
        return []
    found: list[CachedModel] = []
    for repository in repositories:
        if repository.repo_type != "model" or not repository.revisions:
            continue
        snapshot = max(
            repository.revisions, key=lambda one: ("main" in one.refs, one.last_modified)
        )
        files = {
            file.file_path.relative_to(snapshot.snapshot_path).as_posix(): file
            for file in snapshot.files
        }
        models = _gguf_models(files)
        kinds = [quantization_of(first) for first in models]
        names = {
            f"{repository.repo_id}:{kind if kinds.count(kind) == 1 and kind else Path(first).name}":
            model for kind, (first, model) in zip(kinds, models.items(), strict=True)
        }  # fmt: skip
        if _is_supported(snapshot.snapshot_path):
            names[repository.repo_id] = [name for name in files if not _is_gguf(name)]
        for name, parts in names.items():
            num_bytes = sum(files[part].size_on_disk for part in parts)
            used_s = max(files[part].blob_last_accessed for part in parts)
            found.append(CachedModel(name, num_bytes, used_s))
    return sorted(found, key=lambda model: (-model.used_s, model.name))


def _is_supported(folder: Path) -> bool:
    """Whether the folder has safetensors of a supported architecture."""
    if next(folder.glob("*.safetensors"), None) is None:
        return False
    try:
        names = Settings.read(folder / "config.json").get("architectures", list[str], [])
    except ModelFileError:
        return False
    return not ARCHITECTURES.keys().isdisjoint(names)


def quantization_of(name: str) -> str:
    """Return the quantization that a GGUF file's name, or its folder's, ends with, or ''.

    It is in capitals.
    """
    path = PurePosixPath(name)
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", path.name[: -len(SUFFIX)])
    found = _QUANTIZATION.findall(stem) or _QUANTIZATION.findall(path.parent.name)
    return found[-1].upper().replace("FP16", "F16").replace("FP32", "F32") if found else ""


def _is_gguf(name: str) -> bool:
    return name.lower().endswith(SUFFIX)


@contextmanager
def _explained(repository: str, revision: str | None) -> Iterator[None]:
    """Raise the errors of huggingface_hub as a ModelFileError that says what to do."""
    import huggingface_hub as hub
    from huggingface_hub import errors

    what = f"{repository} at revision {revision}" if revision else repository
    try:
        yield
        return
    except ModelFileError:
        raise
    except errors.GatedRepoError:
        remedy = (
            f"is gated: accept its terms at {hub.constants.ENDPOINT}/{repository}, then "
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
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        if hub.constants.HF_HUB_OFFLINE:
            remedy += "HF_HUB_OFFLINE forbids downloading: unset it"
        else:
            remedy += f"{hub.constants.ENDPOINT} cannot be reached ({root}): check the network"
    except errors.HfHubHTTPError as error:
        remedy = f"could not be downloaded: {shorten(str(error))}; "
        refused = error.response.status_code in (401, 403)
        remedy += "set HF_TOKEN to a valid token, or unset it" if refused else "try again later"
    except Exception as error:  # the hub's HTTP library, and so its errors, change by version
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            remedy = f"could not be stored in {hub.constants.HF_HUB_CACHE}: {error.strerror}; "
            remedy += "set HF_HOME to a folder with enough room"
        else:
            remedy = f"could not be downloaded ({type(error).__name__}: {error})"
        remedy += "; start again to resume"
    raise ModelFileError(f"--model {what} {remedy}")
