"""What travels is collected, is small enough, and is put in place on the other side."""

from __future__ import annotations

import os
import platform
import re
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks.gpu import carry, day
from benchmarks.gpu.fa3 import LIBRARY


def write_repository(folder: Path) -> Path:
    (folder / "nanovllm").mkdir(parents=True)
    (folder / "nanovllm" / "__init__.py").write_text("")
    (folder / "LICENSE").write_text("MIT")
    (folder / "bench.py").write_text("")
    return folder


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_nano_vllm_travels_with_its_license(tmp_path: Path) -> None:
    source, out, there = (tmp_path / name for name in ("source", "out", "there"))
    assert carry.main(["nano-vllm", str(out), "--source", str(write_repository(source))]) == 0
    assert files_of(out) == {"nano-vllm.tar.xz"}
    day.unpack(out, there)
    assert files_of(there) == {
        ".nano-vllm", "nano-vllm/LICENSE", "nano-vllm/nanovllm/__init__.py"
    }  # fmt: skip


def test_a_folder_that_is_too_large_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_repository(tmp_path / "source"), tmp_path / "out"
    (source / "nanovllm" / "weights").write_bytes(os.urandom(2**20))
    command = ["nano-vllm", str(out), "--source", str(source)]
    assert carry.main([*command, "--limit-mib", "0.5"]) == 1
    assert "1.00 MiB in all, of 0 that may travel" in capsys.readouterr().out


def test_a_folder_without_the_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        carry.main(["nano-vllm", str(tmp_path / "out"), "--source", str(tmp_path)])


def test_what_we_import_and_flash_attention_3_are_taken_out_of_their_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(folder: Path, *names: str) -> None:
        for name in names:
            package = re.split("[=<>]", name)[0]
            with zipfile.ZipFile(folder / f"{package}-1-py3-none-any.whl", "w") as wheel:
                for member in (LIBRARY, "vllm/__init__.py") if package == "vllm" else ("a.py",):
                    wheel.writestr(member if package == "vllm" else f"{package}/{member}", b"")

    monkeypatch.setattr(carry, "download", download)
    out, there = tmp_path / "out", tmp_path / "there"
    assert carry.main(["base", str(out), "--extra", "another"]) == 0
    day.unpack(out, there)
    names = "pyzmq", "msgspec", "xxhash", "llguidance", "another"
    packages = {f"site/{name}/a.py" for name in names}
    assert files_of(there) == {".base", LIBRARY, *packages}
    (there / "site").rename(there / "elsewhere")
    day.unpack(out, there)
    assert not (there / "site").exists(), "each archive is unpacked once"


def has_versions(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    found = {"python": "3.12.1", "torch": "2.11.0+cu130", "triton": "3.6.0"} | changes
    monkeypatch.setattr(carry, "versions_of", lambda _python: found)


def test_compiled_kernels_are_archived_under_the_name_of_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, out = tmp_path / "nanocore-triton", tmp_path / "out"
    monkeypatch.setattr(carry, "TRITON_CACHE", cache)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (cache / "OLD").mkdir(parents=True)
    calls = []

    def run(command: list[str], *, cwd: Path, env: dict[str, str], check: bool) -> None:
        assert (cwd, check) == (carry.ROOT, True)
        assert (env["TRITON_CACHE_DIR"], "TRITON_INTERPRET" in env) == (str(cache), False)
        calls.append(command)
        folder = cache / f"KEY{len(calls)}"
        folder.mkdir(parents=True)
        (folder / "kernel.cubin").write_bytes(b"")

    has_versions(monkeypatch)
    monkeypatch.setattr(carry.subprocess, "run", run)
    assert carry.main(["triton", str(out), "--python", "python3.12"]) == 0
    command = ["python3.12", "-m", "tests.kernels.triton.dry_run", "day", "--launchers"]
    assert calls == [command, [*command, "--no-pdl"]]
    with tarfile.open(out / "triton.tar.xz") as archive:
        files = {member.name for member in archive if member.isfile()}
    assert files == {f"nanocore-triton/KEY{number}/kernel.cubin" for number in (1, 2)}


@pytest.mark.parametrize(
    "changes", [{"python": "3.11.9"}, {"torch": "2.13.0"}, {"triton": "3.6.1"}], ids=str
)
def test_kernels_of_other_versions_are_not_compiled(
    changes: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    has_versions(monkeypatch, **changes)
    monkeypatch.setattr(carry, "compile_kernels", lambda _python: pytest.fail("compiles"))
    with pytest.raises(SystemExit, match="2"):
        carry.main(["triton", str(tmp_path), "--python", "python3.12"])
    [(name, other)] = changes.items()
    assert f"{name} {other}" in (said := capsys.readouterr().err)
    assert "the machine python 3.12, torch 2.11, triton 3.6.0" in " ".join(said.split())


def test_kernels_are_compiled_by_an_interpreter_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        carry.main(["triton", str(tmp_path)])
    assert "--python: give an interpreter that has python 3.12" in capsys.readouterr().err


def test_versions_are_those_that_an_interpreter_has() -> None:
    found = carry.versions_of(Path(sys.executable))
    assert not carry.has_versions({"python": "3.12.1"})
    assert found["triton"] == version("triton")
    assert found["python"] == platform.python_version()
