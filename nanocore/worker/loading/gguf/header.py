"""The header of a GGUF file: settings by name, and where each tensor lies.

The whole header is checked when it is read: counts, types, names, and that tensors lie within the
file and not upon each other. No count is believed before it is compared with what the file has
left, and nothing is allocated for what is not there. Errors name the file and the byte.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Final

from nanocore.protocol.errors import ModelFileError, quoted


@dataclass(frozen=True, slots=True)
class TensorType:
    """`block_numel` consecutive values of a row take `block_bytes`. name: llama.cpp's."""

    name: str
    block_numel: int
    block_bytes: int


TENSOR_TYPES: Final = {
    number: TensorType(name, block_numel, block_bytes)
    for number, name, block_numel, block_bytes in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (30, "BF16", 1, 2), (28, "F64", 1, 8),
        (24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8),
        (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 40),
        (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50), (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136), (29, "IQ1_M", 256, 56),
        (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18),
    )
}  # fmt: skip
FLOATS: Final = ("F32", "F16", "BF16")


MAX_HEADER_BYTES: Final = 128 * 2**20
"""Ten times the largest: a vocabulary of 256,000 tokens takes 12 MB."""
MAX_ITEMS: Final = 2**22
"""Limit for all arrays of a file together: an item takes some 60 bytes as a Python object."""
_MAX_STRING_BYTES: Final = 2**20
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")


class HeaderBytes:
    """Bytes of the header that are not taken yet.

    offset: of the next byte in the file. num_bytes: of the whole file.
    """

    def __init__(self, path: Path, file: BinaryIO, num_bytes: int) -> None:
        self._path = path
        self._file = file
        self.num_bytes = num_bytes
        self.offset = 0
        self._num_items = 0

    def error(self, why: str, remedy: str = "it is damaged; download it again") -> ModelFileError:
        return ModelFileError(f"{self._path}, at byte {self.offset}: {why}: {remedy}")

    def take(self, count: int, what: str) -> bytes:
        """Take the next `count` bytes. what: names them in the error that the file is too short."""
        end = self.offset + count
        if end > self.num_bytes:
            self.require(count, 1, what)
        if end > MAX_HEADER_BYTES:
            raise self.error(f"its header has more than {MAX_HEADER_BYTES} bytes")
        taken = self._file.read(count)
        if len(taken) < count:
            raise self.error("the file became shorter while it was read")
        self.offset = end
        return taken

    def number(self, layout: struct.Struct, what: str) -> int:
        value: int = layout.unpack(self.take(layout.size, what))[0]
        return value

    def string(self, what: str) -> str:
        """The next text: its length in bytes, and these."""
        count = self.number(_U64, f"the length of {what}")
        if count > _MAX_STRING_BYTES:
            raise self.error(f"{what} has {count} bytes, and at most {_MAX_STRING_BYTES} are read")
        try:
            return self.take(count, what).decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8 ({error.reason})") from None

    def strings(self, count: int, what: str, keep: bool) -> list[str]:
        """Take `count` texts; skips them and returns none unless `keep`."""
        self.count_items(count, _U64.size, what)
        if keep:
            return [self.string(what) for _ in range(count)]
        for _ in range(count):
            self.take(self.number(_U64, what), what)
        return []

    def count_items(self, count: int, item_bytes: int, what: str) -> None:
        self.require(count, item_bytes, what)
        self._num_items += count
        if self._num_items > MAX_ITEMS:
            raise self.error(
                f"{what} has {count} items, and at most {MAX_ITEMS} are read of a file"
            )

    def require(self, count: int, item_bytes: int, what: str) -> None:
        if count * item_bytes > self.num_bytes - self.offset:
            raise self.error(
                f"{what} takes {count * item_bytes} bytes or more, and the file has "
                f"{self.num_bytes - self.offset} more",
                "its download is incomplete, or it is damaged; download it again",
            )


MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_MAX_TENSORS: Final = 2**17
_MAX_KEYS: Final = 2**16
_MAX_DIMS: Final = 4
_MAX_ALIGNMENT: Final = 2**16
_NUMBERS: Final = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_LAYOUTS: Final = {kind: struct.Struct(layout) for kind, layout in _NUMBERS.items()}
_FLOAT, _STRING, _ARRAY = 6, 8, 9
LFS_MAGIC: Final = b"version https://git-lfs"
LFS_POINTER: Final = (
    "a git-lfs pointer, not the weights; run `git lfs pull` in the model's repository"
)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of the file, or a part of one. source: llama.cpp's name; name: that which
    `gguf_tensors` has for it. shape: in numbers, rows first. offset: in the file."""

    path: Path
    source: str
    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def dtype(self) -> str:
        return self.type.name if self.type.name in FLOATS else "U8"

    @property
    def stored_shape(self) -> tuple[int, ...]:
        if self.type.name in FLOATS:
            return self.shape
        *rows, columns = self.shape
        return (*rows, columns // self.type.block_numel * self.type.block_bytes)


@dataclass(frozen=True, slots=True)
class Header:
    """One file's. metadata: by key; numbers, texts, and lists of either. num_bytes: it takes."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    num_bytes: int


def read_header(path: Path) -> Header:
    """A file's header without its vocabulary, which is empty in it.

    Raises ModelFileError: it is missing, damaged, incomplete or something else.
    """
    try:
        stat = path.stat()
    except FileNotFoundError:
        raise ModelFileError(f"{path} is missing: download it again") from None
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror or error}") from None
    return _cached_header(path, stat.st_size, stat.st_mtime_ns)


def read_vocabulary(path: Path) -> dict[str, Any]:
    """All settings of a file, its vocabulary among them. Raises ModelFileError as `read_header`."""
    return _read(path, lambda key: True).metadata


@lru_cache(maxsize=16)
def _cached_header(path: Path, _size: int, _mtime_ns: int) -> Header:
    return _read(path, lambda key: not key.startswith("tokenizer.ggml."))


def _read(path: Path, keep: Callable[[str], bool]) -> Header:
    try:
        if not path.is_file():
            raise ModelFileError(f"{path} is not a file")
        with path.open("rb") as file:
            num_bytes = path.stat().st_size
            _check_magic(path, file.read(len(LFS_MAGIC)), num_bytes)
            file.seek(0)
            return _parse(path, HeaderBytes(path, file, num_bytes), keep)
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror or error}") from None


def _check_magic(path: Path, head: bytes, num_bytes: int) -> None:
    if num_bytes == 0:
        raise ModelFileError(f"{path}: an empty file; download it again")
    if head == LFS_MAGIC:
        raise ModelFileError(f"{path}: {LFS_POINTER}")
    if head[:4] != MAGIC:
        raise ModelFileError(f"{path}: not a GGUF file, despite its name; download it again")


def _parse(path: Path, data: HeaderBytes, keep: Callable[[str], bool]) -> Header:
    data.take(len(MAGIC), "the magic number")
    version = data.number(_U32, "the version")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in _VERSIONS:
            raise data.error("it is big-endian", "download one for this machine's byte order")
        raise data.error(f"GGUF version {version} is not served", "convert it to version 3")
    num_tensors = data.number(_U64, "the number of tensors")
    num_keys = data.number(_U64, "the number of settings")
    if num_tensors > _MAX_TENSORS or num_keys > _MAX_KEYS:
        raise data.error(
            f"it announces {num_tensors} tensors and {num_keys} settings, and at most "
            f"{_MAX_TENSORS} and {_MAX_KEYS} are read"
        )
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = data.string("a setting's name")
        if key in metadata:
            raise data.error(f"the setting {quoted(key)} occurs twice")
        metadata[key] = _value(data, quoted(key), keep(key))
    entries = [_tensor(path, data) for _ in range(num_tensors)]
    num_bytes = data.offset
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT or alignment % 8:
        raise data.error(f"general.alignment = {quoted(alignment)}, not a multiple of 8")
    start = -(-num_bytes // alignment) * alignment
    tensors = [replace(entry, offset=start + entry.offset) for entry in entries]
    _check_places(path, tensors, alignment, start, data.num_bytes)
    return Header(path, metadata, tuple(tensors), num_bytes)


def _value(data: HeaderBytes, key: str, keep: bool) -> Any:
    kind = data.number(_U32, f"the type of {key}")
    if kind == _STRING:
        return data.string(key)
    if kind != _ARRAY:
        return _number(data, key, kind)
    item = data.number(_U32, f"the items' type of {key}")
    count = data.number(_U64, f"the number of items of {key}")
    if item == _STRING:
        return data.strings(count, key, keep)
    if item not in _NUMBERS:
        raise data.error(f"{key} is an array of type {item}, which is unknown")
    import numpy as np  # large, and commands only find out that a file is GGUF

    layout = np.dtype(_NUMBERS[item])
    data.count_items(count, layout.itemsize, key)
    content = data.take(count * layout.itemsize, key)
    return np.frombuffer(content, layout).tolist() if keep else []


def _number(data: HeaderBytes, key: str, kind: int) -> int | float | bool:
    if kind not in _LAYOUTS:
        raise data.error(f"{key} has type {kind}, which is unknown")
    value = data.number(_LAYOUTS[kind], key)
    if kind != _FLOAT:
        return value
    import numpy as np  # see `_value`

    # The decimal number that was meant: 1e-6, and not what is nearest to it in float32.
    return float(str(np.float32(value)))


def _tensor(path: Path, data: HeaderBytes) -> TensorInfo:
    """The next tensor, its offset as the header has it: from the first tensor's place."""
    name = data.string("a tensor's name")
    shown = f"tensor {quoted(name)}"
    num_dims = data.number(_U32, f"the dimensions of {shown}")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise data.error(f"{shown} has {num_dims} dimensions: 1 to {_MAX_DIMS} are served")
    sizes = [data.number(_U64, f"the shape of {shown}") for _ in range(num_dims)]
    number = data.number(_U32, f"the type of {shown}")
    offset = data.number(_U64, f"the place of {shown}")
    if number not in TENSOR_TYPES:
        raise data.error(f"{shown} has type {number}, which is unknown")
    kind = TENSOR_TYPES[number]
    if not all(sizes) or math.prod(sizes) >= 2**62:
        raise data.error(f"{shown} has shape {sizes[::-1]}, with a size of 0 or too many numbers")
    if sizes[0] % kind.block_numel:
        raise data.error(
            f"{shown} is {kind.name}, whose blocks of {kind.block_numel} do not fill rows of "
            f"{sizes[0]}"
        )
    num_bytes = math.prod(sizes) // kind.block_numel * kind.block_bytes
    return TensorInfo(path, name, name, kind, tuple(reversed(sizes)), offset, num_bytes)


def _check_places(
    path: Path, tensors: list[TensorInfo], alignment: int, start: int, num_bytes: int
) -> None:
    seen: set[str] = set()
    end = start
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        where = f"{path}: tensor {quoted(tensor.name)}"
        if tensor.name in seen:
            raise ModelFileError(f"{where} occurs twice: download the file again")
        seen.add(tensor.name)
        if tensor.offset < end or (tensor.offset - start) % alignment:
            raise ModelFileError(
                f"{where} begins at byte {tensor.offset}, within another or beside the alignment "
                f"of {alignment}: the file is damaged, download it again"
            )
        end = tensor.offset + tensor.num_bytes
        if end > num_bytes:
            raise ModelFileError(
                f"{where} ends at byte {end}, and the file has {num_bytes}: its download was not "
                "completed, run it again to resume"
            )
