"""Which kernels are launched before the last one has ended, and where."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from triton.runtime.interpreter import InterpretedFunction

from nanocore.kernels import triton as kernels
from nanocore.kernels.triton.launch import pdl

CUDA = torch.device("cuda", 0)
AS_EVER = {"PDL": False}


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.delenv("NANOCORE_PDL", raising=False)
    pdl.cache_clear()
    yield
    pdl.cache_clear()


def test_from_hopper_on_kernels_begin_early() -> None:
    assert pdl(CUDA) == {"PDL": True, "launch_pdl": True}


def test_elsewhere_they_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pdl(torch.device("cpu")) == AS_EVER
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    assert pdl(CUDA) == AS_EVER


def test_of_several_ranks_they_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    assert pdl(CUDA) == AS_EVER


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCORE_PDL", "0")
    assert pdl(CUDA) == AS_EVER


def test_every_kernel_waits_but_the_one_behind_a_copy() -> None:
    """A step's first kernel is preceded by no kernel: there is nothing to win."""
    found = {}
    for path in Path(kernels.__file__).parent.glob("*.py"):
        module = importlib.import_module(f"{kernels.__name__}.{path.stem}")
        for name, value in vars(module).items():
            if isinstance(value, InterpretedFunction) and name.endswith("_kernel"):
                found[name] = "PDL" in value.arg_names
    assert len(found) > 15
    assert [name for name, waits in found.items() if not waits] == ["begin_step_kernel"]
