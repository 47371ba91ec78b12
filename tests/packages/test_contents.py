"""What is in the wheels and source distributions, and on which systems the libraries run."""

from __future__ import annotations

import email
import io
import re
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from packaging.utils import parse_wheel_filename

import nanocore
from nanocore.kernels.cpu.build import INSTRUCTION_SETS, library_name
from tests.packages.conftest import Packages
from tools.page_libraries import read_table

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
LIBRARIES = {f"nanocore/kernels/cpu/{library_name(name)}" for name in INSTRUCTION_SETS}
TORCHS_GLIBC = (2, 28)
EVERYWHERE = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libpthread.so.0"}
MAX_WHEEL_BYTES = 3_000_000


def contents(wheel: Path) -> dict[str, bytes]:
    """By name, without folders."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name[-1] != "/"}


def names_in_source(path: Path) -> set[str]:
    """Of its files, without the outermost folder."""
    with tarfile.open(path) as archive:
        return {entry.name.partition("/")[2] for entry in archive.getmembers() if entry.isfile()}


def metadata(wheel: Path) -> Message:
    (text,) = (data for name, data in contents(wheel).items() if name.endswith("/METADATA"))
    return email.message_from_bytes(text)


def test_one_wheel_serves_every_python_wherever_torch_runs(packages: Packages) -> None:
    name, version, _, tags = parse_wheel_filename(packages.wheel.name)
    assert (name, str(version)) == ("nanocore-engine", nanocore.__version__)
    assert {(tag.interpreter, tag.abi) for tag in tags} == {("py3", "none")}
    for tag in tags:
        found = re.fullmatch(r"manylinux_(\d+)_(\d+)_\w+", tag.platform)
        assert found, tag
        assert (int(found[1]), int(found[2])) <= TORCHS_GLIBC


def test_the_wheel_has_all_libraries_and_modules_and_nothing_else(packages: Packages) -> None:
    names = {name for name in contents(packages.wheel) if ".dist-info/" not in name}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "nanocore").rglob("*.py")}
    data = {"nanocore/py.typed"}
    page = (ROOT / "nanocore" / "http" / "page").rglob("*")
    data |= {path.relative_to(ROOT).as_posix() for path in page if path.is_file()}
    assert names == modules | data | LIBRARIES
    assert packages.wheel.stat().st_size < MAX_WHEEL_BYTES


def test_the_libraries_need_what_every_system_has(packages: Packages) -> None:
    for name, data in contents(packages.wheel).items():
        if name in LIBRARIES:
            dynamic = ELFFile(io.BytesIO(data)).get_section_by_name(".dynamic")
            assert isinstance(dynamic, DynamicSection)
            tags = list(dynamic.iter_tags())
            assert {tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"} <= EVERYWHERE
            assert not {tag.entry.d_tag for tag in tags} & {"DT_RPATH", "DT_RUNPATH"}


def test_the_demo_models_wheel_has_the_model_and_no_code(packages: Packages) -> None:
    folder = ROOT / "demo_model" / "nanocore_demo_model"
    wheel = contents(packages.demo_wheel)
    files = {path.name for path in folder.iterdir() if path.is_file()}
    assert {name for name in wheel if ".dist-info/" not in name} == {
        f"nanocore_demo_model/{name}" for name in files
    }
    assert packages.demo_wheel.name.endswith("-py3-none-any.whl")
    weights = (folder / "model.safetensors").read_bytes()
    assert wheel["nanocore_demo_model/model.safetensors"] == weights


def test_the_conformance_kit_has_its_modules_schema_and_vectors(packages: Packages) -> None:
    folder = ROOT / "conformance" / "nanocore_conformance"
    files = {path.name for path in folder.iterdir() if path.is_file()}
    assert {"schema.json", "vectors.jsonl", "cli.py"} <= files
    assert {name for name in contents(packages.kit_wheel) if ".dist-info/" not in name} == {
        f"nanocore_conformance/{name}" for name in files
    }


def test_the_license_goes_with_everything(packages: Packages) -> None:
    license_text = (ROOT / "LICENSE").read_bytes()
    libraries = {entry["license"] for entry in read_table()}
    for wheel in (packages.wheel, packages.demo_wheel, packages.kit_wheel):
        (found,) = (data for name, data in contents(wheel).items() if name.endswith("/LICENSE"))
        assert found == license_text
        ours, *others = metadata(wheel)["License-Expression"].split(" AND ")
        assert ours == "Apache-2.0"
        assert set(others) == (libraries if wheel == packages.wheel else set())
    for source in (packages.source, packages.demo_source, packages.kit_source):
        assert "LICENSE" in names_in_source(source)


def test_a_source_distribution_has_what_compiles_the_kernels_and_no_tests(
    packages: Packages,
) -> None:
    names = names_in_source(packages.source)
    folder = ROOT / "nanocore" / "kernels" / "cpu"
    sources = [path for path in folder.iterdir() if path.suffix in (".h", ".cpp")]
    kernels = {path.relative_to(ROOT).as_posix() for path in sources}
    assert kernels | {"setup.py", "pyproject.toml"} <= names
    others = ("tests", "demo", "conformance")
    assert not {name for name in names if name.endswith(".so") or name.startswith(others)}


@pytest.mark.parametrize("which", ["wheel", "demo_wheel", "kit_wheel"])
def test_the_long_description_is_fit_for_an_index_page(packages: Packages, which: str) -> None:
    """It has no links into the repository, which would lead nowhere."""
    told = metadata(getattr(packages, which))
    assert told["Description-Content-Type"] == "text/markdown"
    assert told["Requires-Python"] == ">=3.11"
    text = str(told.get_payload())
    assert len(text) > 500
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if "://" not in link] == []
