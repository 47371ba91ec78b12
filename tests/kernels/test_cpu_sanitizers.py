"""The native kernels under AddressSanitizer and UBSan, and their threads under ThreadSanitizer.

Compiled here, in the background of each other; skipped where there is no GCC, or no sanitizers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kernels.cpu_case import (
    EMULATED_AMX,
    EMULATION,
    SOURCE,
    compiler,
    finish_compiling,
    runnable_libraries,
    start_command,
    start_compiling,
    stop_compiling,
)

pytestmark = pytest.mark.campaign

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

Compiled = Callable[[str], Path]


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
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiled]:
    folder = tmp_path_factory.mktemp("sanitized")
    # Without optimization it is compiled in half the time, which is most of it.
    memory = "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O0"
    running = {}
    for name, instruction_set in LIBRARIES.items():
        stands_in = EMULATION if name == EMULATED_AMX else ()
        running[name] = start_compiling(folder / name, instruction_set, *stands_in, *memory)
    found = compiler()
    assert found is not None
    for name, (source, flags) in CHECKS.items():
        place = Path(__file__).with_name(source)
        command = [found, "-std=c++20", "-pthread", *flags, f"-I{SOURCE.parent}", str(place)]
        running[name] = start_command([*command, "-o", str(folder / name)])
    finished = set()

    def finish(name: str) -> Path:
        if name not in finished:
            finish_compiling(running[name])
            finished.add(name)
        return folder / name

    yield finish
    for process in (running[name] for name in running.keys() - finished):
        stop_compiling(process)
        process.communicate()  # closes the pipe, which nobody read if its test was not chosen


@needs_sanitizers
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LIBRARIES)
def test_no_kernel_leaves_its_operands(compiled: Compiled, name: str) -> None:
    library = compiled(name)
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
        [sys.executable, str(script), str(library), str(NUM_ROUNDS)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert (result.returncode, result.stdout) == (0, f"{NUM_ROUNDS} rounds\n"), result.stderr[
        -4000:
    ]


@needs_sanitizers
@pytest.mark.parametrize(("name", "num_short_loops"), [("watched", 5_000), ("fast", 800_000)])
def test_every_item_of_a_loop_runs_once_and_no_two_threads_race(
    compiled: Compiled, name: str, num_short_loops: int
) -> None:
    result = subprocess.run([compiled(name), str(num_short_loops)], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "0 wrong\n"), result.stderr[-4000:]


@needs_sanitizers
def test_ranks_that_reduce_do_not_race(compiled: Compiled) -> None:
    result = subprocess.run([compiled("ranks"), "2000"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "0 wrong\n"), result.stderr[-4000:]
