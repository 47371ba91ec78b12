"""Weights from safetensors files into a model's parameters: strict, and straight to their place.

A model says which slices of which checkpoint tensor it keeps and where (see `weights`); the loader
fills each of these exactly once and accepts nothing else. What lies in the file as it lies in the
parameter is read into it without a copy; the rest passes through a small buffer. Files are read,
not mapped: mapped pages would count as this process's memory until the end. A few threads read at
once, since the first touch of new memory costs more than reading does.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash
from torch import Tensor
from tqdm import tqdm

from nanocore.protocol.errors import ModelFileError
from nanocore.worker.loading.checkpoint import StoredTensor, quoted, stored_tensors
from nanocore.worker.loading.model_folder import display_name
from nanocore.worker.loading.weights import HEAD, Entries, Entry, Index, TensorNames

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PIECE_BYTES = 4 * 2**20
_MAX_THREADS = 4


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive rows of a stored tensor, and where what `index` keeps of them goes.

    shape: of the rows. file_offset: of their first byte. add: see `Entry.offset`.
    """

    stored: StoredTensor
    file_offset: int
    shape: tuple[int, ...]
    index: Index
    target: Tensor
    add: float

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.stored.dtype]

    @property
    def kept_bytes(self) -> int:
        return self.target.numel() * self.dtype.itemsize


def load_weights(
    folder: Path,
    entries: Entries,
    names: TensorNames,
    progress: bool = False,
    digest: xxhash.xxh3_128 | None = None,
) -> int:
    """Fill every part of all entries from the folder's safetensors files.

    Args:
        folder: single `model.safetensors`, or an index with its shards.
        entries: every tensor that the checkpoint must hold. Parts may be of any float dtype, on any
            device.
        names: from the files' names to those of entries.
        progress: show a bar on stderr, if that is a terminal.
        digest: told of all that was read, by tensors' names: the same however files are cut.

    Returns:
        Bytes of this rank's slices, as they are stored. Where a slice cuts rows apart, the whole
        rows are read.

    Raises:
        ModelFileError: a file is missing, damaged, incomplete or no safetensors; a tensor is
            missing, unexpected, repeated, or of another shape or kind.
    """
    expected = _expected_tensors(folder, entries, names)
    pieces = [
        piece for name, stored in expected.items() for piece in _pieces(stored, entries[name])
    ]
    num_bytes = sum(piece.kept_bytes for piece in pieces)
    num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    with (
        _Reader(sorted({piece.stored.path for piece in pieces})) as reader,
        ThreadPoolExecutor(num_threads, "loader") as threads,
        tqdm(
            total=num_bytes,
            unit="B",
            unit_scale=True,
            desc=f"Loading {display_name(folder)}",
            file=sys.stderr,
            disable=None if progress else True,
        ) as bar,
    ):
        digests: list[tuple[str, str, bytes]] = []
        for piece, read in zip(pieces, threads.map(reader.fill, pieces), strict=True):
            bar.update(piece.kept_bytes)
            digests.append((piece.stored.name, piece.stored.dtype, read))
    if digest is not None:
        digests.sort(key=lambda read: read[0])  # and a tensor's pieces stay in their order
        digest.update(repr(digests).encode())
    return num_bytes


def check_weights(folder: Path, entries: Entries, names: TensorNames) -> int:
    """Check all that can be known of a checkpoint without reading its weights; fills nothing.

    Returns:
        Bytes of all tensors in `entries` as they are stored, whatever this rank keeps of them.

    Raises:
        ModelFileError: see `load_weights`.
    """
    return sum(stored.num_bytes for stored in _expected_tensors(folder, entries, names).values())


def _expected_tensors(
    folder: Path, entries: Entries, names: TensorNames
) -> dict[str, StoredTensor]:
    """All tensors of `entries`, each with the shape it should have, in the order of the files."""
    found: dict[str, StoredTensor] = {}
    for stored in stored_tensors(folder, lambda name: names(name) is not None):
        where = f"{stored.path}: tensor {quoted(stored.name)}"
        name = names(stored.name) or ""
        entry = entries.get(name)
        if entry is None:
            raise ModelFileError(f"{where} is not part of this model: is it what config.json says?")
        if stored.shape != entry.shape:
            implied = list(entry.shape)
            raise ModelFileError(
                f"{where} has shape {list(stored.shape)}, config.json implies {implied}"
            )
        if stored.dtype not in _DTYPES:
            raise ModelFileError(
                f"{where} is {stored.dtype}, which is not implemented: one of "
                f"{', '.join(_DTYPES)} is needed (quantized models are not read)"
            )
        if name in found:
            raise ModelFileError(
                f"{where} and {quoted(found[name].name)} are two of what the model has one of: "
                "download the model again"
            )
        found[name] = stored
    missing = sorted(entries.keys() - found.keys())
    if missing:
        raise ModelFileError(
            f"{folder}: {len(missing)} of {len(entries)} tensors are missing, "
            f"e.g. {missing[0]!r}: is it what config.json says?"
            + (" tie_word_embeddings would make the embedding the head" * (missing == [HEAD]))
        )
    return found


def _pieces(stored: StoredTensor, entry: Entry) -> Iterator[_Piece]:
    """All that this rank keeps of a tensor."""
    for part in entry.parts:
        assert part.target.shape == torch.empty(entry.shape, device="meta")[part.index].shape
        if part.target.numel():
            yield from _cut(
                _Piece(stored, stored.offset, entry.shape, part.index, part.target, entry.offset)
            )


def _cut(whole: _Piece) -> Iterator[_Piece]:
    """The rows that `whole.index` keeps, as pieces that fit the buffer."""
    if not whole.shape:
        yield whole
        return
    num_rows, *row_shape = whole.shape
    start, stop, _ = whole.index[0].indices(num_rows) if whole.index else (0, num_rows, 1)
    shape, inner = tuple(row_shape), whole.index[1:]
    row_bytes = math.prod(shape) * whole.dtype.itemsize
    if row_bytes > PIECE_BYTES:
        for row in range(start, stop):
            offset = whole.file_offset + row * row_bytes
            target = whole.target[row - start]
            yield from _cut(
                replace(whole, file_offset=offset, shape=shape, index=inner, target=target)
            )
        return
    step = PIECE_BYTES // row_bytes
    for row in range(start, stop, step):
        count = min(step, stop - row)
        yield replace(
            whole,
            file_offset=whole.file_offset + row * row_bytes,
            shape=(count, *shape),
            index=(slice(None), *inner),
            target=whole.target[row - start : row - start + count],
        )


class _Reader:
    """Open files, and a buffer per thread."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._files: dict[Path, int] = {}
        self._local = threading.local()
        self._closing = ExitStack()

    def __enter__(self) -> _Reader:
        for path in self._paths:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._closing.callback(os.close, self._files[path])
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def fill(self, piece: _Piece) -> bytes:
        """Read a piece into its target; returns the xxh3-128 of what was read."""
        target = piece.target
        is_whole = math.prod(piece.shape) == target.numel()
        is_same = target.dtype == piece.dtype and target.device.type == "cpu" and not piece.add
        if is_whole and is_same and target.is_contiguous():
            return self._read(piece, target.view(-1).view(torch.uint8))
        num_bytes = math.prod(piece.shape) * piece.dtype.itemsize
        buffer = self._buffer(pinned=target.is_cuda)[:num_bytes]
        digest = self._read(piece, buffer)
        values = buffer.view(piece.dtype).view(piece.shape)[piece.index]
        target.copy_(values.float() + piece.add if piece.add else values)
        return digest

    def _buffer(self, *, pinned: bool) -> Tensor:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=pinned)
        buffer: Tensor = self._local.buffer
        return buffer

    def _read(self, piece: _Piece, memory: Tensor) -> bytes:
        """Fill `memory`, contiguous bytes on the CPU, from the file; returns their digest."""
        path = piece.stored.path
        view = memory.numpy().data
        offset = piece.file_offset
        while view:
            try:
                count = os.preadv(self._files[path], [view], offset)
            except OSError as error:
                raise ModelFileError(f"{path}: {error.strerror}, at byte {offset}") from None
            if count == 0:
                raise ModelFileError(f"{path} became shorter while it was read, at byte {offset}")
            view, offset = view[count:], offset + count
        return xxhash.xxh3_128_digest(memory.numpy().data)  # while a cache still has them
