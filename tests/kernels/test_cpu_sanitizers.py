"""The native kernels under AddressSanitizer and UBSan, and their threads under ThreadSanitizer.

Compiled here, each once; skipped where there is no GCC, or no sanitizers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.cpu_case import (
    EMULATED_AMX,
    EMULATION,
    SOURCE,
    compile_file,
    compile_kernels,
    compiler,
    runnable_libraries,
)

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(func_only=True)]

REPOSITORY = Path(__file__).parents[2]
NUM_ROUNDS = 25
WIDEST = next(iter(runnable_libraries()), "plain")
LIBRARIES = {WIDEST: WIDEST, "plain": "plain", EMULATED_AMX: WIDEST}
"""Instruction sets by what is compiled: the widest and the narrowest, as the others have the same
code with other constants; and what the matrix unit reads, which only software can watch."""

WATCHED = "-O1", "-g1", "-fsanitize=thread", "-Wno-tsan"  # it knows no fences
CHECKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "watched": ("pool_check.cpp", WATCHED),
    "fast": ("pool_check.cpp", ("-O2",)),
    "ranks": ("collective_check.cpp", (*WATCHED, "-Wno-psabi")),
}
"""Checks of threads, and how they are compiled: at full speed the pool meets what is rare."""


def runtime(name: str) -> str | None:
    found = compiler()
    if found is None:
        return None
    command = [found, f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return path if os.path.isabs(path) else None


needs_sanitizers = pytest.mark.skipif(
    not runtime("libasan.so") or not runtime("libtsan.so"), reason="no GCC with its sanitizers"
)


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of the libraries or checks, named by the test's parameter."""
    path = tmp_path_factory.mktemp("sanitized") / request.param
    if request.param in CHECKS:
        source, flags = CHECKS[request.param]
        common = "-std=c++20", "-pthread", f"-I{SOURCE.parent}"
        compile_file(path, Path(__file__).with_name(source), *common, *flags)
        return path
    # Without optimization it is compiled in half the time, which is most of it.
    memory = "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O0"
    emulated = EMULATION if request.param == EMULATED_AMX else ()
    compile_kernels(path, LIBRARIES[request.param], *emulated, *memory)
    return path


@needs_sanitizers
@pytest.mark.parametrize("compiled", LIBRARIES, indirect=True)
def test_no_kernel_leaves_its_operands(compiled: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        # Beside it the C++ library, whose exceptions it wants to see.
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libstdc++.so.6')}",
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    script = Path(__file__).with_name("cpu_fuzz.py")
    result = subprocess.run(
        [sys.executable, str(script), str(compiled), str(NUM_ROUNDS)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert (result.returncode, result.stdout) == (0, f"{NUM_ROUNDS} rounds\n"), result.stderr[
        -4000:
    ]


@needs_sanitizers
@pytest.mark.parametrize(
    ("compiled", "num_short_loops"),
    [("watched", 5_000), ("fast", 800_000)],
    indirect=["compiled"],
)
def test_every_item_of_a_loop_runs_once_and_no_two_threads_race(
    compiled: Path, num_short_loops: int
) -> None:
    result = subprocess.run([compiled, str(num_short_loops)], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "0 wrong\n"), result.stderr[-4000:]


@needs_sanitizers
@pytest.mark.parametrize("compiled", ["ranks"], indirect=True)
def test_ranks_that_reduce_do_not_race(compiled: Path) -> None:
    result = subprocess.run([compiled, "2000"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "0 wrong\n"), result.stderr[-4000:]
