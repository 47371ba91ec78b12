"""What the documents tell a newcomer to run, run as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.engine_process import engine

ROOT = Path(__file__).parents[2]
# PROTOCOL.md's client needs only zmq and msgpack; this stands in for the latter.
MSGPACK = "import msgspec; packb, unpackb = msgspec.msgpack.encode, msgspec.msgpack.decode\n"


def python_blocks(document: str) -> list[str]:
    text = (ROOT / document).read_text()
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def run_python(source: str, folder: Path) -> str:
    """Run a script with `folder` importable; returns what it printed."""
    result = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"PYTHONPATH": str(folder)},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_protocols_raw_client_gets_eight_tokens(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "msgpack.py").write_text(MSGPACK)
    (source,) = python_blocks("PROTOCOL.md")
    with engine(tiny_model) as running:
        endpoint = re.search(r'"(ipc://[^"]+)"', source)
        assert endpoint is not None
        printed = run_python(source.replace(endpoint.group(1), running.endpoint), tmp_path)
    tokens = [int(number) for number in re.findall(r"\d+", printed)]
    assert len(tokens) == 8


def test_the_readmes_first_example_prints_a_sum(tmp_path: Path) -> None:
    source = python_blocks("README.md")[0]
    assert "579" in run_python(source, tmp_path)


def test_the_readmes_offline_example_prints_two_texts(tiny_model: Path, tmp_path: Path) -> None:
    source = python_blocks("README.md")[1]
    assert "path/to/qwen3-folder" in source
    printed = run_python(source.replace("path/to/qwen3-folder", str(tiny_model)), tmp_path)
    assert len(printed) > 2


@pytest.mark.timeout(300)
def test_the_demo_answers_streams_and_shares_its_prefix() -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py")],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "123 + 456 = 579" in result.stdout
    right = re.search(r"right answers +(\d+) of 64", result.stdout)
    assert right is not None
    assert int(right.group(1)) >= 60
    hit_rate = re.search(r"prefix-cache hit rate +([\d.]+)%", result.stdout)
    assert hit_rate is not None
    assert float(hit_rate.group(1)) > 90
    for figure in ("output tokens/s", "time to first token"):
        assert figure in result.stdout
