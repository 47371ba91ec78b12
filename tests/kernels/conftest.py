"""The native backends, one for each instruction set that is compiled and can run here."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch

from nanocore.kernels.cpu import library
from nanocore.kernels.cpu.build import INSTRUCTION_SETS
from nanocore.kernels.cpu.cpu_backend import CpuKernels
from tests.kernels.cpu_case import (
    EMULATED_AMX,
    EMULATED_DOT,
    EMULATION,
    backend,
    compile_kernels,
    compiler,
    runnable_libraries,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Compiling has a limit of its own: on a busy machine it takes longer than a test may.

    Stand-ins are for bfloat16 and integers: float32 takes the code of the other libraries.
    """
    for item in items:
        if "kernels" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(func_only=True))
            # Fixtures of this name elsewhere have no parameters.
            case: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
            is_plain = not case.get("quantization") and not case.get("is_quantized")
            is_emulated = case.get("kernels") in (EMULATED_DOT, EMULATED_AMX)
            if is_emulated and is_plain and case.get("dtype") == torch.float32:
                item.add_marker(pytest.mark.campaign)


def emulated(name: str, folder: Path) -> CpuKernels:
    """The code around instructions that this machine may lack, compiled here, these in software."""
    widest = next((n for n in runnable_libraries() if n != "avx512_bf16"), None)
    if compiler() is None or widest is None:
        pytest.skip("no C++ compiler")
    if not (made := folder / f"{EMULATED_AMX}.so").exists():
        compile_kernels(made, widest, *EMULATION)
        shutil.copy(made, folder / f"{EMULATED_DOT}.so")  # loaded beside the other
    path = folder / f"{name}.so"
    ctypes.CDLL(str(path)).nanocore_emulate_amx(int(name == EMULATED_AMX))
    return CpuKernels(library.Library(str(path), name))


@pytest.fixture(scope="session", params=[*INSTRUCTION_SETS, EMULATED_DOT, EMULATED_AMX])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuKernels:
    if request.param in (EMULATED_DOT, EMULATED_AMX):
        return emulated(request.param, tmp_path_factory.getbasetemp())
    return backend(request.param)
