"""What a compiler made is taken from the cache by whoever would have it make the same."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from nanocore.kernels.cpu.build import (
    INSTRUCTION_SETS,
    MAX_AGE_S,
    cache_folder,
    make_once,
    runs_here,
    sets_used_here,
)
from tests.kernels.cpu_case import runnable_libraries


class FakeCompiler:
    """A script that copies its input, and a count of what was made."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self.source = folder / "source.cpp"
        self.source.write_text("one")
        self.made = folder / "made"
        self.script = folder / "compiler"
        self.num_made = 0
        self.is_version("1")

    def is_version(self, version: str) -> None:
        self.script.write_text(
            f'#!/bin/sh\ncase "$*" in *--version) echo {version};; *-E*) cat "$0.source";; esac\n'
        )
        self.script.chmod(0o700)

    def make(self, *flags: str, linker: Sequence[str] = ()) -> None:
        read = self.source.read_text()
        self.script.with_suffix(".source").write_text(read)

        def compile_it() -> None:
            self.num_made += 1
            self.made.write_text(read)

        command = [str(self.script), *flags]
        make_once(self.made, compile_it, self.source, command, linker, self.cache)
        assert self.made.read_text() == read


@pytest.fixture
def compiler(tmp_path: Path) -> FakeCompiler:
    return FakeCompiler(tmp_path)


def test_the_same_is_made_once(compiler: FakeCompiler) -> None:
    compiler.make()
    compiler.made.write_text("an older one")
    compiler.make()
    assert compiler.num_made == 1
    assert compiler.cache.stat().st_mode & 0o777 == 0o700


def test_other_sources_flags_linkers_and_compilers_make_anew(compiler: FakeCompiler) -> None:
    compiler.make()
    compiler.make("-O3")
    compiler.make(linker=["-static"])
    compiler.source.write_text("two")
    compiler.make()
    compiler.is_version("2")
    compiler.make()
    assert compiler.num_made == 5
    compiler.make()
    assert compiler.num_made == 5


@pytest.mark.parametrize("damage", ["empty", "cut", "changed"])
def test_a_damaged_entry_is_made_anew(compiler: FakeCompiler, damage: str) -> None:
    compiler.source.write_text("long enough to be cut")
    compiler.make()
    (entry,) = [path for path in compiler.cache.iterdir() if path.suffix != ".lock"]
    whole = entry.read_bytes()
    entry.write_bytes({"empty": b"", "cut": whole[:-1], "changed": whole[:-1] + b"?"}[damage])
    compiler.make()
    assert compiler.num_made == 2
    assert entry.read_bytes() == whole


def test_a_copy_that_fails_leaves_nothing_that_looks_up_to_date(
    compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.make()

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copymode", fails)
    seen = []
    make_once(
        compiler.made,
        lambda: seen.append(compiler.made.exists()),
        compiler.source,
        [str(compiler.script)],
        folder=compiler.cache,
    )
    assert seen == [False]


def test_what_could_not_be_made_is_tried_again(compiler: FakeCompiler, tmp_path: Path) -> None:
    def fails() -> None:
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        make_once(compiler.made, fails, compiler.source, ["true"], folder=compiler.cache)
    make_once(compiler.made, lambda: None, compiler.source, ["true"], folder=compiler.cache)
    assert not [path for path in compiler.cache.iterdir() if path.suffix != ".lock"]


@pytest.mark.parametrize("mode", [None, 0o770])
def test_a_cache_that_cannot_be_used_or_trusted_is_left_alone(
    compiler: FakeCompiler, mode: int | None
) -> None:
    if mode is None:
        compiler.cache.write_text("not a folder")
    else:
        compiler.cache.mkdir()
        compiler.cache.chmod(mode)
    compiler.make()
    compiler.make()
    assert compiler.num_made == 2


def test_a_compiler_that_is_missing_is_for_the_build_to_tell(compiler: FakeCompiler) -> None:
    tried = []
    make_once(compiler.made, lambda: tried.append(1), compiler.source, ["/nowhere/compiler"])
    assert tried == [1]


def test_what_nobody_takes_any_more_is_deleted(compiler: FakeCompiler) -> None:
    compiler.make("-O2")
    long_ago = time.time() - MAX_AGE_S - 1
    for path in compiler.cache.iterdir():
        os.utime(path, (long_ago, long_ago))
    compiler.make()
    compiler.make("-O2")
    assert compiler.num_made == 3


def test_it_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder() == Path("/cache/nanocore/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/x")
    assert cache_folder() == Path("/home/x/.cache/nanocore/kernels")


def test_what_can_run_here_is_what_the_libraries_say() -> None:
    libraries = runnable_libraries()
    assert {*libraries} <= {name for name in INSTRUCTION_SETS if runs_here(name)}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu sse2", {"plain"}),
        ("sse2 avx2 fma f16c", {"plain", "avx2"}),
        ("avx2 fma f16c avx512f avx512bw avx512dq avx512vl", {"plain", "avx2", "avx512"}),
        (None, {*INSTRUCTION_SETS}),
    ],
)
def test_the_instruction_sets_of_a_machine(
    monkeypatch: pytest.MonkeyPatch, flags: str | None, expected: set[str]
) -> None:
    def read(path: Path) -> str:
        if flags is None:
            raise FileNotFoundError
        return f"processor\t: 0\nflags\t\t: {flags}\n"

    monkeypatch.setattr(Path, "read_text", read)
    expected &= {*INSTRUCTION_SETS}
    assert {name for name in INSTRUCTION_SETS if runs_here(name)} == expected
    monkeypatch.setenv("NANOCORE_ALL_KERNELS", "1")
    assert {*sets_used_here()} == expected
    monkeypatch.delenv("NANOCORE_ALL_KERNELS")
    assert sets_used_here() == [name for name in INSTRUCTION_SETS if name in expected][:1]
