"""Collects what a machine without a package index lacks, in folders small enough to travel.

    python -m benchmarks.gpu.carry base OUT            what we import, FlashAttention 3
    python -m benchmarks.gpu.carry nano-vllm OUT --source FOLDER
    python -m benchmarks.gpu.carry vllm-1 OUT          half of vLLM: one library
    python -m benchmarks.gpu.carry vllm-2 OUT          the other half: Python files, what it imports

For Python 3.12 on x86-64, with torch 2.11 and CUDA 13 there; vllm 0.25.1 is built for just that.
Each makes one archive, OUT/NAME.tar.xz, and the parts of a day name those that they need. day.py
unpacks it: `site` is on everybody's path, before the machine's own; `vllm-site` on vLLM's alone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.gpu.fa3 import LIBRARY as FLASH_ATTENTION_3

LIMIT_MIB: Final = 60.0
"""Of 64; the repository travels along."""
VLLM: Final = "vllm==0.25.1"
VLLM_LIBRARY: Final = "vllm-site/vllm/_C_stable_libtorch.abi3.so"
BASE: Final = ("pyzmq", "msgspec", "xxhash")
"""What our side imports beside torch and its company."""
_LEFT_OUT: Final = (
    "_vllm_fa2_C", "_vllm_fa3_C", "_C_stable_libtorch", "_moe_C", "vllm-rs", "_flashmla",
    "_qutlass", "_rust_tool_parser", "/third_party/deep_gemm/", "/third_party/flashmla/",
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
    """Make one archive; 1 if the folder is larger than may travel."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("base", "nano-vllm", "vllm-1", "vllm-2"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--source", type=Path, help="nano-vllm's repository")
    parser.add_argument("--extra", nargs="*", default=[], help="more packages for base")
    parser.add_argument("--limit-mib", type=float, default=LIMIT_MIB)
    arguments = parser.parse_args(argv)
    source, out = arguments.source, arguments.out
    if arguments.what == "nano-vllm" and not (source and (source / "nanovllm").is_dir()):
        parser.error("--source: give the folder of nano-vllm's repository, with nanovllm in it")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        match arguments.what:
            case "base":
                install(folder / "site", *BASE, *arguments.extra)
                _unpack_vllm(folder, lambda member: member == FLASH_ATTENTION_3)
            case "nano-vllm":
                folder = source
            case "vllm-1":
                _unpack_vllm(folder, lambda member: member == VLLM_LIBRARY)
            case "vllm-2":
                install(folder / "vllm-site", *VLLM_NEEDS)
                _unpack_vllm(folder, lambda m: not any(part in f"/{m}" for part in _LEFT_OUT))
        with tarfile.open(out / f"{arguments.what}.tar.xz", "w:xz") as archive:
            for path in sorted(folder.iterdir()):
                if arguments.what != "nano-vllm":
                    archive.add(path, path.name)
                elif path.name == "nanovllm" or path.name.startswith("LICENSE"):
                    archive.add(path, f"nano-vllm/{path.name}")
    total = sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / 2**20
    print(f"{out}: {total:.2f} MiB in all, of {arguments.limit_mib:.0f} that may travel")
    return 1 if total > arguments.limit_mib else 0


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


def install(target: Path, *names: str) -> None:
    """What is in the wheels of these packages."""
    with tempfile.TemporaryDirectory() as folder:
        download(Path(folder), *names)
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as opened:
                opened.extractall(target)


def _unpack_vllm(folder: Path, is_wanted: Callable[[str], bool]) -> None:
    """Members of its wheel, of 250 MB, by their names below vllm-site."""
    with tempfile.TemporaryDirectory() as name:
        download(Path(name), VLLM)
        (wheel,) = Path(name).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as opened:
            members = [m for m in opened.namelist() if is_wanted(f"vllm-site/{m}")]
            opened.extractall(folder / "vllm-site", members)


if __name__ == "__main__":
    sys.exit(main())
