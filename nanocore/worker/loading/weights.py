"""Where a checkpoint's tensors go: the contract between models and the loader.

A model names every tensor its checkpoint must hold, with its whole shape, and says which slices of
it this rank keeps and where. The loader reads those slices and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from torch import Tensor

Index = tuple[slice, ...]
"""Along the leading dimensions, with explicit bounds; the rest is taken whole."""


@dataclass(frozen=True, slots=True)
class Part:
    """A slice of a checkpoint's tensor, and the view of a parameter that it fills."""

    target: Tensor
    index: Index


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a checkpoint.

    shape: of the whole tensor. parts: what this rank keeps of it; empty if nothing.
    offset: added to what the file holds (Gemma stores norm weights less one).
    """

    shape: tuple[int, ...]
    parts: list[Part] = field(default_factory=list)
    offset: float = 0.0


Entries = dict[str, Entry]
"""By checkpoint tensor name, in the order of the model."""


EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
POSITIONS: Final = "model.embed_positions.weight"

TensorNames = Callable[[str], str | None]
"""From a checkpoint's name of a tensor to that in `Entries`; None if it is not to be read."""


def without_parts(entries: Entries) -> Entries:
    """The same tensors, of which this rank keeps nothing."""
    return {name: replace(entry, parts=[]) for name, entry in entries.items()}


def whole(target: Tensor, offset: float = 0.0) -> Entry:
    """A tensor that every rank keeps whole, in target; offset: see `Entry`."""
    return Entry(tuple(target.shape), [Part(target, ())], offset)


def transposed(entry: Entry) -> Entry:
    """The same matrix where a checkpoint holds it with rows and columns exchanged."""
    num_rows, num_columns = entry.shape
    parts = []
    for part in entry.parts:
        missing = (slice(0, num_rows), slice(0, num_columns))[len(part.index) :]
        parts.append(Part(part.target.t(), (*part.index, *missing)[::-1]))
    return replace(entry, shape=(num_columns, num_rows), parts=parts)
