"""Codex CLI and Claude Code, the real programs, run docs/recipes/agents.md against a served model.

Its weights are random, so a turn is text without meaning: that it is asked for, streamed and shown
is what is tested. All of it runs in a network namespace that has nothing but loopback.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nanocore.demo_model import demo_model_folder

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
DEMO_MODEL = demo_model_folder()
PACKAGES = ("@openai/codex@0.169.0", "@anthropic-ai/claude-code@2.1.197")
UNREACHABLE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ENETUNREACH", "ETIMEDOUT")
INSTALL_TIMEOUT_S = 400.0
TURN_TIMEOUT_S = 150.0
MAX_MODEL_LEN = 131072
SCRIPT = """
set -euo pipefail
ip link set lo up
{serve} > serve.log 2>&1 &
server=$!
trap 'kill $server; wait $server || true' EXIT
until grep -q 'ready: ' serve.log; do kill -0 $server; sleep 0.1; done
{codex} < /dev/null > codex.out 2> codex.err
{claude} < /dev/null > claude.out 2> claude.err
"""


def blocks(language: str) -> list[str]:
    page = (ROOT / "docs" / "recipes" / "agents.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both programs."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm")
    folder = tmp_path_factory.mktemp("agents")
    (folder / "package.json").write_text("{}")
    installed = subprocess.run(
        ["npm", "install", "--ignore-scripts", "--prefer-offline", *PACKAGES],
        cwd=folder, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False,
    )  # fmt: skip
    if installed.returncode and any(word in installed.stderr for word in UNREACHABLE):
        pytest.skip("the package index cannot be reached")
    assert installed.returncode == 0, installed.stderr
    script = folder / "node_modules" / "@anthropic-ai" / "claude-code" / "install.cjs"
    subprocess.run(["node", str(script)], check=True, timeout=INSTALL_TIMEOUT_S)
    return folder / "node_modules" / ".bin"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model's shape and tokenizer, with a long context and no weights."""
    folder = tmp_path_factory.mktemp("model")
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    for name, key in (
        ("config.json", "max_position_embeddings"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        values = json.loads((DEMO_MODEL / name).read_text()) | {key: MAX_MODEL_LEN}
        (folder / name).write_text(json.dumps(values))
    return folder


def test_both_agents_show_a_whole_turn(binaries: Path, model: Path, tmp_path: Path) -> None:
    isolated = subprocess.run(["unshare", "-rn", "true"], check=False, capture_output=True)
    if isolated.returncode:
        pytest.skip("no network namespace can be made here")
    serve, codex, claude = blocks("sh")
    (config,) = blocks("toml")
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "config.toml").write_text(config)
    serve = serve.strip().replace("path/to/folder", f"{model} --load-format dummy")
    serve = serve.replace("nanocore ", f"{sys.executable} -m nanocore ", 1)
    script = SCRIPT.format(
        serve=f"{serve} --enable-access-log", codex=codex.strip(), claude=claude.strip()
    )
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= {"HOME": str(tmp_path), "PATH": f"{binaries}:{environment['PATH']}"}
    done = subprocess.run(
        ["unshare", "-rn", "bash", "-c", script],
        cwd=tmp_path, env=environment, timeout=TURN_TIMEOUT_S, check=False,
    )  # fmt: skip
    log = {path.name: path.read_text() for path in tmp_path.glob("*.*") if path.is_file()}
    assert done.returncode == 0, log
    assert len(log["codex.out"]) > 100, log
    assert len(log["claude.out"]) > 100, log
    assert "model: local-model" in log["codex.err"]
    assert 'POST /v1/responses HTTP/1.1" 200' in log["serve.log"]
    assert 'POST /v1/messages?beta=true HTTP/1.1" 200' in log["serve.log"]
