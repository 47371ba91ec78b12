"""The choice among kernel backends, by name, or the best that a device can run."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Final

import torch

from nanocore.kernels.cpu.cpu_backend import CpuKernels
from nanocore.kernels.cpu.library import find_library
from nanocore.kernels.interface import Kernels
from nanocore.kernels.torch.backend import TorchKernels

logger = logging.getLogger(__name__)


def select_kernels(
    name: str,
    device: torch.device,
    batch_invariant: bool = False,
    *,
    keeps_activations: bool = False,
    cores: Sequence[int] | None = None,
) -> Kernels:
    """The backend of this name; "auto" takes the best one that this device can run.

    Args:
        batch_invariant: its results for a token must not depend on the rest of the batch.
        keeps_activations: none may be quantized for the sake of a product.
        cores: on which native kernels run, see `CpuKernels`.

    Raises:
        ValueError: there is no such backend, or it cannot run here.
    """
    if name == "auto":
        name = _best(device)
    if batch_invariant and name not in ("cpu", "triton"):
        raise ValueError("its results depend on the batch; --batch-invariant needs cpu or triton")
    match name:
        case "cpu":
            return _cpu(device, keeps_activations, cores)
        case "triton" | "flash":
            return _triton(name, device, batch_invariant, keeps_activations)
        case "torch":
            return TorchKernels()
    raise ValueError(f"unknown kernel backend {name!r}; known: auto, cpu, triton, flash, torch")


def _best(device: torch.device) -> str:
    if device.type == "cuda":
        lacks, best = _triton_lacks(device), "triton"
    else:
        lacks, best = "" if find_library() is not None else _REMEDY, "cpu"
    if lacks:
        logger.warning("computing with torch, which is slower than our kernels: %s", lacks)
        return "torch"
    return best


def _cpu(device: torch.device, keeps_activations: bool, cores: Sequence[int] | None) -> Kernels:
    if device.type != "cpu":
        raise ValueError(f"the device is {device}; use auto")
    library = find_library()
    if library is None:
        raise ValueError(_REMEDY)
    # Always batch-invariant.
    return CpuKernels(library, cores, keeps_activations=keeps_activations)


def _triton_lacks(device: torch.device) -> str:
    """Why Triton's kernels cannot run on a CUDA device, or ""."""
    try:
        importlib.import_module("triton")
    except Exception as error:  # a damaged installation raises anything
        if getattr(error, "name", None) != "triton":
            return f"the package triton does not load: {error or type(error).__name__}"
        return "the package triton is not installed; pip install '.[cuda]' does it"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        return f"{device} is older than Ampere (compute capability 8.0), and has no bfloat16"
    return ""


def _triton(
    name: str, device: torch.device, batch_invariant: bool, keeps_activations: bool
) -> Kernels:
    if lacks := _triton_lacks(device):  # for flash, too: all but attention is Triton's
        raise ValueError(lacks)
    # Imported here: it takes a moment, which a CPU's start can do without.
    if name == "flash":
        from nanocore.kernels.triton.flash_backend import FlashKernels

        return FlashKernels(device, keeps_activations=keeps_activations)
    from nanocore.kernels.triton.triton_backend import TritonKernels

    return TritonKernels(device, batch_invariant, keeps_activations=keeps_activations)


_MIN_CAPABILITY: Final = (8, 0)
_REMEDY: Final = (
    "this package has no compiled kernels: install g++ if it is missing, and reinstall nanocore"
)
