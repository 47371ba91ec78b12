"""Which library is loaded, and what is said where there is none."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path

import pytest
import torch

from nanocore.kernels.cpu import library
from nanocore.kernels.cpu.build import INSTRUCTION_SETS, library_name
from nanocore.kernels.cpu.cpu_backend import CpuKernels
from nanocore.kernels.cpu.library import Library, find_library
from nanocore.kernels.select import select_kernels
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.protocol.errors import ConfigError
from nanocore.worker.devices import make_kernels
from tests.kernels import cpu_case
from tests.kernels.cpu_case import (
    CompilerFailed,
    compile_file,
    run_compiler,
    runnable_libraries,
)
from tests.worker.configs import make_worker_config

CPU = torch.device("cpu")

needs_libraries = pytest.mark.skipif(not runnable_libraries(), reason="no library was compiled")


@pytest.fixture
def _no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "INSTRUCTION_SETS", {"of_another_machine": ()})
    monkeypatch.delenv("NANOCORE_CPU_ISA", raising=False)


@pytest.fixture(autouse=True)
def _no_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NANOCORE_CPU_ISA", raising=False)


@pytest.mark.usefixtures("_no_libraries")
def test_without_a_library_torch_computes_and_the_log_says_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert find_library() is None
    assert isinstance(select_kernels("auto", CPU), TorchKernels)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "install g++ if it is missing, and reinstall nanocore" in record.getMessage()


@pytest.mark.usefixtures("_no_libraries")
def test_the_cpu_backend_without_a_library_is_an_error_that_names_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"install g\+\+"):
        select_kernels("cpu", CPU)


@pytest.mark.usefixtures("_no_libraries")
def test_a_user_who_asks_for_it_is_told_the_flag_and_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"--attention-backend cpu: .*install g\+\+"):
        make_kernels(make_worker_config(attention_backend="cpu"), CPU)


@pytest.mark.usefixtures("_no_libraries")
def test_torch_by_name_needs_no_library_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(select_kernels("torch", CPU), TorchKernels)
    assert not caplog.records


@pytest.mark.usefixtures("_no_libraries")
def test_a_wanted_instruction_set_is_missed_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NANOCORE_CPU_ISA", "plain")
    with pytest.raises(ValueError, match=r"NANOCORE_CPU_ISA=plain: .*here: none"):
        find_library()


def test_a_name_nobody_has_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown kernel backend 'gpu'"):
        select_kernels("gpu", CPU)


def test_the_cpu_backend_on_another_device_is_an_error() -> None:
    with pytest.raises(ValueError, match="the device is cuda"):
        select_kernels("cpu", torch.device("cuda"))


@needs_libraries
@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_the_best_library_is_taken(name: str, caplog: pytest.LogCaptureFixture) -> None:
    kernels = select_kernels(name, CPU)
    assert isinstance(kernels, CpuKernels)
    assert kernels.library.instruction_set == next(iter(runnable_libraries()))
    assert not caplog.records


@needs_libraries
def test_torch_by_name_is_taken_although_there_is_a_library() -> None:
    assert isinstance(select_kernels("torch", CPU), TorchKernels)


@needs_libraries
def test_the_environment_names_another_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in runnable_libraries():
        monkeypatch.setenv("NANOCORE_CPU_ISA", name)
        found = find_library()
        assert found is not None
        assert found.instruction_set == name
    monkeypatch.setenv("NANOCORE_CPU_ISA", "")
    found = find_library()
    assert found is not None
    assert found.instruction_set == next(iter(runnable_libraries()))


@needs_libraries
def test_an_instruction_set_that_cannot_run_here_is_an_error_that_names_those_that_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = ", ".join(runnable_libraries())
    absent = [name for name in INSTRUCTION_SETS if name not in runnable_libraries()]
    for name in ("avx1024", *absent):
        monkeypatch.setenv("NANOCORE_CPU_ISA", name)
        with pytest.raises(ValueError, match=f"NANOCORE_CPU_ISA={name}: .*here: {here}$"):
            find_library()


@needs_libraries
def test_a_library_of_another_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name, loaded = next(iter(runnable_libraries().items()))
    version = library.ABI_VERSION
    monkeypatch.setattr(library, "ABI_VERSION", version + 1)
    path = str(Path(library.__file__).with_name(library_name(name)))
    with pytest.raises(RuntimeError, match=f"interface {version} and not {version + 1}.*reinstall"):
        Library(path, name)
    assert loaded.instruction_set == name


def test_a_file_that_is_no_library_is_an_os_error(tmp_path: Path) -> None:
    path = tmp_path / "_plain.so"
    path.write_text("not an ELF file")
    with pytest.raises(OSError, match=r"_plain\.so"):
        Library(str(path), "plain")


def test_tests_that_are_broken_off_leave_no_compiler_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor what it has started, which holds its output open as long as it lives."""
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nsleep 600 &\necho started\nwait\n")
    compiler.chmod(0o700)
    outputs: list[int] = []

    def interrupted(process: subprocess.Popen[str], timeout: float) -> tuple[str, str]:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        outputs.append(os.dup(process.stdout.fileno()))
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_compiler([str(compiler)])
    with open(outputs[0]) as output:
        assert output.read() == ""


def test_a_compiler_that_is_too_slow_is_ended_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, tries = tmp_path / "compiler", tmp_path / "tries"
    tries.touch()
    compiler.write_text(
        f'#!/bin/sh\ncase "$1" in --version|-E) exit;; esac\necho >>{tries}\nsleep 600\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(cpu_case, "COMPILER_TIMEOUT_S", 1.0)
    for _ in range(2):
        with pytest.raises(CompilerFailed, match="not done after"):
            compile_file(tmp_path / "made", tmp_path / "source.cpp")
    assert tries.read_text() in ("", "\n")
