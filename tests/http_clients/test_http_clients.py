"""Client libraries, the real packages, against `nanocore serve` with the demo model.

Each has a script of its own here, run with an interpreter that has its package: for Python an
environment with this one's packages and what they lack, of pinned versions; instructor has another,
for it takes an older openai. litellm, which is larger than all of them, is run by hand
(CONTRIBUTING.md says how).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.served import serving

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600)]

SCRIPTS = Path(__file__).parent
UNREACHABLE = (
    "NewConnectionError", "NameResolutionError", "ConnectTimeoutError", "ProxyError",
    "ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ENETUNREACH", "ETIMEDOUT",
)  # fmt: skip
INSTALL_TIMEOUT_S = 400.0
SCRIPT_TIMEOUT_S = 100.0
DIRECT = {"HTTP_PROXY": "", "HTTPS_PROXY": "", "http_proxy": "", "https_proxy": ""}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The server's."""
    with serving("--served-model-name", "demo") as served:
        served.line("ready: ")
        yield f"http://{served.host}:{served.port}"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has most clients."""
    return _environment(tmp_path_factory.mktemp("clients"), "packages.txt")


@pytest.fixture(scope="module")
def python_openai_2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has those which take openai 2."""
    return _environment(tmp_path_factory.mktemp("clients_openai_2"), "packages_openai_2.txt")


@pytest.fixture(scope="module")
def node_scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of Node's scripts, beside the packages that they import."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    folder = tmp_path_factory.mktemp("node") / "scripts"
    shutil.copytree(SCRIPTS / "node", folder, ignore=shutil.ignore_patterns("node_modules"))
    _install("npm", "ci", "--no-audit", "--no-fund", folder=folder)
    return folder


def _environment(folder: Path, packages: str) -> Path:
    """Make one with these packages, but for those that are here in the same version."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    paths = {"base": str(folder), "platbase": str(folder)}
    purelib = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    (purelib / "outer.pth").write_text(sysconfig.get_path("purelib"))
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet")
    _install(*pip, "--no-deps", "--no-compile", "-r", str(SCRIPTS / packages), folder=folder)
    return python


def _install(*command: str, folder: Path) -> None:
    """Skips the test if there is nowhere to install from."""
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
    )
    if done.returncode and any(name in done.stderr for name in UNREACHABLE):
        pytest.skip(f"{command[0]} cannot reach what has the packages")
    assert done.returncode == 0, done.stdout + done.stderr


def _run(url: str, *command: str | Path) -> None:
    """A script asserts by itself what it must see."""
    done = subprocess.run(
        [*command, url],
        env=os.environ | DIRECT,
        capture_output=True,
        text=True,
        timeout=SCRIPT_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "name", ["openai", "anthropic", "langchain", "pydantic_ai", "openai_agents", "llm"]
)
def test_python_client(python: Path, url: str, name: str) -> None:
    _run(url, python, SCRIPTS / f"{name}_client.py")


@pytest.mark.parametrize("name", ["instructor"])
def test_python_client_with_openai_2(python_openai_2: Path, url: str, name: str) -> None:
    _run(url, python_openai_2, SCRIPTS / f"{name}_client.py")


@pytest.mark.parametrize("name", ["openai_client", "anthropic_client", "ai_sdk"])
def test_node_client(node_scripts: Path, url: str, name: str) -> None:
    _run(url, "node", node_scripts / f"{name}.js")
