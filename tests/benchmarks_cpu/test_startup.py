"""A server's start is measured until it answers, and a server that ends is an error."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def startup() -> Any:
    return import_module("startup")


SERVER = """
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    num_asked = 0

    def do_GET(self):
        Handler.num_asked += 1
        self.send_response(200 if Handler.num_asked > 2 else 503)
        self.end_headers()

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        text = json.dumps({"choices": [{"text": " Paris" if Handler.num_asked == 3 else ""}]})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass

assert sys.argv[1] == "model.gguf"
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


def test_a_start_lasts_until_the_server_says_that_it_can_answer(
    tmp_path: Path, startup: Any
) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    command = f"{sys.executable} {script} {{model}} {{port}}"
    found = startup.start(command, Path("model.gguf"), dict(os.environ))
    assert set(found) == {"ready_s", "first_token_s", "cpu_s"}
    assert all(seconds > 0 for seconds in found.values())


def test_a_server_that_ends_is_told(startup: Any) -> None:
    with pytest.raises(SystemExit, match="did not serve model"):
        startup.start("false {model} {port}", Path("model.gguf"), dict(os.environ))


def test_each_server_starts_as_often_and_ours_with_and_without_a_cache(
    startup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches: list[str] = []

    def start(command: str, model: Path, environment: dict[str, str]) -> dict[str, float]:
        caches.append(environment["XDG_CACHE_HOME"])
        return {"ready_s": 1.0}

    monkeypatch.setattr(startup, "start", start)
    monkeypatch.setattr(startup, "import_torch", lambda: {"ready_s": 0.5})
    found = startup.measure(Path("model.gguf"), {"other": "command"}, reps=2)
    assert list(found) == [
        "import torch",
        "nanocore, first start",
        "nanocore, later start",
        "other",
    ]
    assert all(len(row["ready_s"]["values"]) == 2 for row in found.values())
    first, later, _, *again = caches
    assert first == later
    assert first not in again
