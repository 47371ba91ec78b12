"""How the CPU kernels are compiled, and what the libraries are called.

Read by setup.py, which has nothing of nanocore but this file, and by `library`, which looks for
what it made. One source for all: what an instruction set lacks is decided by the compiler's macros.

The kernels take a minute or two to compile. So what a compiler made is kept in the user's cache,
by a digest of everything it was made from: another installation of the same sources, a wheel and
the tests take it from there.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
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


def runs_here(instruction_set: str) -> bool:
    """Whether this machine has it; so it is, too, where nothing says what the machine has."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    names = {name.replace("_", "") for name in found[1].split()} if found else set()
    wanted = {
        flag.removeprefix("-m") for flag in INSTRUCTION_SETS[instruction_set] if "=" not in flag
    }
    return found is None or wanted <= names


def sets_used_here() -> list[str]:
    """Return the best that this machine has; with NANOCORE_ALL_KERNELS=1, as for tests, all."""
    usable = [name for name in INSTRUCTION_SETS if runs_here(name)]
    return usable if os.environ.get("NANOCORE_ALL_KERNELS") == "1" else usable[:1]


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

MAX_AGE_S: Final = 30 * 24 * 3600
"""Cached files that nobody took for so long are deleted."""
_FORMAT: Final = 1
"""Number of the form of entries, which is part of their names."""
_DIGEST_BYTES: Final = hashlib.sha256().digest_size


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "nanocore" / "kernels"


def make_once(
    to: Path,
    make: Callable[[], object],
    source: Path,
    compiler: Sequence[str],
    linker: Sequence[str] = (),
    folder: Path | None = None,
) -> None:
    """Copy `to` from the cache, or have it made by `make` and put it there.

    A cache that cannot be used is as good as none: everything is made anew.

    Args:
        compiler: The command that `make` compiles the source with, flags included.
        linker: The command it links with, if that is another one.
        folder: The cache; None is the user's.
    """
    to.unlink(missing_ok=True)  # an older one, which `make` might find new enough
    with ExitStack() as lock:
        entry = None
        with suppress(OSError):
            key = _digest(source, compiler, linker)
            if key is not None:
                entry = lock.enter_context(_locked_entry(folder or cache_folder(), key))
        if entry is not None and _is_copied(entry, to):
            return
        make()
        if entry is not None:
            _store(to, entry)


def _digest(source: Path, compiler: Sequence[str], linker: Sequence[str]) -> str | None:
    """The SHA-256 of what the compiler is, is told and reads, all headers included.

    None: it does not compile.
    """
    digest = hashlib.sha256(repr((_FORMAT, list(compiler), list(linker))).encode())
    for question in (["--version"], ["-E", str(source)]):
        asked = subprocess.run([*compiler, *question], capture_output=True, check=False)
        if asked.returncode:
            return None
        digest.update(asked.stdout)
    return digest.hexdigest()


@contextmanager
def _locked_entry(folder: Path, key: str) -> Iterator[Path]:
    """The key's file. Whoever compiles the same waits until this process is done.

    Raises:
        PermissionError: somebody else may put files there, which would be run as ours.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise PermissionError(f"{folder} is not this user's alone")
    with (folder / f"{key}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield folder / key


def _is_copied(entry: Path, to: Path) -> bool:
    """Copy an entry if it is whole: its first bytes are the SHA-256 of the others."""
    try:
        data = entry.read_bytes()
        if hashlib.sha256(data[_DIGEST_BYTES:]).digest() != data[:_DIGEST_BYTES]:
            entry.unlink()  # a damaged library crashes whoever loads it
            return False
        to.write_bytes(data[_DIGEST_BYTES:])
        shutil.copymode(entry, to)
        os.utime(entry)
    except OSError:
        to.unlink(missing_ok=True)  # a part of it, newer than its source
        return False
    return True


def _store(made: Path, entry: Path) -> None:
    """Put it there under its name when it is whole, and delete what nobody takes any more."""
    with suppress(OSError), tempfile.TemporaryDirectory(dir=entry.parent) as place:
        data, whole = made.read_bytes(), Path(place, "whole")
        whole.write_bytes(hashlib.sha256(data).digest() + data)
        shutil.copymode(made, whole)
        os.replace(whole, entry)
        for path in entry.parent.iterdir():
            if path.is_file() and path.stat().st_mtime < time.time() - MAX_AGE_S:
                path.unlink()
