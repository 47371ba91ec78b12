"""Collects vLLM, in two archives that travel one after the other: one call does not take all of it.

    python -m benchmarks.gpu.carry_vllm first OUT     half of its largest library
    python -m benchmarks.gpu.carry_vllm second OUT    the rest, its modules and packages they import

Beside the first one travels `carry base`, which has pyzmq, msgspec, llguidance and, at its place
in vLLM's package, FlashAttention 3. `join` puts the library together on the other side.

Only what a dense model in bfloat16 needs is collected. Libraries for mixtures of experts,
FlashAttention 2, FlashInfer and the packages of the server stay behind. The packages are those that
were missing when vLLM's engine, its worker and Qwen3 were imported among the machine's packages.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from benchmarks.gpu import carry

LIMIT_MIB: Final = 40.0
"""Of 64; the sources are 23.6 in an archive that is not compressed."""
NAMES: Final = {"first": "vllm-first", "second": "vllm-second"}
"""Names of the archives."""
SITE: Final = "vllm-site"
"""Folder of the packages, which only vLLM gets; its own package is beside that folder."""
LIBRARY: Final = "vllm/_C_stable_libtorch.abi3.so"
"""Library with the kernels for norms, activations, rotary embeddings and writes to the cache."""
SPLIT_BYTES: Final = 36 << 20
"""Size of the library's first piece, of 73 MiB."""
PACKAGES: Final = (
    "annotated-types==0.8.0",
    "apache-tvm-ffi==0.1.15.post2",
    "cachetools==8.0.2",
    "cbor2==6.3.0",
    "distro==1.9.0",
    "openai==2.54.0",
    "openai-harmony==0.0.8",
    "pybase64==1.5.1",
    "pydantic==2.13.5",
    "pydantic-core==2.46.5",
    "sniffio==1.3.1",
    "typing-inspection==0.4.5",
    "xgrammar==0.2.8",
)
_PYTHON: Final = re.compile(r"vllm/.*\.py|vllm-.*\.dist-info/(METADATA|licenses/.*)")
"""Modules, and what says that the package is installed."""


def main(argv: list[str] | None = None) -> int:
    """Make one archive; 1 if the folder is larger than may travel."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=tuple(NAMES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit-mib", type=float, default=LIMIT_MIB)
    arguments = parser.parse_args(argv)
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        collect(folder, arguments.what)
        path = out / f"{NAMES[arguments.what]}.tar.xz"
        with tarfile.open(path, "w:xz", preset=9) as archive:
            archive.add(folder, "")
    return carry.tell_size(out, arguments.limit_mib)


def collect(target: Path, what: str) -> None:
    """Fill a folder with what the first or the second archive has."""
    with tempfile.TemporaryDirectory() as folder:
        carry.download(Path(folder), carry.VLLM)
        with zipfile.ZipFile(next(Path(folder).glob("vllm-*.whl"))) as wheel:
            data = wheel.read(LIBRARY)
            piece = data[:SPLIT_BYTES] if what == "first" else data[SPLIT_BYTES:]
            path = target / f"{LIBRARY}.{what}"
            path.parent.mkdir()
            path.write_bytes(piece)
            if what == "second":
                wheel.extractall(target, [n for n in wheel.namelist() if _PYTHON.fullmatch(n)])
                carry.unpack(target / SITE, *PACKAGES)


def join(folder: Path) -> None:
    """Put the library together from the two pieces that were carried."""
    library = folder / LIBRARY
    if library.exists():
        return
    joined = library.with_suffix(".joined")
    with joined.open("wb") as file:
        for what in NAMES:
            with library.with_name(f"{library.name}.{what}").open("rb") as piece:
                shutil.copyfileobj(piece, file)
    joined.rename(library)


if __name__ == "__main__":
    sys.exit(main())
