"""A server whose folder has files that its processes would import: none of them does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.served import DEMO, answered, serving

pytestmark = pytest.mark.campaign
SAFE = '#!/bin/sh\nexec "{python}" -P "$@"\n'
NAMES = ("random", "torch", "uvicorn", "msgspec", "jinja2", "llguidance", "nanocore_demo_model")


def test_no_process_of_a_server_imports_from_the_folder_it_is_started_in(tmp_path: Path) -> None:
    """The server itself is started as its command is, which has no script's folder in its path."""
    folder = tmp_path / "hostile"
    (folder / "nanocore").mkdir(parents=True)
    for name in (*NAMES, "nanocore/__init__"):
        (folder / f"{name}.py").write_text('raise SystemExit("hijacked")')
    safe = tmp_path / "python"
    safe.write_text(SAFE.format(python=sys.executable))
    safe.chmod(0o755)
    flags = ("--http-workers", "2", "--tensor-parallel-size", "2", "--max-num-seqs", "8")
    with serving(*flags, python=str(safe), cwd=folder) as server:
        server.line("ready:")
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [579]}}}
        asked = server.ask(8, response_format=schema, temperature=0, ignore_eos=False)
        status, answer = answered(asked)
        assert status == 200, answer
        assert answer["choices"][0]["message"]["content"] == "579"
        card = server.get("/v1/models")[1]["data"][0]
        assert Path(card["root"]) == DEMO
        assert "hijacked" not in "".join(server.log)
