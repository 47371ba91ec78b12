"""Weights from safetensors files into a model's parameters: strict, and straight to their place.

A model says which slices of which checkpoint tensor it keeps and where (see `weights`); the loader
fills each of these exactly once and accepts nothing else. What lies in the file as it lies in the
parameter is read into it without a copy; the rest passes through a small buffer. Files are read,
not mapped: mapped pages would count as this process's memory until the end. A few threads read at
once, since the first touch of new memory costs more than reading does. The pieces of a weight
follow each other, and no more weights are begun than fit a bound: the owner of one that is complete
packs it, and its memory is free, while others are read.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash
from torch import Tensor
from tqdm import tqdm

from nanocore.protocol.errors import ModelFileError, quoted
from nanocore.worker.loading.checkpoint import CheckpointTensor, stored_tensors
from nanocore.worker.loading.gguf.gguf_files import is_gguf
from nanocore.worker.loading.gguf.gguf_format import put_biases_back
from nanocore.worker.loading.model_folder import display_name
from nanocore.worker.loading.weights import (
    FLOATS,
    HEAD,
    BufferOwner,
    Entries,
    LoadedSlice,
    PendingOwners,
    TensorEntry,
    TensorNames,
    are_within,
)

_DTYPES = FLOATS | {
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""What tensors may be; of which kind one must be, its `TensorEntry` says."""
PIECE_BYTES = 4 * 2**20
BUFFERED_BYTES = 256 * 2**20
"""Limit for weights that are read and not packed yet; a single weight may exceed it."""
_MAX_THREADS = 4
_MAX_PIECES = 4 * _MAX_THREADS


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive rows of a stored tensor, and where what a rank keeps of them goes.

    shape: of the rows. file_offset: of their first byte. add: see `TensorEntry.offset`.
    """

    stored: CheckpointTensor
    file_offset: int
    shape: tuple[int, ...]
    part: LoadedSlice
    add: float

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.stored.dtype]

    @property
    def kept_bytes(self) -> int:
        return self.part.target.numel() * self.dtype.itemsize


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
            device. Owners are notified, by this thread, when all of theirs is there.
        names: from the files' names to those of entries.
        progress: show a bar on stderr, if that is a terminal.
        digest: updated with all that was read, by tensor names: independent of how files are cut.

    Returns:
        Bytes of this rank's slices, as they are stored. Where a slice cuts rows apart, the whole
        rows are read.

    Raises:
        ModelFileError: a file is missing, damaged, incomplete or no safetensors; a tensor is
            missing, unexpected, repeated, not finite, or of another shape or kind.
    """
    expected = check_weights(folder, entries, names)
    pieces = _by_owner(
        piece for name, stored in expected.items() for piece in _pieces(stored, entries[name])
    )
    num_bytes = sum(piece.kept_bytes for piece in pieces)
    num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    digests: list[tuple[str, int, str, bytes]] = []
    with (
        _Reader({piece.stored.path for piece in pieces}) as reader,
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
        for piece, read in _read(pieces, reader, threads):
            bar.update(piece.kept_bytes)
            stored = piece.stored
            start = piece.file_offset - stored.offset
            digests.append((stored.name, start, stored.dtype, read))
    for owner in _owners_of_nothing(entries):
        owner.filled()
    if is_gguf(folder):
        put_biases_back(folder, entries)
    if digest is not None:
        digest.update(repr(sorted(digests)).encode())
    return num_bytes


def _by_owner(pieces: Iterable[_Piece]) -> list[_Piece]:
    """Sort pieces: files' order, except that an owner's pieces follow its first one."""
    groups: dict[int, list[_Piece]] = {}
    for piece in pieces:
        groups.setdefault(id(piece.part.owner or piece), []).append(piece)
    return [piece for group in groups.values() for piece in group]


def _owners_of_nothing(entries: Entries) -> set[BufferOwner]:
    parts = [part for entry in entries.values() for part in entry.parts]
    something = {part.owner for part in parts if part.target.numel()}
    return {part.owner for part in parts if part.owner is not None} - something


def _read(
    pieces: list[_Piece], reader: _Reader, threads: ThreadPoolExecutor
) -> Iterator[tuple[_Piece, bytes]]:
    """Yield each filled piece with the digest of what was read; notifies owners."""
    buffered_bytes = Counter[BufferOwner | None]()
    for piece in pieces:
        buffered_bytes[piece.part.owner] += piece.part.target.nbytes if piece.part.owner else 0
    unfilled = PendingOwners(piece.part.owner for piece in pieces)
    reading: deque[tuple[_Piece, Future[bytes]]] = deque()
    begun: set[BufferOwner | None] = {None}

    def first_read() -> tuple[_Piece, bytes]:
        piece, future = reading.popleft()
        read = future.result()
        if unfilled.count_filled(piece.part.owner):
            begun.remove(piece.part.owner)
        return piece, read

    for piece in pieces:
        part, owner = piece.part, piece.part.owner
        if owner not in begun:
            # Weights in memory twice are bounded: the oldest are waited for and packed first.
            while len(begun) > 1 and (
                sum(buffered_bytes[one] for one in (*begun, owner)) > BUFFERED_BYTES
            ):
                yield first_read()
            begun.add(owner)
        while len(reading) >= _MAX_PIECES:
            yield first_read()
        # A list is passed, and emptied: a thread keeps what it was passed for a moment after its
        # result is known, and a weight that is packed by then would stay in memory.
        holder = [replace(piece, part=LoadedSlice(part.memory(), part.index))]
        reading.append((piece, threads.submit(reader.fill, holder)))
    while reading:
        yield first_read()


def check_weights(
    folder: Path, entries: Entries, names: TensorNames
) -> dict[str, CheckpointTensor]:
    """Check all that can be known of a checkpoint without reading its weights; fills nothing.

    Returns:
        All tensors of `entries`, each with the shape it should have, in the order of the files.

    Raises:
        ModelFileError: see `load_weights`.
    """
    found: dict[str, CheckpointTensor] = {}
    for stored in stored_tensors(folder, lambda name: names(name) is not None):
        where = f"{stored.path}: tensor {quoted(stored.name)}"
        name = names(stored.name) or ""
        entry = entries.get(name)
        if entry is None:
            is_bias = name.endswith(".bias") and len(stored.shape) == 1
            if is_bias and not any(stored.read(0, stored.num_bytes)):
                continue  # AutoGPTQ wrote one for every layer
            raise ModelFileError(f"{where} is not part of this model by its settings")
        if stored.shape != entry.shape:
            shapes = f"{list(stored.shape)}, and by the model's settings {list(entry.shape)}"
            raise ModelFileError(f"{where} has shape {shapes}: are they of another model?")
        if _DTYPES.get(stored.dtype) not in ([entry.dtype] if entry.dtype else FLOATS.values()):
            raise ModelFileError(_wrong_dtype(where, stored.dtype, entry.dtype))
        if name in found:
            raise ModelFileError(
                f"{where} and {quoted(found[name].name)} are both the same tensor of the model: "
                "download the model again"
            )
        found[name] = stored
    missing = sorted(entries.keys() - found.keys())
    if missing:
        raise ModelFileError(
            f"{folder}: {len(missing)} of {len(entries)} tensors are missing, "
            f"e.g. {missing[0]!r}: are its settings of another model?"
            + (" tie_word_embeddings would make the embedding the head" * (missing == [HEAD]))
        )
    return found


def _wrong_dtype(where: str, dtype: str, needed: torch.dtype | None) -> str:
    if needed is not None:
        name = next(name for name, known in _DTYPES.items() if known == needed)
        return f"{where} is {dtype}, and {name} is needed: are its settings of another model?"
    return (
        f"{where} is {dtype}, and one of {', '.join(FLOATS)} is needed: by config.json it is not "
        "quantized"
    )


def _pieces(stored: CheckpointTensor, entry: TensorEntry) -> Iterator[_Piece]:
    for part in entry.parts:
        assert part.target.shape == torch.empty(entry.shape, device="meta")[part.index].shape
        if part.target.numel():
            yield from _cut(_Piece(stored, stored.offset, entry.shape, part, entry.offset))


def _cut(whole: _Piece) -> Iterator[_Piece]:
    """The rows that a rank keeps, as pieces that fit the buffer."""
    if not whole.shape:
        yield whole
        return
    num_rows, *row_shape = whole.shape
    kept = whole.part
    start, stop, _ = kept.index[0].indices(num_rows) if kept.index else (0, num_rows, 1)
    shape, inner = tuple(row_shape), kept.index[1:]
    row_bytes = math.prod(shape) * whole.dtype.itemsize
    if row_bytes > PIECE_BYTES:
        for row in range(start, stop):
            offset = whole.file_offset + row * row_bytes
            part = LoadedSlice(kept.target[row - start], inner, kept.buffer)
            yield from _cut(replace(whole, file_offset=offset, shape=shape, part=part))
        return
    step = PIECE_BYTES // row_bytes
    for row in range(start, stop, step):
        count = min(step, stop - row)
        offset = whole.file_offset + row * row_bytes
        target = kept.target[row - start : row - start + count]
        part = LoadedSlice(target, (slice(None), *inner), kept.buffer)
        yield replace(whole, file_offset=offset, shape=(count, *shape), part=part)


class _Reader(ExitStack):
    """Open files, and a buffer per thread."""

    def __init__(self, paths: Iterable[Path]) -> None:
        super().__init__()
        self._local = threading.local()
        self._files = {path: self.enter_context(path.open("rb", buffering=0)) for path in paths}

    @torch.inference_mode()  # each thread has its own mode
    def fill(self, holder: list[_Piece]) -> bytes:
        """Read the one piece in a list into its target; returns the xxh3-128 of what was read."""
        piece = holder.pop()
        target, shape = piece.part.target, piece.shape
        is_whole = math.prod(shape) == target.numel()
        is_same = target.dtype == piece.dtype and target.device.type == "cpu" and not piece.add
        if is_whole and is_same and target.is_contiguous():
            digest = self._read(piece, target.view(-1).view(torch.uint8))
            _check_range(piece, target)
            return digest
        num_bytes = math.prod(shape) * piece.dtype.itemsize
        buffer = self._buffer(pinned=target.is_cuda)[:num_bytes]
        digest = self._read(piece, buffer)
        values = buffer.view(piece.dtype)
        _check_range(piece, values)
        values = values.view(shape)[piece.part.index]
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
                count = os.preadv(self._files[path].fileno(), [view], offset)
            except OSError as error:
                raise ModelFileError(f"{path}: {error.strerror}, at byte {offset}") from None
            if count == 0:
                raise ModelFileError(f"{path} became shorter while it was read, at byte {offset}")
            view, offset = view[count:], offset + count
        return xxhash.xxh3_128_digest(memory.numpy().data)  # while a cache still has them


def _check_range(piece: _Piece, values: Tensor) -> None:
    """Refuse numbers that no request could be answered with, in what was read of a tensor.

    Raises ModelFileError: they are not finite, or would not be in the parameter's dtype.
    """
    if not values.is_floating_point():
        return
    limit, target = torch.finfo(values.dtype).max, piece.part.target.dtype
    target_limit = torch.finfo(target).max if target.is_floating_point else limit
    if are_within(values, min(limit, target_limit)):
        return
    where = f"{piece.stored.path}: tensor {quoted(piece.stored.name)} has"
    if are_within(values, limit):
        raise ModelFileError(
            f"{where} numbers beyond {target_limit:g}, the largest of --dtype "
            f"{str(target).removeprefix('torch.')}: use "
            f"{'bfloat16 or ' * (target is torch.float16)}float32"
        )
    raise ModelFileError(f"{where} NaN or infinity: download the model again, or take another")
