"""Candidates of tile shapes are launched, compared and timed; a wrong one is an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import timing
from benchmarks.gpu.product_cases import product_cases
from benchmarks.gpu.results import Session, UnavailableError
from benchmarks.gpu.tile_shapes import TileCase, cases, measure_case
from nanocore.kernels.interface import Kernels
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.kernels.triton.grouped_packing import GroupedLinear
from nanocore.kernels.triton.paged_attention import PrefillTiles
from nanocore.kernels.triton.triton_backend import TritonKernels

CPU: Final = torch.device("cpu")
TODAY, FAST, SLOW = (
    PrefillTiles(64, 64, 4, 3),
    PrefillTiles(64, 32, 4, 4),
    PrefillTiles(128, 64, 8, 3),
)
US: Final = {TODAY: 20.0, FAST: 10.0, SLOW: 30.0}


class FakeLaunch:
    """A launch whose shape decides how long it takes, whether it is refused, and its error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_us = 0.0
        self.errors: dict[PrefillTiles, float] = {}
        self.refused: set[PrefillTiles] = set()
        self.module = ModuleType("launching")
        self.module.choose = lambda _rows: TODAY  # type: ignore[attr-defined]
        monkeypatch.setattr(timing, "_clock_us", self._clock_us)

    def case(self) -> TileCase:
        return TileCase(
            name="tiles/x",
            module=self.module,
            chooser="choose",
            shapes=(SLOW, TODAY, FAST),
            make=lambda _: torch.ones(8),
            run=self._run,
            others={"other": lambda _, x: self._take(x, 40.0), "broken": self._break},
        )

    def _run(self, _: Kernels, x: Tensor) -> Tensor:
        shape = self.module.choose(len(x))
        if shape in self.refused:
            raise RuntimeError("out of resource: shared memory")
        return self._take(x + self.errors.get(shape, 0.0), US[shape])

    def _take(self, x: Tensor, us: float) -> Tensor:
        self.now_us += us
        return x

    def _break(self, _: Kernels, _x: Tensor) -> Tensor:
        raise RuntimeError("no such shape")

    def _clock_us(self, call: Callable[[], Any]) -> float:
        start_us = self.now_us
        call()
        return self.now_us - start_us


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> FakeLaunch:
    return FakeLaunch(monkeypatch)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(folders=(tmp_path,), device=CPU, small=True)


def test_candidates_stand_beside_what_the_code_chooses(
    launch: FakeLaunch, session: Session
) -> None:
    figures = measure_case(session, TritonKernels(CPU), launch.case())
    assert (figures["today"], figures["fastest"]) == ("64,64,4,3", "64,32,4,4")
    assert figures["us"] == {
        "today": 20.0,
        "64,32,4,4": 10.0,
        "64,64,4,3": 20.0,
        "128,64,8,3": 30.0,
    }
    assert [*figures["us"]] == ["today", "64,32,4,4", "64,64,4,3", "128,64,8,3"], "fastest first"
    assert figures["others_us"] == {"other": 40.0}
    assert figures["others"]["broken"] == {"failed": "RuntimeError: no such shape"}
    assert {each["error"] for each in figures["candidates"].values()} == {0.0}


@pytest.mark.parametrize("refused", [TODAY, SLOW])
def test_a_shape_that_is_refused_is_no_error_of_the_others(
    launch: FakeLaunch, session: Session, refused: PrefillTiles
) -> None:
    """The others are compared with the first one that ran, and the code's choice is named."""
    launch.refused = {refused}
    figures = measure_case(session, TritonKernels(CPU), launch.case())
    name = ",".join(map(str, astuple(refused)))
    text = "RuntimeError: out of resource: shared memory"
    assert figures["candidates"][name] == {"failed": text}
    assert (figures["today"], figures["fastest"]) == ("64,64,4,3", "64,32,4,4")
    assert name not in figures["us"]
    launch.refused = {TODAY, FAST, SLOW}
    with pytest.raises(RuntimeError, match="no candidate ran"):
        measure_case(session, TritonKernels(CPU), launch.case())


@pytest.mark.parametrize("error", [0.5, float("nan")])
def test_a_wrong_candidate_is_an_error_with_all_times(
    launch: FakeLaunch, session: Session, error: float
) -> None:
    launch.errors = {FAST: error, SLOW: 1e-3}
    with pytest.raises(AssertionError, match=rf"wrong by {{'64,32,4,4': {error}}}; .*'us'"):
        measure_case(session, TritonKernels(CPU), launch.case())


def test_other_backends_have_no_tiles(launch: FakeLaunch, session: Session) -> None:
    with pytest.raises(UnavailableError):
        measure_case(session, TorchKernels(), launch.case())


def test_every_launch_asks_for_its_shape_and_gets_it(session: Session) -> None:
    """One of each kind, in the interpreter: what is patched is what launches look up."""
    kernels = TritonKernels(CPU)
    kinds = ("tiles/decode/g2/b1/", "tiles/int8/linear/tiny/256", "tiles/int4/linear/tiny/1")
    found = [case for case in cases(session) if case.name.startswith(kinds)]
    assert len(found) == len(kinds)
    with torch.inference_mode():
        for case in found:
            operands = case.make(kernels)
            shapes = case.candidates(kernels, operands)
            assert len({*map(type, shapes.values())}) == 1
            *_, last = shapes.values()
            with case.choosing(last):
                assert case.chosen(kernels, operands) == last


def test_on_a_gpu_each_case_has_many_candidates_and_none_twice(tmp_path: Path) -> None:
    session = Session(folders=(tmp_path,), device=torch.device("cuda"))
    found = list(cases(session))
    assert len({case.name for case in found}) == len(found)
    assert all(len({*case.shapes}) == len(case.shapes) >= 4 for case in found)
    kinds = [case.name.split("/")[1] for case in found]
    assert list(dict.fromkeys(kinds)) == ["prefill", "int8", "int4", "decode"]


def test_products_of_the_triton_backend_have_the_weight_that_it_packed(session: Session) -> None:
    """It is a subclass of torch's, whose weight would be multiplied by a dense product."""
    kernels = TritonKernels(CPU)
    for case in product_cases(session):
        if case.name.startswith("products/linear/tiny/") and case.name.endswith("/int4"):
            operands = case.make(kernels)
            assert isinstance(operands.weight_for(kernels), GroupedLinear)
            assert not isinstance(operands.weight_for(TorchKernels()), GroupedLinear)
            return
    pytest.fail("no product of int4")
