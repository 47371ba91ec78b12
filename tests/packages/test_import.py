"""An editable install, as `make` makes it, is found from any folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nanocore


def test_a_folder_that_is_called_as_the_package_does_not_hide_it(tmp_path: Path) -> None:
    """As the clone itself does from the folder above it."""
    for name in ("nanocore", "nanocore_demo_model"):
        (tmp_path / name).mkdir()
    source = (
        "import nanocore; from nanocore.demo_model import demo_model_folder; "
        "print(nanocore.__file__, demo_model_folder())"
    )
    command = [sys.executable, "-c", source]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    where, folder = found.stdout.split()
    assert where == nanocore.__file__
    assert (Path(folder) / "config.json").is_file()
