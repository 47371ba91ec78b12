"""Build what would be published: python -m tools.build_packages [--out dist].

A source distribution and a wheel of nanocore, its demo model and its conformance kit. Each wheel is
built from the unpacked source distribution, in a folder and an environment of its own, so it has
nothing of a working tree that no source names. nanocore's has the four kernel libraries in it, and
its platform is what auditwheel finds that these need. The last commit's time is that of all files,
so that one compiler makes the same bytes of a commit, whenever it does. What no commit has is
refused.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from nanocore.kernels.cpu.build import INSTRUCTION_SETS, library_name

ROOT: Final = Path(__file__).resolve().parents[1]
PACKED: Final = (
    "nanocore", "demo_model", "conformance", "pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE",
    "docs/index-page.md",
)  # fmt: skip
OTHERS: Final = ("demo_model", "conformance")


def run(*command: str | Path, environment: dict[str, str]) -> None:
    """Run it silently; what it said is told if it fails."""
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\n{' '.join(map(str, command))}: exit code {done.returncode}")


def uncommitted(root: Path = ROOT) -> list[str]:
    """Lines of `git status` on what is packed: a stray file would go along. Without git, none."""
    if not (root / ".git").exists():
        return []
    command = ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=all", "--"]
    return subprocess.check_output([*command, *PACKED], text=True).splitlines()


def build_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """With the tools beside this interpreter in PATH, and the last commit's time."""
    environment = dict(inherited)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    if "SOURCE_DATE_EPOCH" not in environment and (ROOT / ".git").exists():
        command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
        environment["SOURCE_DATE_EPOCH"] = subprocess.check_output(command, text=True).strip()
    return environment


def build(project: Path, out: Path, environment: dict[str, str], *flags: str) -> list[Path]:
    """The source distribution, and the wheel that was built from it."""
    command = (sys.executable, "-m", "build", *flags, "--outdir", out, project)
    run(*command, environment=environment)
    source, wheel = sorted(out.iterdir(), key=lambda path: path.suffix)
    if "SOURCE_DATE_EPOCH" in environment:
        set_times(source, int(environment["SOURCE_DATE_EPOCH"]))
    return [source, wheel]


def set_times(source: Path, time_s: int) -> None:
    """Pack a source distribution again, with this time and nobody's name on all its files."""
    with tarfile.open(source) as archive:
        entries = [(member, archive.extractfile(member)) for member in archive.getmembers()]
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as again:
            for member, content in sorted(entries, key=lambda entry: entry[0].name):
                member.mtime, member.pax_headers = time_s, {}
                member.uid = member.gid = 0
                member.uname = member.gname = ""
                again.addfile(member, content)
    source.write_bytes(gzip.compress(packed.getvalue(), mtime=time_s))


def for_its_platform(wheel: Path, out: Path, environment: dict[str, str]) -> Path:
    """A wheel whose name says which glibc its libraries need. It must have all of them."""
    libraries = {f"nanocore/kernels/cpu/{library_name(name)}" for name in INSTRUCTION_SETS}
    missing = libraries - set(zipfile.ZipFile(wheel).namelist())
    if missing:
        sys.exit(f"{', '.join(sorted(missing))}: not compiled; a wheel needs g++ in PATH, or CXX")
    command = (sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", out, wheel)
    run(*command, environment=environment)
    (repaired,) = out.iterdir()
    return repaired


def build_packages(out: Path, *flags: str, inherited: Mapping[str, str] = os.environ) -> list[Path]:
    """Build all, and move them to `out` when all are there; returns what is there.

    flags: of `python -m build`. inherited: environment variables.
    """
    environment = build_environment(inherited)
    with tempfile.TemporaryDirectory(prefix="nanocore-packages-") as name:
        folders = [Path(name) / part for part in ("ours", "repaired", *OTHERS)]
        for folder in folders:
            folder.mkdir()
        ours, repaired, *others = folders
        source, wheel = build(ROOT, ours, environment, *flags)
        made = [source]
        for project, folder in zip(OTHERS, others, strict=True):
            made += build(ROOT / project, folder, environment, *flags)
        made.append(for_its_platform(wheel, repaired, environment))
        out.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.move(path, out / path.name)) for path in made]


def main() -> None:
    """Build, and say what there is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="(default: dist/)")
    parser.add_argument("--dirty", action="store_true", help="pack what no commit has, too")
    arguments = parser.parse_args()
    if (found := uncommitted()) and not arguments.dirty:
        sys.exit(
            "would be packed as they are, and are in no commit:\n  "
            + "\n  ".join(found)
            + "\ncommit or remove them, or build with --dirty (make wheel WHEEL_FLAGS=--dirty)"
        )
    for path in build_packages(arguments.out):
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path}")


if __name__ == "__main__":
    main()
