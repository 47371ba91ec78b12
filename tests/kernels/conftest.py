"""The native backends, one for each instruction set that is compiled and can run here."""

from __future__ import annotations

import fcntl
import os

import pytest

from nanocore.kernels.cpu import library
from nanocore.kernels.cpu.build import INSTRUCTION_SETS
from nanocore.kernels.cpu.cpu_backend import CpuKernels
from tests.kernels.cpu_case import (
    EMULATED_DOT,
    backend,
    compiler,
    finish_compiling,
    runnable_libraries,
    start_compiling,
)


@pytest.fixture(scope="session")
def emulated_dot(tmp_path_factory: pytest.TempPathFactory) -> CpuKernels:
    """The code around bfloat16's dot product, compiled here, with the product in software."""
    widest = next((n for n in runnable_libraries() if n != "avx512_bf16"), None)
    if compiler() is None or widest is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # the first worker compiles it for all
        folder = folder.parent
    path = folder / "emulated_dot.so"
    with (folder / "emulated_dot.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            finish_compiling(start_compiling(path, widest, "-DNANOCORE_EMULATE_DOT"))
    return CpuKernels(library.Library(str(path), EMULATED_DOT))


@pytest.fixture(scope="session", params=[*INSTRUCTION_SETS, EMULATED_DOT])
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    if request.param == EMULATED_DOT:
        return request.getfixturevalue("emulated_dot")
    return backend(request.param)
