"""The matrix unit: software that stands for it has its bits, and without it results have others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels import cpu_case
from tests.kernels.cpu_case import EMULATED_AMX

REPOSITORY = Path(__file__).parents[2]
AVX512_BF16 = "avx512_bf16"


def fingerprint(library_path: str, uses_amx: bool) -> str:
    """A digest of results in a process of its own, which asks for the unit once."""
    environment = os.environ | {
        "NANOCORE_CPU_AMX": str(int(uses_amx)),
        "PYTHONPATH": str(REPOSITORY),
    }
    script = str(Path(__file__).with_name("amx_fingerprint.py"))
    return subprocess.run(
        [sys.executable, script, library_path],
        check=True, capture_output=True, text=True, env=environment,
    ).stdout.strip()  # fmt: skip


@pytest.fixture(scope="module")
def with_amx() -> str:
    found = cpu_case.runnable_libraries().get(AVX512_BF16)
    if found is None or not found.call("uses_amx"):
        pytest.skip("this machine has no AMX")
    return found.path


@pytest.mark.parametrize("kernels", [EMULATED_AMX], indirect=True)
def test_software_that_stands_for_the_matrix_unit_has_its_bits(
    kernels: cpu_case.CpuKernels, with_amx: str
) -> None:
    assert fingerprint(kernels.library.path, True) == fingerprint(with_amx, True)


def test_without_the_matrix_unit_results_have_other_bits_and_another_name(with_amx: str) -> None:
    assert fingerprint(with_amx, True) != fingerprint(with_amx, False)
    assert "avx512_bf16 and AMX" in cpu_case.backend(AVX512_BF16).variant
