"""How the CPU kernels are compiled, and what the libraries are called.

Read by setup.py, which has nothing of nanocore but this file, and by `library`, which looks for
what it made. One source for all: what an instruction set lacks is decided by the compiler's macros.
"""

from __future__ import annotations

import platform
from typing import Final

_AVX512: Final = (
    "-mavx2",
    "-mfma",
    "-mf16c",
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mprefer-vector-width=512",
)

_X86: Final = {
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
    "avx512": _AVX512,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
}

INSTRUCTION_SETS: Final[dict[str, tuple[str, ...]]] = {
    **(_X86 if platform.machine() in ("x86_64", "AMD64") else {}),
    "plain": (),
}
"""Compiler flags by name, the best first."""


def library_name(instruction_set: str) -> str:
    """Name of its file beside this one: no Python is in it, so no Python is in its name."""
    return f"_{instruction_set}.so"


COMPILE_FLAGS: Final = (
    "-std=c++20",
    "-O3",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-g0",  # Python's own flags ask for debug information: ten times the size, and paths
)
LINK_FLAGS: Final = ("-pthread",)
