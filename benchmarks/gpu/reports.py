"""Reports on disk: all of it or nothing, in each folder that can be written.

What a rehearsal measured (--device cpu, --small) is never continued as if a GPU had, nor is it
written over what a GPU has measured. A report that is damaged, or of another kind, is set aside
under another name, and said to be.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


class FolderError(Exception):
    """A folder cannot be used so; says why, and what to do."""


def read_json(path: Path) -> dict[str, Any]:
    """A report, empty if there is none.

    Raises:
        FolderError: it is damaged.
    """
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise FolderError(f"{path} is damaged, {error}: move it away") from error
    if not isinstance(found, dict):
        raise FolderError(f"{path} is damaged, it is no JSON object: move it away")
    return found


def differs(report: dict[str, Any], small: bool, device: str) -> bool:
    """Whether it is not of this device and size. device: its name, or "cuda" for any GPU."""
    found = (report.get("device") or {}).get("name", "cuda")
    is_same = found == device or ("cuda" in (found, device) and "cpu" not in (found, device))
    return bool(report.get("small")) != small or not is_same


def take_over(path: Path, small: bool, device: str) -> tuple[dict[str, Any], str]:
    """A report to go on with; or none, and what was wrong with it. It is set aside then.

    Raises:
        FolderError: a GPU's, which a rehearsal must leave alone.
    """
    try:
        report = read_json(path)
    except FolderError:
        return {}, f"{path.name} in {path.parent.name} is damaged, and {_set_aside(path)}"
    if not report or not differs(report, small, device):
        return report, ""
    if (small or device == "cpu") and not differs(report, False, "cuda"):
        raise FolderError(
            f"{path} was measured on a GPU, and this is a rehearsal: give it other folders"
        )
    kind = f"{path.name} in {path.parent.name} is of another device or size"
    return {}, f"{kind}, and {_set_aside(path)}"


def write_json(name: str, data: dict[str, Any], *folders: Path | None) -> list[str]:
    """A report, in these folders; returns what went wrong in some of them.

    Raises:
        FolderError: none could be written.
    """
    wanted = [folder for folder in folders if folder]
    problems = write_file(name, (json.dumps(data, indent=1) + "\n").encode(), *wanted)
    if len(problems) == len(wanted):
        raise FolderError("; ".join(problems))
    return problems


def write_file(name: str, data: bytes, *folders: Path) -> list[str]:
    """All of it or nothing, in each folder; returns what went wrong."""
    problems = []
    for folder in folders:
        unfinished = folder / f".{name}.{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(data)
            unfinished.replace(folder / name)
        except OSError as error:
            problems.append(f"{name} cannot be written to {folder}: {error.strerror}")
            with suppress(OSError):
                unfinished.unlink()
    return problems


def _set_aside(path: Path) -> str:
    names = (path.with_name(f"set-aside-{i}-{path.name}") for i in range(1000))
    target = next(name for name in names if not name.exists())
    try:
        path.rename(target)
    except OSError as error:
        return f"cannot be set aside: {error.strerror}"
    return f"was set aside as {target.name}"
