"""What travels is collected, is small enough, and is put in place on the other side."""

from __future__ import annotations

import lzma
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu import carry
from benchmarks.gpu.goals import BEGIN, END, GOALS, NOT_MEASURED, README, goals_table, with_table


def write_repository(folder: Path) -> Path:
    (folder / "nanovllm" / "__pycache__").mkdir(parents=True)
    (folder / "nanovllm" / "__init__.py").write_text("")
    (folder / "nanovllm" / "__pycache__" / "x.pyc").write_text("")
    (folder / "LICENSE").write_text("MIT")
    return folder


def test_nano_vllm_travels_with_its_license(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_repository(tmp_path / "source"), tmp_path / "out"
    assert carry.main(["nano-vllm", str(out), "--source", str(source)]) == 0
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert files == {"nano-vllm/LICENSE", "nano-vllm/nanovllm/__init__.py"}
    assert "in all" in capsys.readouterr().out


def test_a_folder_that_is_too_large_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_repository(tmp_path / "source"), tmp_path / "out"
    (source / "nanovllm" / "weights").write_bytes(bytes(2**20))
    code = carry.main(["nano-vllm", str(out), "--source", str(source), "--limit-mib", "0.5"])
    assert code == 1
    assert "too large to travel" in capsys.readouterr().out


def test_a_folder_without_the_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no package nanovllm"):
        carry.main(["nano-vllm", str(tmp_path / "out"), "--source", str(tmp_path)])


def test_parts_of_vllm_are_taken_out_of_its_wheel_and_put_together_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = {
        "vllm/__init__.py": b"python",
        "vllm/_C_stable_libtorch.abi3.so": b"library",
        "vllm/_moe_C_stable_libtorch.abi3.so": b"left out",
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": b"fa3",
        "vllm/third_party/deep_gemm/x.py": b"left out",
    }

    def download(folder: Path, *names: str) -> None:
        for name in names:
            package = name.partition("==")[0]
            with zipfile.ZipFile(
                folder / f"{package.replace('-', '_')}-1-py3-none-any.whl", "w"
            ) as wheel:
                for member, data in (members if package == "vllm" else {package: b""}).items():
                    wheel.writestr(member, data)

    monkeypatch.setattr(carry, "download", download)
    monkeypatch.setattr(carry, "find_spec", lambda name: name if name == "xxhash" else None)
    out, site = tmp_path / "out", tmp_path / "site"
    for what in ("base", "vllm-library", "vllm"):
        assert carry.main([what, str(tmp_path / what), "--extra", "another"]) == 0
        carry.unpack(tmp_path / what, out, site)
    with lzma.open(out / "fa3.so.xz") as library:
        assert library.read() == b"fa3"
    kept = {name for name in members if (out / "vllm-site" / name).exists()}
    assert kept == {name for name, data in members.items() if data != b"left out"}
    assert (out / "vllm-site/vllm/_C_stable_libtorch.abi3.so").read_bytes() == b"library"
    assert {path.name for path in site.iterdir()} == {*carry.BASE, "another"} - {"xxhash"}
    assert {path.name for path in (out / "vllm-site").iterdir()} == {
        "vllm", *(name.partition("==")[0] for name in carry.VLLM_NEEDS)
    }  # fmt: skip


def test_the_readme_has_the_table_of_goals(tmp_path: Path) -> None:
    table = goals_table(tmp_path)
    assert table.count(NOT_MEASURED) == len(GOALS)
    readme = README.read_text()
    assert all(goal.measure in readme for goal in GOALS)
    assert with_table(f"a\n{BEGIN}old\n{END}b\n", "new\n") == f"a\n{BEGIN}new\n{END}b\n"
    assert readme.count(BEGIN) == readme.count(END) == 1
