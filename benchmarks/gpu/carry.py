"""Collects what a machine without a package index lacks, in folders small enough to travel.

    python -m benchmarks.gpu.carry base OUT            what we import, pytest, FlashAttention 3
    python -m benchmarks.gpu.carry nano-vllm OUT --source FOLDER
    python -m benchmarks.gpu.carry vllm-library OUT    the first half of vLLM: one library
    python -m benchmarks.gpu.carry vllm OUT            the second half: Python files and wheels

For Python 3.12 on x86-64, with torch 2.11 and CUDA 13 there; vllm 0.25.1 is built for just that.
Runs on any Python with pip. A folder that is larger than --limit-mib is an error. plan.py unpacks
it on the machine itself.
"""

from __future__ import annotations

import argparse
import lzma
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

LIMIT_MIB: Final = 60.0
"""Of 64; the repository travels along."""
VLLM: Final = "vllm==0.25.1"
BASE: Final = {
    "pyzmq": "zmq", "msgspec": "msgspec", "xxhash": "xxhash", "tqdm": "tqdm", "pytest": "pytest",
    "pluggy": "pluggy", "iniconfig": "iniconfig", "packaging": "packaging", "pygments": "pygments",
}  # fmt: skip
"""Packages that our side needs, and the modules that they are."""
_FA3: Final = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
_LIBRARY: Final = "vllm/_C_stable_libtorch.abi3.so"
_PACKED_FA3: Final = "fa3.so.xz"
_PACKED_LIBRARY: Final = "vllm-library.so.xz"
_PACKED_PYTHON: Final = "vllm-python.zip.xz"
_LEFT_OUT: Final = (
    _FA3, _LIBRARY, "_vllm_fa2_C", "_moe_C", "vllm-rs", "_flashmla", "_qutlass",
    "_rust_tool_parser", "/third_party/deep_gemm/", "/third_party/flashmla/",
)  # fmt: skip
VLLM_NEEDS: Final = (
    "cloudpickle", "cbor2", "aiohttp", "multidict", "attrs", "yarl", "propcache",
    "pydantic==2.14.3", "pydantic-core==2.50.4", "annotated-types", "typing-inspection",
    "aiohappyeyeballs", "aiosignal", "frozenlist", "openai-harmony==0.0.8", "openai==3.54.0",
    "httpx2", "httpcore2", "truststore", "sniffio", "jiter", "distro", "pybase64",
    "cachetools", "uvloop", "py-cpuinfo",
    "prometheus-client", "llguidance==1.7.6", "apache-tvm-ffi==0.1.9", "fastapi==0.136.3",
    "starlette", "partial-json-parser", "einops",
)  # fmt: skip
"""What importing its engine asks for beyond the machine's own packages, found by trying."""
_PLATFORMS: Final = ("2_35", "2_34", "2_31", "2_28", "2_27", "2_26", "2_24", "2_17")


def main(argv: list[str] | None = None) -> int:
    """Collect one folder, and check its size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("base", "nano-vllm", "vllm-library", "vllm"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--source", type=Path, help="nano-vllm's repository")
    parser.add_argument("--extra", nargs="*", default=[], help="more wheels, NAME==VERSION")
    parser.add_argument("--limit-mib", type=float, default=LIMIT_MIB)
    arguments = parser.parse_args(argv)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    if arguments.what == "nano-vllm" and arguments.source is None:
        parser.error("nano-vllm needs --source FOLDER")
    match arguments.what:
        case "base":
            download(out, *BASE, *arguments.extra)
            _collect_from_vllm(out, {_FA3: _PACKED_FA3})
        case "nano-vllm":
            copy_nano_vllm(arguments.source, out)
        case "vllm-library":
            _collect_from_vllm(out, {_LIBRARY: _PACKED_LIBRARY})
        case "vllm":
            download(out, *BASE, *VLLM_NEEDS, *arguments.extra)
            _collect_from_vllm(out, {_FA3: _PACKED_FA3}, _PACKED_PYTHON)
    return check_size(out, arguments.limit_mib)


def download(folder: Path, *names: str) -> None:
    """Wheels of these packages, without what they need in turn."""
    platforms = [f"manylinux_{name}_x86_64" for name in _PLATFORMS]
    platforms += ["manylinux2014_x86_64", "manylinux1_x86_64"]
    flags = [word for platform in platforms for word in ("--platform", platform)]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
         "--python-version", "3.12", "--implementation", "cp", *flags, "-d", str(folder), *names],
        check=True,
    )  # fmt: skip


def copy_nano_vllm(source: Path, out: Path) -> None:
    """Its package, and its license beside it.

    Raises:
        FileNotFoundError: that is no copy of its repository.
    """
    if not (source / "nanovllm" / "__init__.py").exists():
        raise FileNotFoundError(f"{source} has no package nanovllm: give its repository's folder")
    target = out / "nano-vllm"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(
        source / "nanovllm", target / "nanovllm", ignore=shutil.ignore_patterns("__pycache__")
    )
    for license_file in source.glob("LICENSE*"):
        shutil.copy(license_file, target)


def unpack(carried: Path, out: Path, site: Path) -> list[str]:
    """On the machine: one carried folder, beside those that came before.

    What vLLM needs goes into out/vllm-site, for its driver alone; other wheels into `site`, if the
    machine lacks them; the rest is copied into `out`. Returns what could not be unpacked, and why.
    """
    problems = []
    for path in sorted(carried.iterdir()):
        try:
            _unpack_one(path, out, site)
        except Exception as error:  # what does not need it can still be measured
            problems.append(f"{path.name}: {type(error).__name__}: {error}")
    return problems


def _unpack_one(path: Path, out: Path, site: Path) -> None:
    vllm_site = out / "vllm-site"
    of_vllm = {name.partition("==")[0].replace("-", "_") for name in VLLM_NEEDS}
    package = path.name.partition("-")[0].lower()
    if path.suffix == ".whl":
        if package in of_vllm:
            _extract(path, vllm_site)
        elif find_spec(BASE.get(package, package)) is None:
            _extract(path, site)
    elif path.name == _PACKED_LIBRARY:
        _decompress(path, vllm_site / _LIBRARY)
    elif path.name == _PACKED_PYTHON:
        with tempfile.TemporaryDirectory() as folder:
            _decompress(path, Path(folder) / "plain.zip")
            _extract(Path(folder) / "plain.zip", vllm_site)
    elif path.is_dir():
        shutil.copytree(path, out / path.name, dirs_exist_ok=True)
    elif path.name == _PACKED_FA3:
        _decompress(path, vllm_site / _FA3)
        shutil.copy(path, out)


def _extract(archive: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder)


def _decompress(packed: Path, target: Path) -> None:
    """All of it or nothing: plan.py goes by what is there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".unfinished")
    with lzma.open(packed) as source, unfinished.open("wb") as plain:
        shutil.copyfileobj(source, plain, 1 << 20)
    unfinished.replace(target)


def check_size(folder: Path, limit_mib: float) -> int:
    """Print what there is; 1 if it is more than may travel."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = {path: path.stat().st_size / 2**20 for path in files}
    for path, size in sorted(sizes.items(), key=lambda item: -item[1])[:40]:
        print(f"{size:8.2f} MiB  {path.relative_to(folder)}")
    total = sum(sizes.values())
    print(f"{total:8.2f} MiB  in all, of {limit_mib:.0f} that may travel")
    if total > limit_mib:
        print(f"{folder} is too large to travel: move something into another call's folder")
        return 1
    return 0


def _collect_from_vllm(out: Path, libraries: dict[str, str], python: str | None = None) -> None:
    """Parts of its wheel, of 250 MB. python: name for an archive of all that is left."""
    wanted = [name for name in (*libraries.values(), python) if name and not (out / name).exists()]
    if not wanted:
        return
    with tempfile.TemporaryDirectory() as name:
        download(Path(name), VLLM)
        (wheel,) = Path(name).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for member, packed in libraries.items():
                if packed in wanted:
                    with (
                        archive.open(member) as source,
                        lzma.open(out / packed, "wb", preset=3) as target,
                    ):
                        shutil.copyfileobj(source, target, 1 << 20)
            if python in wanted:
                _pack_rest(archive, out / str(python), Path(name) / "rest.zip")


def _pack_rest(archive: zipfile.ZipFile, packed: Path, plain: Path) -> None:
    """Stored in one archive and compressed as a whole, which is a fifth of file by file."""
    with zipfile.ZipFile(plain, "w", zipfile.ZIP_STORED) as rest:
        for member in _members(archive.namelist()):
            rest.writestr(member, archive.read(member))
    with plain.open("rb") as source, lzma.open(packed, "wb", preset=6) as target:
        shutil.copyfileobj(source, target, 1 << 20)


def _members(names: Iterable[str]) -> list[str]:
    return [name for name in names if not any(part in f"/{name}" for part in _LEFT_OUT)]


if __name__ == "__main__":
    sys.exit(main())
