"""llama.cpp's server behind the line protocol, over loopback HTTP; on a CPU.

    python llama_cpp_driver.py --server path/to/llama-server --model FILE.gguf --threads 2

Continuous batching with `--slots`, as many as the largest workload has requests.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from line_protocol import Requests, TokenClock, claim_stdout, serve, without_sampling

_SLOT_TOKENS = 1088  # the longest request of the workloads takes 1,032
_START_TIMEOUT_S = 300.0


def main() -> None:
    """Start the server and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--slots", type=int, default=32)
    arguments = parser.parse_args()
    answers = claim_stdout()
    flags = [
        "--threads", str(arguments.threads), "--threads-batch", str(arguments.threads),
        "--parallel", str(arguments.slots), "--ctx-size", str(arguments.slots * _SLOT_TOKENS),
        "--batch-size", "2048", "--ubatch-size", "512",
        "--cache-ram", "0",  # else gigabytes of past prompts
    ]  # fmt: skip
    port = _free_port()
    where = ["--model", str(arguments.model), "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen([arguments.server, *where, *flags], stdin=subprocess.DEVNULL)
    try:
        _wait_ready(server, port)
        serve(
            answers,
            without_sampling(lambda requests: _run(port, requests)),
            versions={"llama.cpp": _version(arguments.server)},
            settings={"file": arguments.model.name, "flags": " ".join(flags)},
        )
    finally:
        server.terminate()
        server.wait()


def _run(port: int, requests: Requests) -> dict[str, Any]:
    """A connection and a thread for each request."""
    bodies = [
        json.dumps({
            "prompt": prompt, "n_predict": num_output_tokens, "ignore_eos": True,
            "samplers": ["top_k"], "top_k": 1, "temperature": 0.0,
            "cache_prompt": True, "stream": True, "return_tokens": True,
        })
        for prompt, num_output_tokens in requests
    ]  # fmt: skip
    with ThreadPoolExecutor(len(requests)) as pool:
        start_s = time.perf_counter()
        clock = TokenClock(start_s, len(requests))
        futures = [
            pool.submit(_complete, port, body, clock, index) for index, body in enumerate(bodies)
        ]
        token_ids = [future.result() for future in futures]
        return clock.describe_run(time.perf_counter() - start_s, token_ids)


def _complete(port: int, body: str, clock: TokenClock, index: int) -> list[int]:
    """Stream one completion; returns its token ids."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"llama-server answered {response.status}: {response.read()[:500]!r}")
    token_ids: list[int] = []
    for line in response:
        if line.startswith(b"data: "):
            event = json.loads(line[len(b"data: ") :])
            if event.get("tokens"):
                token_ids += event["tokens"]
                clock.tick(index, time.perf_counter())
            if event.get("stop"):
                break
    connection.close()
    return token_ids


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _wait_ready(server: subprocess.Popen[bytes], port: int) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if server.poll() is not None:
            raise RuntimeError(f"llama-server ended with exit code {server.returncode}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass  # it does not listen yet
        finally:
            connection.close()
        time.sleep(0.2)
    raise RuntimeError(f"llama-server was not ready after {_START_TIMEOUT_S} s")


def _version(server: str) -> str:
    """Its build number and commit, e.g. "version: 6042 (a1b2c3d)"."""
    result = subprocess.run([server, "--version"], capture_output=True, text=True, check=True)
    lines = (result.stdout + result.stderr).splitlines()
    return next((line.removeprefix("version: ") for line in lines if "version" in line), "unknown")


if __name__ == "__main__":
    main()
