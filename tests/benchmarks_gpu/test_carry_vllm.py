"""vLLM travels in two archives, which are whole again on the other side."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu import carry, carry_vllm, day

LEFT_BEHIND = ("vllm/_moe_C_stable_libtorch.abi3.so", "vllm/third_party/a.h", "vllm/configs/a.json")
MODULES = ("vllm/__init__.py", "vllm/v1/engine.py", "vllm-0.25.1.dist-info/METADATA")


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Contents of the library in the wheel that is downloaded."""
    data = os.urandom(1000)

    def download(folder: Path, *names: str) -> None:
        for name in names:
            package = name.partition("==")[0]
            with zipfile.ZipFile(folder / f"{package}-1-py3-none-any.whl", "w") as wheel:
                if name == carry.VLLM:
                    wheel.writestr(carry_vllm.LIBRARY, data)
                for member in (*MODULES, *LEFT_BEHIND) if name == carry.VLLM else ("a.py",):
                    wheel.writestr(member if name == carry.VLLM else f"{package}/{member}", b"")

    monkeypatch.setattr(carry, "download", download)
    monkeypatch.setattr(carry_vllm, "SPLIT_BYTES", 700)
    return data


def test_the_library_arrives_in_two_pieces_and_is_joined(library: bytes, tmp_path: Path) -> None:
    there = tmp_path / "there"
    for what, name in carry_vllm.NAMES.items():
        out = tmp_path / what
        assert carry_vllm.main([what, str(out)]) == 0
        assert files_of(out) == {f"{name}.tar.xz"}
        day.unpack(out, there)
    packages = {f"vllm-site/{name.partition('==')[0]}/a.py" for name in carry_vllm.PACKAGES}
    pieces = {f"{carry_vllm.LIBRARY}.{what}" for what in carry_vllm.NAMES}
    marks = {f".{name}" for name in carry_vllm.NAMES.values()}
    assert files_of(there) == {*MODULES, *packages, *pieces, *marks}
    for _ in range(2):
        carry_vllm.join(there)
        assert (there / carry_vllm.LIBRARY).read_bytes() == library


def test_an_archive_that_is_too_large_is_refused(
    library: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert carry_vllm.main(["first", str(tmp_path), "--limit-mib", "0.0001"]) == 1
    assert "that may travel" in capsys.readouterr().out


def test_one_piece_is_not_taken_for_the_library(library: bytes, tmp_path: Path) -> None:
    carry_vllm.main(["first", str(tmp_path / "out")])
    day.unpack(tmp_path / "out", tmp_path)
    with pytest.raises(FileNotFoundError, match="second"):
        carry_vllm.join(tmp_path)
    assert not (tmp_path / carry_vllm.LIBRARY).exists()
