"""Collects what a machine without a package index lacks, in a folder small enough to travel.

    python -m benchmarks.gpu.carry base OUT            what we import, FlashAttention 3
    python -m benchmarks.gpu.carry nano-vllm OUT --source FOLDER
    python -m benchmarks.gpu.carry triton OUT --python PYTHON   kernels, compiled

For Python 3.12 on x86-64, with torch 2.11 and CUDA 13 there; the wheel that FlashAttention 3 is
taken from is built for just that. Each makes one archive, OUT/NAME.tar.xz, and the parts of a day
name those that they need. day.py unpacks it: `site` is on everybody's path, before the machine's.

Triton finds compiled kernels by a hash of its own files, of the kernel and of its options, so they
are compiled here by the versions of the machine. Files of its cache name their own folder: they are
made in TRITON_CACHE, and day.py unpacks them to that path.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from benchmarks.gpu.fa3 import LIBRARY as FLASH_ATTENTION_3
from benchmarks.gpu.results import TRITON_CACHE

ROOT: Final = Path(__file__).resolve().parents[2]
LIMIT_MIB: Final = 60.0
"""Of 64; the repository travels along."""
VLLM: Final = "vllm==0.25.1"
BASE: Final = ("pyzmq", "msgspec", "xxhash", "llguidance>=1.9,<2")
"""What our side imports beside torch and its company."""
VERSIONS: Final = {"python": "3.12", "torch": "2.11", "triton": "3.6.0"}
"""Versions of the machine, on which the names of compiled kernels depend."""
_PLATFORMS: Final = ("2_35", "2_34", "2_31", "2_28", "2_27", "2_26", "2_24", "2_17")
_SHOW_VERSIONS: Final = """
import json, platform
from importlib.metadata import distributions
found = {each.name: each.version for each in distributions() if each.name in ("torch", "triton")}
print(json.dumps({"python": platform.python_version(), **found}))
"""


def main(argv: list[str] | None = None) -> int:
    """Make one archive; 1 if the folder is larger than may travel."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("base", "nano-vllm", "triton"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--source", type=Path, help="nano-vllm's repository")
    parser.add_argument("--extra", nargs="*", default=[], help="more packages for base")
    parser.add_argument("--python", type=Path, help="interpreter that compiles for triton, of an "
                        "environment with the machine's versions")  # fmt: skip
    parser.add_argument("--limit-mib", type=float, default=LIMIT_MIB)
    arguments = parser.parse_args(argv)
    source, out = arguments.source, arguments.out
    if arguments.what == "nano-vllm" and not (source and (source / "nanovllm").is_dir()):
        parser.error("--source: give the folder of nano-vllm's repository, with nanovllm in it")
    if arguments.what == "triton":
        if arguments.python is None:
            parser.error(f"--python: give an interpreter that has {_named(VERSIONS)}")
        try:
            found = versions_of(arguments.python)
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            parser.error(f"--python {arguments.python}: no interpreter with torch: {error}")
        if not has_versions(found):
            parser.error(f"--python: it has {_named(found)}, and the machine {_named(VERSIONS)}: "
                         "kernels that others compile are not found there")  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.what == "base":
            unpack(folder / "site", *BASE, *arguments.extra)
            unpack(folder, VLLM, members=[FLASH_ATTENTION_3])
            members = {folder: ""}
        elif arguments.what == "triton":
            compile_kernels(arguments.python)
            members = {TRITON_CACHE: TRITON_CACHE.name}
        else:
            paths = source / "nanovllm", *sorted(source.glob("LICENSE*"))
            members = {path: f"nano-vllm/{path.name}" for path in paths}
        with tarfile.open(out / f"{arguments.what}.tar.xz", "w:xz") as archive:
            for path, member in members.items():
                archive.add(path, member)
    return tell_size(out, arguments.limit_mib)


def tell_size(out: Path, limit_mib: float) -> int:
    """Print how large a folder is; 1 if it is larger than may travel."""
    total = sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / 2**20
    print(f"{out}: {total:.2f} MiB in all, of {limit_mib:.0f} that may travel")
    return 1 if total > limit_mib else 0


def versions_of(python: Path) -> dict[str, str]:
    """Return the version of an interpreter, and those of its torch and triton, if it has them."""
    command = [str(python), "-c", _SHOW_VERSIONS]
    found: dict[str, str] = json.loads(subprocess.check_output(command, text=True))
    return found


def has_versions(found: dict[str, str]) -> bool:
    """Whether these are the machine's, as far as VERSIONS says."""
    return all(
        (found.get(name, "").partition("+")[0] + ".").startswith(f"{wanted}.")
        for name, wanted in VERSIONS.items()
    )


def compile_kernels(python: Path) -> None:
    """Fill TRITON_CACHE with what a day launches, with programmatic dependent launch and without.

    Nothing else is in the cache afterwards.
    """
    shutil.rmtree(TRITON_CACHE, ignore_errors=True)
    environment = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    environment |= {"TRITON_CACHE_DIR": str(TRITON_CACHE), "TRITON_STORE_BINARY_ONLY": "1"}
    command = [str(python), "-m", "tests.kernels.triton.dry_run", "day", "--launchers"]
    for flags in ([], ["--no-pdl"]):
        subprocess.run([*command, *flags], cwd=ROOT, env=environment, check=True)


def _named(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


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
