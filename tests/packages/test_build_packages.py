"""What no commit has is not packed unawares."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tools.build_packages import uncommitted


def test_strays_and_changes_of_what_is_packed_are_told_and_nothing_else(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        identity = ("-c", "user.name=x", "-c", "user.email=x@y")
        subprocess.run(["git", "-C", tmp_path, *identity, *words], check=True)

    page = tmp_path / "nanocore" / "http" / "page"
    page.mkdir(parents=True)
    (tmp_path / "setup.py").write_text("1")
    assert uncommitted(tmp_path) == []  # no repository: an unpacked source distribution
    git("init", "-q")
    git("add", "setup.py")
    git("commit", "-q", "-m", "x")
    assert uncommitted(tmp_path) == []
    (tmp_path / "notes.txt").write_text("not packed")
    (page / "private.json").write_text("{}")
    (tmp_path / "setup.py").write_text("2")
    assert sorted(line[3:] for line in uncommitted(tmp_path)) == [
        "nanocore/http/page/private.json",
        "setup.py",
    ]
