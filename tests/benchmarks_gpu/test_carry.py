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


def test_parts_of_vllm_are_taken_out_of_its_wheel_and_put_together_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"vllm/__init__.py", LIBRARY.removeprefix("vllm-site/"),
            carry.VLLM_LIBRARY.removeprefix("vllm-site/")}  # fmt: skip
    left_out = {"vllm/_moe_C_stable_libtorch.abi3.so", "vllm/third_party/deep_gemm/x.py"}

    def download(folder: Path, *names: str) -> None:
        for name in names:
            package = name.partition("==")[0].replace("-", "_")
            with zipfile.ZipFile(folder / f"{package}-1-py3-none-any.whl", "w") as wheel:
                for member in kept | left_out if package == "vllm" else {f"{package}/a.py"}:
                    wheel.writestr(member, b"")

    monkeypatch.setattr(carry, "download", download)
    there = tmp_path / "there"
    for what in ("base", "vllm-1", "vllm-2"):
        assert carry.main([what, str(tmp_path / what), "--extra", "another"]) == 0
        day.unpack(tmp_path / what, there)
    assert {path for path in files_of(there / "vllm-site") if path.startswith("vllm/")} == kept
    assert {path.name for path in (there / "site").iterdir()} == {*carry.BASE, "another"}
    needed = {name.partition("==")[0].replace("-", "_") for name in carry.VLLM_NEEDS}
    assert {path.name for path in (there / "vllm-site").iterdir()} == {"vllm", *needed}
    (there / ".base").rename(there / ".gone")
    (there / "site").rename(there / "elsewhere")
    day.unpack(tmp_path / "vllm-2", there)
    assert not (there / "site").exists(), "each archive is unpacked once"
