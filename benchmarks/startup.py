"""How long servers take until they answer, next to each other: ours, llama.cpp's, any other.

    python benchmarks/startup.py MODEL.gguf... [--reps 5] [--server "NAME=COMMAND"]...

A server's command has {model} and {port} in it. For each model the servers start in turn: until
/health answers with 200, then until a first token for a short prompt. Our first start has an empty
cache folder, later ones have what the first one left; `import torch` alone stands beside them,
since none of ours can be shorter. Writes benchmarks/results/startup.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from report import describe_run, positive, spread, table, with_range, write_report

RESULTS: Final = Path(__file__).parent / "results" / "startup.json"
OURS: Final = f"{shlex.quote(sys.executable)} -m nanocore serve {{model}} --port {{port}}"
_LIMIT_S: Final = 300.0
_BODY: Final = {"prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}


def start(command: str, model: Path, environment: dict[str, str]) -> dict[str, float]:
    """One start. Returns seconds: ready, first_token after that, cpu of all its processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [word.format(model=model, port=port) for word in shlex.split(command)]
    url, before_s, start_s = f"http://127.0.0.1:{port}", _children_s(), time.perf_counter()
    server = subprocess.Popen(
        words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while not _answers(f"{url}/health"):
            if server.poll() is not None or time.perf_counter() - start_s > _LIMIT_S:
                sys.exit(f"{words[0]} did not serve {model}: run it by hand to see why")
            time.sleep(0.01)
        ready_s = time.perf_counter()
        headers = {"content-type": "application/json"}
        body = json.dumps(_BODY).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=_LIMIT_S) as response:
            assert json.load(response)["choices"][0]["text"]
        token_s = time.perf_counter()
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()
    return {
        "ready_s": ready_s - start_s,
        "first_token_s": token_s - ready_s,
        "cpu_s": _children_s() - before_s,
    }


def _answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=1) as response:
        return bool(response.status == 200)
    return False


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def import_torch() -> dict[str, float]:
    before_s, start_s = _children_s(), time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return {"ready_s": time.perf_counter() - start_s, "cpu_s": _children_s() - before_s}


def measure(model: Path, servers: dict[str, str], reps: int) -> dict[str, dict[str, Any]]:
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in range(reps):
        runs.setdefault("import torch", []).append(import_torch())
        with tempfile.TemporaryDirectory(prefix="nanocore-startup-") as cache:
            environment = os.environ | {"XDG_CACHE_HOME": cache}
            for name in ("nanocore, first start", "nanocore, later start"):
                runs.setdefault(name, []).append(start(OURS, model, environment))
        for name, command in servers.items():
            runs.setdefault(name, []).append(start(command, model, dict(os.environ)))
    return {
        name: {key: spread([run[key] for run in found]) for key in found[0]}
        for name, found in runs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL.gguf")
    parser.add_argument("--reps", type=positive, default=5)
    parser.add_argument("--server", action="append", default=[], metavar="NAME=COMMAND")
    given = parser.parse_args()
    servers = dict(text.split("=", 1) for text in given.server)
    report = describe_run(("nanocore", "torch", "tokenizers"))
    figures = {model.name: measure(model, servers, given.reps) for model in given.models}
    write_report(RESULTS, report | {"figures": figures})
    for model, rows in figures.items():
        columns = ("ready_s", "first_token_s", "cpu_s")
        shown = [
            [name, *(with_range(row[key]) if key in row else "" for key in columns)]
            for name, row in rows.items()
        ]
        print(table([[model, "ready, s", "first token after that, s", "CPU s"], *shown]))


if __name__ == "__main__":
    main()
