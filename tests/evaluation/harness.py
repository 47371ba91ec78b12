"""lm-evaluation-harness in an environment of its own, which has this one's packages, too."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("lm_eval[api]==0.4.13", "accelerate")
UNREACHABLE = ("NewConnectionError", "NameResolutionError", "ConnectTimeoutError", "ProxyError")
TIMEOUT_S = 800.0
OFFLINE = dict.fromkeys(("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")


def run(*command: str, check: bool = True, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and keep what it prints."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, **more
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def install(folder: Path) -> Path:
    """Make the environment; returns its interpreter. Skips where packages cannot be had."""
    run(sys.executable, "-m", "venv", str(folder))
    python = folder / "bin" / "python"
    paths = run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    (Path(paths.stdout.strip()) / "outer.pth").write_text(sysconfig.get_path("purelib"))
    installed = run(str(python), "-m", "pip", "install", "--quiet", *PACKAGES, check=False)
    if installed.returncode and any(name in installed.stderr for name in UNREACHABLE):
        pytest.skip("the package index cannot be reached")
    assert installed.returncode == 0, installed.stderr
    return python
