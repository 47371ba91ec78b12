"""What tests know of an engine's ranks from outside: their processes, and what those listen on."""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.end_to_end.engine_process import Engine, engine
from tests.tiny_models import write_byte_tokenizer


def rank_pids(engine_pid: int, num_ranks: int) -> list[int]:
    """Process ids of an engine's ranks, in order of rank, once all have started."""
    while len(pids := [pid for pid in child_pids(engine_pid) if _is_rank(pid)]) < num_ranks:
        time.sleep(0.01)
    return pids


def child_pids(pid: int | None) -> list[int]:
    """Process ids of a process's children: an engine's ranks, and what tries its grammars.

    They are listed by the thread that has begun them, and a thread that ends leaves them to
    another: then all is read again.
    """
    while True:
        try:
            return [
                int(child)
                for task in sorted(Path(f"/proc/{pid}/task").iterdir())
                for child in (task / "children").read_text().split()
            ]
        except (FileNotFoundError, ProcessLookupError):
            if not Path(f"/proc/{pid}").exists():
                raise


def _is_rank(pid: int) -> bool:
    try:
        return b"nanocore.worker" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def wait_for_ends(pidfds: list[int], timeout_s: float = 10.0) -> None:
    """Wait until all these processes have ended."""
    deadline_s = time.monotonic() + timeout_s
    for pidfd in pidfds:
        left_s = max(0.0, deadline_s - time.monotonic())
        assert select.select([pidfd], [], [], left_s)[0], "a process outlives its engine"
        os.close(pidfd)


@contextmanager
def doomed_engine(
    model: Path, *flags: str, num_ranks: int, exit_code: int
) -> Iterator[tuple[Engine, list[int]]]:
    """An engine and its ranks' pids; it must then exit with this code, and leave no process."""
    with engine(model, *flags) as running:
        pids = rank_pids(running.process.pid, num_ranks)
        pidfds = [os.pidfd_open(pid) for pid in child_pids(running.process.pid)]
        yield running, pids
        assert running.process.wait(30) == exit_code
        wait_for_ends(pidfds)


def listening_sockets(pid: int) -> list[str]:
    """Lines of /proc/net/tcp{,6} for TCP sockets on which a process listens."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        target = link.readlink() if link.is_symlink() else Path()
        if str(target).startswith("socket:["):
            inodes.add(str(target)[len("socket:[") : -1])
    lines = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                lines.append(line)
    return lines


def write_wide_model(folder: Path, intermediate_size: int = 65536) -> Path:
    """A model without weights whose MLP takes much memory for a long prompt, and little else."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 384, "hidden_size": 64,
        "intermediate_size": intermediate_size, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 1024,
        "eos_token_id": 383, "dtype": "float32",
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_byte_tokenizer(folder)
    return folder
