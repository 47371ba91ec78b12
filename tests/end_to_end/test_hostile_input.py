"""The benchmark of hostile clients, cut short: what they may not do to an engine and to others."""

from __future__ import annotations

import importlib
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest

from nanocore.protocol.codec import encode
from nanocore.protocol.messages import Hello, Ping, Pong
from nanocore.protocol.sockets import PeerSocket

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NUM_MESSAGES = 10_000
PATIENCE_S = 60.0


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("hostile")


def test_an_engine_and_its_clients_outlive_hostile_ones(
    hostile: ModuleType, short_path: Path
) -> None:
    report = hostile.run(
        short_path,
        num_messages=NUM_MESSAGES,
        messages_per_s=1e9,
        num_attackers=2,
        num_bystanders=1,
        num_connections=100,
        quiet_s=0.5,
        seed=7,
    )
    assert report["num_messages"] >= NUM_MESSAGES
    assert report["engine_alive"]
    assert report["failures"] == []
    assert report["engine_exit_code"] == 0
    assert report["bystanders"]["mismatches"] == []
    assert report["descriptors_leaked"] == 0
    assert report["requests_left"] == 0
    assert report["free_blocks_after"] == report["free_blocks_before"]
    # Attackers get an answer to each message but to those that have none, and each is counted.
    answers = report["answers"]
    codes = ("protocol_error", "unknown_op", "no_session")
    num_errors = sum(answers[f"ERROR {code}"] for code in codes)
    assert NUM_MESSAGES / 3 < num_errors <= report["num_protocol_errors"]
    assert {"ERROR invalid_request", "ACCEPTED", "WELCOME", "REFUSED", "REPLY"} <= answers.keys()
    assert report["engine_log_lines"] < 100


def test_more_connections_than_the_shells_limit_of_descriptors_do_not_end_an_engine(
    tiny_model: Path, short_path: Path
) -> None:
    path = short_path / "e" / "engine.sock"
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 2000)); "
        "from nanocore.engine_core.cli import main; sys.exit(main())"
    )
    flags = ["--model", str(tiny_model), "--listen", f"ipc://{path}"]
    process = subprocess.Popen([sys.executable, "-c", limited, *flags])
    try:
        peer = PeerSocket(f"ipc://{path}")
        peer.send(encode(Hello(protocol=(1, 0))))
        assert peer.receive(PATIENCE_S) is not None
        with ExitStack() as stack:
            for _ in range(200):
                connection = stack.enter_context(socket.socket(socket.AF_UNIX))
                connection.settimeout(PATIENCE_S)
                connection.connect(str(path))
                assert connection.recv(1) == b"\xff"  # it was accepted: ZMTP's greeting
            peer.send(encode(Ping(nonce=5)))
            while (answer := peer.receive(PATIENCE_S)) != encode(Pong(nonce=5, num_steps=0)):
                assert answer is not None
        peer.close()
    finally:
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
