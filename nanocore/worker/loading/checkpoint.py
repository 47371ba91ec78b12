"""The safetensors files of a model folder: which there are, and what their headers say.

No weights are read here. safetensors validates every header (no gaps, no overlaps, every byte
covered) but names no file and exposes no offsets: so every error here names the file, what is wrong
with it and the remedy, and offsets are taken from the header that safetensors has accepted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open

from nanocore.protocol.errors import ModelFileError, quoted, shorten
from nanocore.worker.config.json_settings import MAX_INDEX_BYTES, note_oddity, read_json
from nanocore.worker.loading.gguf.architectures import gguf_tensors
from nanocore.worker.loading.gguf.gguf_files import is_gguf
from nanocore.worker.loading.gguf.header import LFS_MAGIC, LFS_POINTER

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf")
_MODEL_FILE = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
"""What transformers calls the files that it reads; others in the folder may be anything."""
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Tensors of all of a layer's experts, and the projections in each one's part (Qwen3.5)."""
_HEADER_START = 8  # bytes: the header's length, little-endian
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


class CheckpointTensor(msgspec.Struct, frozen=True):
    """One entry of a file's header. dtype: as safetensors spells it; offset: bytes in the file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    def read(self, start: int, size: int) -> bytes:
        """Up to `size` of its bytes from `start` on. Raises ModelFileError."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset + start)
                return file.read(min(size, self.num_bytes - start))
        except OSError as error:
            raise ModelFileError(f"{self.path}: {error.strerror or error}") from None


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def all_tensors(folder: Path) -> list[CheckpointTensor]:
    """Every tensor that the folder's files hold; whether they belong together is not asked.

    Raises:
        ModelFileError: no safetensors files, or several without an index; a file is missing or
            damaged.
    """
    if is_gguf(folder):
        return _of_gguf(folder)
    files = _weight_files(folder, _read_index(folder))
    return [tensor for path in files for tensor in read_header(path)]


def stored_tensors(folder: Path, is_read: Callable[[str], bool]) -> Iterator[CheckpointTensor]:
    """Every tensor of a model folder whose name is read, file by file, each in file order.

    Raises:
        ModelFileError: no safetensors files, or several without an index; a file is missing or
            damaged; the index and the files contradict each other; a tensor is stored twice.
    """
    if is_gguf(folder):
        yield from (tensor for tensor in _of_gguf(folder) if is_read(tensor.name))
        return
    weight_map = _read_index(folder)
    seen: dict[str, Path] = {}
    for path in _weight_files(folder, weight_map):
        for tensor in read_header(path):
            name = tensor.name
            if not is_read(name):
                continue
            if name in seen:
                raise ModelFileError(
                    f"{path}: tensor {quoted(name)} is also in {seen[name].name}: download the "
                    "model again, or remove the file that does not belong to it"
                )
            if weight_map is not None and name not in weight_map:
                raise ModelFileError(f"{path}: tensor {quoted(name)} is not in {INDEX_FILE}")
            seen[name] = path
            yield from _unstacked(tensor)
    for name, file in (weight_map or {}).items():
        if is_read(name) and (name not in seen or seen[name].name != file):
            where = f"it is in {seen[name].name}" if name in seen else "it is in no file"
            raise ModelFileError(
                f"{folder / INDEX_FILE}: tensor {quoted(name)} should be in {file}, but {where}: "
                "index and files are not of the same model; download both again"
            )


def _unstacked(tensor: CheckpointTensor) -> Iterator[CheckpointTensor]:
    """The tensor; or of all experts' in one ([X, 2 I, E] of gate and up, [X, E, I]) each one's."""
    prefix, _, name = tensor.name.rpartition(".")
    if len(tensor.shape) != 3 or not prefix.endswith(".experts") or name not in _STACKED:
        yield tensor
        return
    projections, (num_experts, num_rows, num_columns) = _STACKED[name], tensor.shape
    shape = num_rows // len(projections), num_columns
    num_parts = num_experts * len(projections)
    if not num_parts or num_rows % len(projections):
        raise ModelFileError(
            f"{tensor.path}: tensor {quoted(tensor.name)} is {list(tensor.shape)}: not one of "
            f"{' and '.join(projections)} for each expert"
        )
    num_bytes = tensor.num_bytes // num_parts
    for i in range(num_parts):
        expert, part = divmod(i, len(projections))
        own, offset = f"{prefix}.{expert}.{projections[part]}.weight", tensor.offset + i * num_bytes
        yield CheckpointTensor(tensor.path, own, tensor.dtype, shape, offset, num_bytes)


def read_header(path: Path) -> list[CheckpointTensor]:
    """Read a safetensors file's header: its tensors, in the order of their bytes.

    Raises ModelFileError: the file is missing, damaged, incomplete or something else.
    """
    try:
        if path.exists() and not path.is_file():
            raise ModelFileError(f"{path} is not a file")
        with safe_open(path, framework="pt"):
            pass  # opening validates
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_HEADER_START), "little")
            entries = _entries(file.read(length))
    except FileNotFoundError:
        raise ModelFileError(f"{path} is missing{_why_missing(path)}") from None
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror or error}") from None
    except (SafetensorError, ValueError, RecursionError) as error:
        # ValueError: msgspec's, and that of names that are no UTF-8.
        raise ModelFileError(f"{path}: {_describe(path)} ({shorten(str(error))})") from None
    start = _HEADER_START + length
    tensors = [
        CheckpointTensor(path, name, entry.dtype, entry.shape, start + begin, end - begin)
        for name, entry in entries.items()
        for begin, end in [entry.data_offsets]
    ]
    return sorted(tensors, key=lambda tensor: tensor.offset)


def _entries(header: bytes) -> dict[str, _Entry]:
    raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    raw.pop("__metadata__", None)
    return {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}


def _of_gguf(first: Path) -> list[CheckpointTensor]:
    return [
        CheckpointTensor(t.path, t.name, t.dtype, t.stored_shape, t.offset, t.num_bytes)
        for t in gguf_tensors(first)
    ]


def _read_index(folder: Path) -> dict[str, str] | None:
    """Read the file name of each tensor; None without an index.

    Also None with a single file beside the index, which transformers prefers.
    """
    index = folder / INDEX_FILE
    try:
        weight_map = read_json(index, _Index, MAX_INDEX_BYTES).weight_map
    except FileNotFoundError:
        return None
    for name, file in weight_map.items():
        # A name, and nothing that could lead elsewhere. The file may be a link: the hub's cache
        # is made of them.
        if not re.fullmatch(r"[\w.-]{1,200}\.safetensors", file):
            raise ModelFileError(
                f"{index}: tensor {quoted(name)} is said to be in {quoted(file)}, which is not the "
                "name of a safetensors file in this folder"
            )
    if SINGLE_FILE not in weight_map.values() and (folder / SINGLE_FILE).exists():
        note_oddity(f"{folder}: {SINGLE_FILE} is read, and not the files that {INDEX_FILE} names")
        return None
    return weight_map


def _weight_files(folder: Path, weight_map: dict[str, str] | None) -> list[Path]:
    """The files to read, in a fixed order; of several models the one that transformers reads."""
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    ours = [name for name in present if _MODEL_FILE.fullmatch(name)]
    listed = sorted(set(weight_map.values())) if weight_map else [SINGLE_FILE]
    if weight_map is not None or SINGLE_FILE in ours:
        if strays := sorted(set(ours).difference(listed)):
            note_oddity(
                f"{folder}: {', '.join(listed[:2])}{', ...' * (len(listed) > 2)} is read, and not "
                f"{strays[0]}{' and others' * (len(strays) > 1)}, which does not belong to it"
            )
        return [folder / name for name in listed]
    if len(present) == 1 and not ours:
        return [folder / present[0]]
    if present:
        raise ModelFileError(
            f"{folder} has {present[0]}{' and others' * (len(present) > 1)}, but no {INDEX_FILE} "
            "to say what belongs together: download the index too"
        )
    what = f"{folder} has no *.safetensors files"
    if others := sorted(p.name for p in folder.glob("*") if p.suffix in _OTHER_FORMATS):
        raise ModelFileError(
            f"{what}, only {others[0]}: no other format is read. Convert it: load the model with "
            "transformers and call model.save_pretrained(folder, safe_serialization=True)"
        )
    raise ModelFileError(f"{what}{_why_missing(folder / SINGLE_FILE)}")


def _why_missing(path: Path) -> str:
    if path.is_symlink():
        return f": it is a link to {path.readlink()}, which is not there; download it again"
    folder = path.parent
    for place in (folder, folder / ".cache" / "huggingface" / "download", folder / "../../blobs"):
        if next(place.glob("*.incomplete"), None):
            return ": its download was not completed; run it again to resume"
    return ": download it again"


def _describe(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(len(LFS_MAGIC))
        if size == 0:
            return "an empty file; download it again"
        if head == LFS_MAGIC:
            return LFS_POINTER
        header_bytes = int.from_bytes(head[:_HEADER_START], "little")
        if header_bytes > _MAX_HEADER_BYTES:
            return "no safetensors file, whatever its name says; download it again"
        expected = _HEADER_START + header_bytes
        if expected <= size:
            file.seek(_HEADER_START)
            try:
                entries = _entries(file.read(header_bytes))
                ends = (entry.data_offsets[1] for entry in entries.values())
                expected += max(ends, default=0)
            except (ValueError, RecursionError):
                expected = 0
    if size < expected:
        return f"{size} bytes of {expected}; its download was not completed, run it again to resume"
    return f"{size} bytes; damaged, download it again"
