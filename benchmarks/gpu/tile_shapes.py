"""Tile shapes of attention and of products: those that the code chooses, and others beside them.

A measurement is one launch at a real shape. Each candidate takes the place of what the code would
choose, is checked against the first one that ran, and is timed with a cold L2. A candidate that
does not compile or needs more shared memory than there is has an error text among the figures. A
candidate whose result is wrong makes the measurement an error.

Kernels of all candidates are compiled by the set `tiles` of tests/kernels/triton/dry_run.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import astuple, dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu.attention_cases import Heads, Seqs, Step, groups, make_step
from benchmarks.gpu.kernels import MAX_ERROR, draw, kernels_of
from benchmarks.gpu.results import Measurements, Results, Session, UnavailableError
from benchmarks.gpu.shapes import Model, models
from benchmarks.gpu.timing import synchronize, time_call
from nanocore.kernels.interface import Kernels
from nanocore.kernels.linear_weight import LinearWeight
from nanocore.kernels.triton import gate, grouped_linear, matmul, paged_attention
from nanocore.kernels.triton.decode_attention import DecodeTiles
from nanocore.kernels.triton.grouped_linear import GroupedTile
from nanocore.kernels.triton.grouped_packing import GroupedLinear
from nanocore.kernels.triton.matmul import Tile
from nanocore.kernels.triton.paged_attention import PrefillTiles

NUM_CALLS: Final = 10
NUM_REPLAYS: Final = 5

Shape = PrefillTiles | DecodeTiles | Tile | GroupedTile
Sizes = tuple[tuple[int, ...], ...]

PREFILL: Final[Sizes] = (
    (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3),
    (64, 128, 4, 2), (64, 128, 4, 3), (64, 64, 4, 2), (64, 64, 4, 4), (128, 64, 4, 3),
    (128, 32, 8, 4),
)  # fmt: skip
"""Fields of `PrefillTiles`."""

DECODE: Final[Sizes] = (
    (64, 4, 5, 3), (64, 4, 5, 2), (64, 4, 3, 5), (64, 4, 3, 3), (128, 4, 3, 3), (128, 8, 3, 3),
    (32, 4, 7, 4), (64, 2, 5, 3), (64, 8, 5, 3), (32, 2, 7, 4), (32, 4, 5, 5), (64, 4, 7, 2),
)  # fmt: skip
"""Fields of `DecodeTiles`; of bfloat16, a multiprocessor's shared memory holds all its programs."""

DECODE_QUANTIZED: Final[Sizes] = (
    (64, 4, 5, 3), (64, 4, 5, 4), (64, 4, 5, 1), (64, 4, 7, 2), (64, 4, 3, 4), (64, 8, 5, 2),
    (64, 2, 5, 4), (128, 4, 5, 2), (128, 4, 3, 3), (128, 8, 5, 2), (128, 8, 3, 2), (32, 4, 5, 4),
    (32, 4, 7, 2), (32, 2, 7, 4),
)  # fmt: skip
"""The same of quantized caches, half as large, whose numbers are converted."""

INT8: Final[dict[str, dict[int, Sizes]]] = {
    "linear": {
        256: (
            (128, 64, 64, 8, 3), (128, 64, 128, 4, 3), (128, 64, 128, 8, 3), (64, 64, 128, 4, 4),
            (128, 128, 128, 8, 3), (256, 64, 64, 8, 3), (256, 32, 64, 8, 4), (256, 32, 128, 8, 3),
            (64, 128, 64, 4, 4), (128, 32, 128, 4, 4), (64, 32, 128, 4, 5),
        ),
        32: (
            (32, 16, 256, 4, 5), (32, 32, 256, 4, 4), (32, 32, 256, 8, 4), (32, 64, 128, 4, 4),
            (32, 64, 256, 4, 3), (32, 32, 128, 2, 5), (32, 32, 128, 4, 5), (32, 128, 128, 4, 3),
            (32, 16, 128, 4, 6), (32, 16, 256, 2, 5),
        ),
        1: ((16, 16, 256, 4, 5), (16, 16, 256, 2, 5), (16, 32, 128, 4, 6), (16, 32, 256, 8, 4)),
        64: ((64, 32, 128, 4, 5), (64, 64, 128, 4, 4), (64, 16, 256, 4, 4), (32, 32, 128, 4, 5)),
    },
    "gated_linear": {
        256: (
            (128, 64, 128, 8, 2), (64, 64, 128, 4, 3), (64, 64, 64, 4, 4), (128, 128, 64, 8, 3),
            (256, 64, 64, 8, 3), (256, 32, 64, 8, 4), (256, 32, 128, 8, 2), (128, 32, 128, 4, 3),
            (128, 32, 64, 4, 4), (128, 64, 64, 4, 3), (64, 128, 64, 8, 3),
        ),
        32: (
            (32, 32, 128, 4, 4), (32, 32, 256, 4, 3), (32, 16, 256, 4, 3), (32, 16, 256, 4, 4),
            (32, 32, 256, 8, 3), (32, 64, 128, 4, 3), (32, 64, 128, 8, 4), (32, 32, 128, 2, 4),
            (32, 16, 128, 4, 5), (32, 64, 256, 8, 3),
        ),
        1: ((16, 32, 128, 4, 4), (16, 16, 256, 4, 4), (16, 32, 256, 4, 3), (16, 32, 256, 8, 4)),
        64: ((64, 32, 128, 4, 4), (64, 64, 128, 4, 3), (64, 16, 256, 4, 3), (32, 32, 128, 4, 4)),
    },
}  # fmt: skip
"""Fields of `Tile`, by kernel and rows. There is no split of the input: sums are in order."""

INT4: Final[dict[int, Sizes]] = {
    1: (
        (16, 16, 1, 6), (16, 16, 1, 8), (16, 32, 2, 5), (16, 32, 2, 8), (16, 32, 1, 6),
        (16, 64, 4, 5), (16, 64, 2, 5),
    ),
    32: (
        (32, 32, 2, 5), (32, 16, 1, 6), (32, 16, 1, 8), (32, 32, 2, 8), (32, 64, 4, 4),
        (32, 64, 4, 6), (32, 64, 2, 4), (32, 128, 8, 4), (32, 128, 4, 4), (16, 32, 2, 6),
    ),
    256: (
        (64, 128, 8, 3), (128, 128, 8, 3), (128, 64, 4, 4), (64, 64, 4, 4), (128, 128, 4, 3),
        (256, 64, 8, 3), (128, 64, 8, 3), (64, 128, 4, 3), (32, 64, 4, 5),
    ),
}  # fmt: skip
"""Fields of `GroupedTile`, by rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileCase:
    """One launch, and the tile shapes to try.

    module, chooser: the function that the launch asks for a shape, and where it looks it up.
    make: operands. run: the launch. others: calls of other implementations of the same, by name.
    """

    name: str
    module: ModuleType
    chooser: str
    shapes: tuple[Shape, ...]
    make: Callable[[Kernels], Any]
    run: Callable[[Kernels, Any], Tensor]
    others: dict[str, Callable[[Kernels, Any], Tensor]] = field(default_factory=dict)

    def choosing(self, shape: Shape) -> AbstractContextManager[Any]:
        """Context in which launches get this shape."""
        return mock.patch.object(self.module, self.chooser, return_value=shape)

    def chosen(self, kernels: Kernels, operands: Any) -> Shape:
        """Return the shape that the code chooses today, even if its launch fails."""
        choose, found = getattr(self.module, self.chooser), list[Shape]()

        def note(*args: Any, **named: Any) -> Shape:
            found.append(choose(*args, **named))
            return found[-1]

        with mock.patch.object(self.module, self.chooser, note), suppress(Exception):
            self.run(kernels, operands)
        assert found, f"{self.name}: the launch asks no {self.chooser}"
        return found[0]

    def candidates(self, kernels: Kernels, operands: Any) -> dict[str, Shape]:
        """Return the shape of today, then the others, by their names."""
        shapes = self.chosen(kernels, operands), *self.shapes
        return {shape_name(shape): shape for shape in shapes}


@dataclass(frozen=True, slots=True)
class Product:
    """Operands of a layer. dense: its weight in x's dtype."""

    x: Tensor
    weight: LinearWeight
    dense: LinearWeight


def measure(results: Results, _part: str) -> None:
    """All cases; the most telling ones first, in case the time does not suffice for all."""
    with torch.inference_mode():
        results.run(measurements(results))


def measurements(results: Results) -> Measurements:
    """By name."""
    kernels = kernels_of(results.session)
    return {
        case.name: partial(measure_case, results.session, kernels, case)
        for case in cases(results.session)
    }


def cases(session: Session) -> Iterator[TileCase]:
    """Prompts; int8 at the rows that matter most; int4; decodes; then the other rows of int8."""
    large, small = models(session)[::-1]
    yield from _prefill_cases(session)
    for rows in (256, 32):
        yield from _product_cases(session, large, "int8", rows)
    yield from _product_cases(session, small, "int8", 256)
    for model in (large, small):
        for rows in (32, 256, 1):
            yield from _product_cases(session, model, "int4", rows)
    yield from _decode_cases(session)
    for rows in (1, 64):
        yield from _product_cases(session, large, "int8", rows)


def measure_case(session: Session, kernels: Kernels, case: TileCase) -> dict[str, Any]:
    """Microseconds and error of each candidate, and which is the fastest.

    Raises:
        AssertionError: a result is wrong.
        UnavailableError: no Triton kernels run here.
    """
    if kernels.name != "triton":
        raise UnavailableError("tile shapes are those of Triton's kernels")
    gc.collect()
    if session.on_gpu:
        torch.cuda.empty_cache()
    operands = case.make(kernels)
    shapes = case.candidates(kernels, operands)
    expected: Tensor | None = None
    found: dict[str, dict[str, Any]] = {}
    for name, shape in shapes.items():
        with case.choosing(shape):
            try:
                out = case.run(kernels, operands).float()
                expected = out if expected is None else expected
                error = float((out - expected).norm() / expected.norm())
                found[name] = _timed(session, partial(case.run, kernels, operands))
                found[name]["error"] = error
            except Exception as refusal:  # too much shared memory, or the compiler's refusal
                found[name] = _refused(session, refusal)
    others: dict[str, Any] = {}
    for name, run in case.others.items():
        try:
            others[name] = _timed(session, partial(run, kernels, operands))
        except Exception as refusal:
            others[name] = _refused(session, refusal)
    return _figures(found, others)


def shape_name(shape: Shape) -> str:
    """Its numbers, in the order of its fields."""
    return ",".join(str(number) for number in astuple(shape))


def _figures(found: dict[str, dict[str, Any]], others: dict[str, Any]) -> dict[str, Any]:
    """Return a record of candidates, of which the first is the code's choice, fastest first."""
    us = _medians(found)
    if not us:
        raise RuntimeError(f"no candidate ran: {found}")
    fastest, today = next(iter(us)), next(iter(found))
    figures = {
        "fastest": fastest,
        "today": today,
        "us": {"today": us[today], **us} if today in us else us,
        "others_us": _medians(others),
        "candidates": found,
        "others": others,
    }
    wrong = {name: each["error"] for name, each in found.items() if "error" in each}
    wrong = {name: error for name, error in wrong.items() if not error <= MAX_ERROR}  # NaN is not
    if wrong:
        raise AssertionError(f"wrong by {wrong}; {figures}")
    return figures


def _medians(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the median microseconds of what ran, fastest first."""
    us = {name: float(each["us"]["median"]) for name, each in found.items() if "us" in each}
    return dict(sorted(us.items(), key=lambda item: item[1]))


def _timed(session: Session, call: Callable[[], Tensor]) -> dict[str, Any]:
    """Spread of microseconds, without its single values."""
    timed = time_call(call, session.device, NUM_CALLS, NUM_REPLAYS)
    us = {name: value for name, value in timed["us"].items() if name != "values"}
    return {"us": us, "method": timed["method"]}


def _refused(session: Session, refusal: Exception) -> dict[str, Any]:
    """Text of an error that the others are measured after, if the device is not lost."""
    synchronize(session.device)
    return {"failed": f"{type(refusal).__name__}: {str(refusal)[:200]}"}


def _prefill_cases(session: Session) -> Iterator[TileCase]:
    """Prompts of each group of heads, and a chunk at the end of a long context."""
    unit, rows = (16, 2) if session.small else (1024, 16)
    heads = groups(session)
    first, last = next(iter(heads)), list(heads)[-1]
    long: Seqs = [(4 * unit, 4 * unit)] * min(4, rows)
    steps = {
        f"{first}/{len(long)}x{4 * unit}": (heads[first], long),
        f"{first}/{rows}x{unit}": (heads[first], [(unit, unit)] * rows),
        f"{last}/{len(long)}x{4 * unit}": (heads[last], long),
        f"{last}/{unit // 16 + 1} of {64 * unit}": (heads[last], [(64 * unit, unit // 16 + 1)]),
    }
    shapes = tuple(PrefillTiles(*sizes) for sizes in PREFILL)
    for name, (its_heads, seqs) in steps.items():
        yield _attention_case(session, f"prefill/{name}", "prefill_tiles", shapes, its_heads, seqs)


def _decode_cases(session: Session) -> Iterator[TileCase]:
    """One query token for each sequence, heads of group 2."""
    unit, most = (16, 3) if session.small else (1024, 256)
    group, heads = next(iter(groups(session).items()))
    some, quantized = min(32, most), "int8" if session.small else "fp8"
    steps = [(some, unit, "auto"), (1, unit, "auto"), (most, unit, "auto")]
    steps += [(some, 8 * unit, "auto"), (some, unit, quantized), (most, unit, quantized)]
    for rows, context, kv in steps:
        shapes = tuple(DecodeTiles(*s) for s in (DECODE if kv == "auto" else DECODE_QUANTIZED))
        name = f"decode/{group}/b{rows}/ctx{context}" + ("" if kv == "auto" else f"/{kv}")
        seqs = [(context, 1)] * rows
        yield _attention_case(session, name, "decode_tiles", shapes, heads, seqs, kv)


def _attention_case(
    session: Session, name: str, chooser: str, shapes: tuple[Shape, ...], heads: Heads, seqs: Seqs,
    kv: str = "auto",
) -> TileCase:  # fmt: skip
    """Make a case; each call makes the step's plan anew, as those of `attention` do."""

    def make(_: Kernels) -> Step:
        return make_step(session, heads, seqs, kv=kv)

    def run(kernels: Kernels, step: Step) -> Tensor:
        return kernels.paged_attention(*step.operands())

    return TileCase(
        name=f"tiles/{name}",
        module=paged_attention,
        chooser=chooser,
        shapes=shapes[:2] if session.small else shapes,
        make=make,
        run=run,
    )


def _product_cases(session: Session, model: Model, form: str, rows: int) -> Iterator[TileCase]:
    """Both layers of an MLP. form: of their weights, int8 or int4."""
    hidden, inner = model.shape.hidden_size, model.shape.intermediate_size
    yield _product_case(session, model, form, "linear", (rows, hidden, inner))
    yield _product_case(session, model, form, "gated_linear", (rows, 2 * inner, hidden))


def _product_case(
    session: Session, model: Model, form: str, kernel: str, sizes: tuple[int, int, int]
) -> TileCase:
    """Make a case. kernel: a method of Kernels. sizes: rows, outputs, inputs."""
    rows, num_out, num_in = sizes
    shapes: tuple[Shape, ...]
    if form == "int8":
        shapes = tuple(Tile(*numbers) for numbers in INT8[kernel][rows])
    else:
        shapes = tuple(GroupedTile(*numbers) for numbers in INT4[rows])

    def make(kernels: Kernels) -> Product:
        plain = _in_half(session, draw(session, num_out, num_in, std=num_in**-0.5))
        x = _in_half(session, draw(session, rows, num_in))
        return Product(x, kernels.pack_linear(plain, form), kernels.pack_linear(plain, None))

    def run(kernels: Kernels, s: Product) -> Tensor:
        out: Tensor = getattr(kernels, kernel)(s.x, s.weight)
        return out

    def dense(kernels: Kernels, s: Product) -> Tensor:
        out: Tensor = getattr(kernels, kernel)(s.x, s.dense)
        return out

    def by_cublas(_: Kernels, s: Product) -> Tensor:
        assert isinstance(s.weight, GroupedLinear)
        out = grouped_linear.by_cublas(s.x, s.weight, None, s.x.dtype)
        return gate.gated(out, "silu") if kernel == "gated_linear" else out

    has_cublas = form == "int4" and rows == 256
    return TileCase(
        name=f"tiles/{form}/{kernel}/{model.name}/{rows}",
        module=matmul if form == "int8" else grouped_linear,
        chooser="choose_tile",
        shapes=shapes[:2] if session.small else shapes,
        make=make,
        run=run,
        others={"dense": dense} | ({"by_cublas": by_cublas} if has_cublas else {}),
    )


def _in_half(session: Session, drawn: Tensor) -> Tensor:
    """The same in half precision: in float32 products have a tile that nobody chooses."""
    return drawn if session.on_gpu else drawn.half()
