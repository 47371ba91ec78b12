"""Running engines and servers of this user: each registers itself, and tools find them here.

Each has a JSON file in a private directory beside the default endpoint, and holds a lock on it
while it serves. A file without its lock was left by a process that was killed: readers remove it.
Only this user can write there, so readers may connect to what the files name. They contain no keys.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

import msgspec

from nanocore.protocol.endpoint import runtime_directory
from nanocore.protocol.errors import ConfigError
from nanocore.system.private_directory import make_private, open_regular

logger = logging.getLogger(__name__)

_WHAT: Final = "the directory of running engines"
NOTHING_RUNS: Final = (
    "no engine or server of this user is running: start one with `nanocore serve MODEL`, or name "
    "one of another user or machine"
)


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """An engine or a server that accepts clients.

    address: an engine's endpoint, or a server's URL. model: as clients call it. endpoints: of the
    engine, or of those that the server uses. tokenizer, chat_template, served_model_names: a
    folder, a name or text, and names that a server uses instead of the engine's. launched_by: pid
    of the process to which the engine is private; it ends with it. step_trace: absolute path of an
    engine's trace.
    """

    kind: Literal["engine", "server"]
    pid: int
    address: str
    model: str
    endpoints: tuple[str, ...]
    curve_dir: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    served_model_names: tuple[str, ...] = ()
    launched_by: int | None = None
    step_trace: str | None = None
    started_s: float = msgspec.field(default_factory=time.time)

    def __str__(self) -> str:
        return f"{self.kind} at {self.address} ({self.model}, pid {self.pid})"

    def flag(self, endpoint_flag: str) -> str:
        """Return the flag that chooses it, and its value."""
        if self.address.startswith("http"):
            return f"--url {self.address}"
        return f"{endpoint_flag} {self.endpoints[0]}"


@contextmanager
def registered(entry: Running) -> Iterator[None]:
    """Let tools find this process inside the block. If it cannot be registered, log why."""
    path = None
    try:
        path, fd = _write(entry)
    except (OSError, ValueError) as error:
        logger.info("tools find this %s by its address only: %s", entry.kind, error)
    try:
        yield
    finally:
        if path is not None:
            path.unlink(missing_ok=True)
            os.close(fd)


def _write(entry: Running) -> tuple[Path, int]:
    """Write a file under another name, lock it, and rename it; return its path and descriptor."""
    directory = runtime_directory() / "running"
    make_private(directory, _WHAT)
    fd, name = tempfile.mkstemp(".new", f"{entry.kind}-{entry.pid}-", directory)
    path = Path(name)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, msgspec.json.encode(entry))
        return path.rename(path.with_suffix(".json")), fd
    except BaseException:
        path.unlink(missing_ok=True)
        os.close(fd)
        raise


def all_running() -> list[Running]:
    """Return this user's engines and servers, the oldest first.

    Raises:
        ConfigError: their directory is a symlink, another user's, or open to others.
    """
    directory = runtime_directory() / "running"
    if not os.path.lexists(directory):
        return []
    make_private(directory, _WHAT)
    found = [one for path in directory.glob("*.json") if (one := _read(path)) is not None]
    return sorted(found, key=lambda one: one.started_s)


def _read(path: Path) -> Running | None:
    """Return what is registered; remove the file, and return None, if its process is gone."""
    try:
        with open(open_regular(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:  # its process holds the lock
                return msgspec.json.decode(file.read(), type=Running)
        path.unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # removed meanwhile, or written by another version
        logger.debug("%s: %s", path, error)
    return None


def find_one(
    model: str | None = None, *, endpoint_flag: str = "--endpoint", with_private: bool = False
) -> Running | None:
    """Return the one engine or server that a command can use, or None if there is none.

    A server counts instead of its engine. model: which it has to serve; None: any. endpoint_flag:
    the command's, for errors. with_private: also engines that other programs have launched for
    themselves.

    Raises:
        ConfigError: there are several, which the error lists; or see `all_running`.
    """
    running = all_running()
    served = {endpoint for one in running if one.kind == "server" for endpoint in one.endpoints}
    found = [
        one
        for one in running
        if model in (None, one.model, *one.served_model_names)
        and (one.kind == "server" or one.address not in served)
        and (one.kind == "server" or with_private or one.launched_by is None)
    ]
    if len(found) > 1:
        lines = [f"  {one.flag(endpoint_flag)}  ({one.kind}, {one.model}, pid {one.pid})"
                 for one in found]  # fmt: skip
        raise ConfigError("\n".join([f"{len(found)} of your programs serve; choose one:", *lines]))
    return found[0] if found else None
