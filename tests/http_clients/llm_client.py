"""llm, by its command: a chat, streamed and not, and a schema; the model is named in its YAML."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from expected import ANSWER, BASE_URL, MODEL, QUESTION, SUM

MODELS = f"""\
- model_id: ours
  model_name: {MODEL}
  api_base: {BASE_URL}
  api_key_name: ours
  supports_schema: true
  supports_tools: true
"""


def llm(folder: str, *arguments: str) -> str:
    """What it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "llm", *arguments],
        env=os.environ | {"LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


with tempfile.TemporaryDirectory() as folder:
    Path(folder, "extra-openai-models.yaml").write_text(MODELS)
    Path(folder, "keys.json").write_text(json.dumps({"ours": "none"}))
    greedy = ("-m", "ours", "-o", "temperature", "0")
    assert llm(folder, QUESTION, *greedy) == ANSWER
    assert llm(folder, QUESTION, *greedy, "--no-stream") == ANSWER
    assert json.loads(llm(folder, QUESTION, *greedy, "--schema", "sum int")) == {"sum": SUM}
    assert llm(folder, "What is 1 + 2?", *greedy, "--continue")
