"""What travels is collected, is small enough, and is put in place on the other side."""

from __future__ import annotations

import os
import zipfile
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
            package = name.partition("==")[0]
            with zipfile.ZipFile(folder / f"{package}-1-py3-none-any.whl", "w") as wheel:
                for member in (LIBRARY, "vllm/__init__.py") if package == "vllm" else ("a.py",):
                    wheel.writestr(member if package == "vllm" else f"{package}/{member}", b"")

    monkeypatch.setattr(carry, "download", download)
    out, there = tmp_path / "out", tmp_path / "there"
    assert carry.main(["base", str(out), "--extra", "another"]) == 0
    day.unpack(out, there)
    packages = {f"site/{name}/a.py" for name in (*carry.BASE, "another")}
    assert files_of(there) == {".base", LIBRARY, *packages}
    (there / "site").rename(there / "elsewhere")
    day.unpack(out, there)
    assert not (there / "site").exists(), "each archive is unpacked once"
