"""The lock: one engine per endpoint, in a directory that is the user's alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nanocore.protocol.errors import AddressInUseError, ConfigError
from nanocore.system.endpoint_lock import EndpointLock

HOLDER = """
import sys
from nanocore.system.endpoint_lock import EndpointLock
lock = EndpointLock(sys.argv[1])
print("locked", flush=True)
sys.stdin.read()
"""


def _endpoint(directory: Path) -> str:
    return f"ipc://{directory}/engine.sock"


def _leave_socket(path: Path) -> None:
    """What an engine that was killed leaves behind."""
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


@pytest.fixture
def nested(short_path: Path) -> Path:
    """A directory that does not exist, in one that does not either."""
    return short_path / "nanocore" / "default"


def test_the_lock_makes_the_directory_and_its_parent_private(nested: Path) -> None:
    lock = EndpointLock(_endpoint(nested))
    assert nested.stat().st_mode & 0o777 == 0o700
    assert nested.parent.stat().st_mode & 0o777 == 0o700
    assert lock.path == nested / "engine.sock"
    lock.release()


def test_the_lock_file_is_private_and_names_the_holder(short_path: Path) -> None:
    lock = EndpointLock(_endpoint(short_path))
    lock_file = short_path / "engine.lock"
    assert lock_file.read_text() == f"{os.getpid()}\n"
    assert lock_file.stat().st_mode & 0o077 == 0
    lock.release()


def test_a_second_lock_is_refused_with_the_holders_pid(endpoint: str) -> None:
    lock = EndpointLock(endpoint)
    with pytest.raises(AddressInUseError, match=f"process {os.getpid()}:") as caught:
        EndpointLock(endpoint)
    assert endpoint in str(caught.value)
    assert "--listen" in str(caught.value)
    lock.release()


def test_a_refused_lock_leaves_the_holders_pid_and_socket_in_place(
    endpoint: str, short_path: Path
) -> None:
    lock = EndpointLock(endpoint)
    _leave_socket(lock.path)
    for _ in range(2):
        with pytest.raises(AddressInUseError, match=f"process {os.getpid()}:"):
            EndpointLock(endpoint)
    assert lock.path.exists()
    assert (short_path / "engine.lock").read_text() == f"{os.getpid()}\n"
    lock.release()


def test_two_endpoints_of_one_directory_do_not_exclude_each_other(short_path: Path) -> None:
    first = EndpointLock(f"ipc://{short_path}/a.sock")
    second = EndpointLock(f"ipc://{short_path}/b.sock")
    first.release()
    second.release()


def test_release_removes_the_socket_file_and_frees_the_endpoint(endpoint: str) -> None:
    lock = EndpointLock(endpoint)
    _leave_socket(lock.path)
    lock.release()
    assert not lock.path.exists()
    EndpointLock(endpoint).release()


def test_releasing_twice_does_not_touch_the_next_holders_socket(endpoint: str) -> None:
    first = EndpointLock(endpoint)
    first.release()
    second = EndpointLock(endpoint)
    _leave_socket(second.path)
    first.release()
    assert second.path.exists()
    with pytest.raises(AddressInUseError):
        EndpointLock(endpoint)
    second.release()


def test_another_process_excludes_us_until_it_dies_and_leaves_only_stale_files(
    endpoint: str, short_path: Path
) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(AddressInUseError, match=f"process {holder.pid}:"):
            EndpointLock(endpoint)
        holder.kill()
    _leave_socket(short_path / "engine.sock")
    lock = EndpointLock(endpoint)
    assert not lock.path.exists()
    assert (short_path / "engine.lock").read_text() == f"{os.getpid()}\n"
    lock.release()


def test_a_longer_stale_pid_is_overwritten_whole(endpoint: str, short_path: Path) -> None:
    (short_path / "engine.lock").write_text("12345678901234567890\n")
    lock = EndpointLock(endpoint)
    assert (short_path / "engine.lock").read_text() == f"{os.getpid()}\n"
    lock.release()


def test_a_socket_that_somebody_serves_without_a_lock_is_not_taken_away(
    endpoint: str, short_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(short_path / "engine.sock"))
        other.listen()
        with pytest.raises(AddressInUseError, match="without a lock"):
            EndpointLock(endpoint)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(short_path / "engine.sock"))


def _write_notes(path: Path) -> None:
    path.write_text("what nobody has a copy of\n")


STRANGE: dict[str, Callable[[Path], None]] = {
    "a file": _write_notes,
    "an empty file": Path.touch,
    "a directory": Path.mkdir,
    "a fifo": os.mkfifo,
    "a symlink": lambda path: path.symlink_to(path.parent / "elsewhere"),
    "a dangling symlink": lambda path: path.symlink_to(path.parent / "nowhere"),
}


@pytest.mark.parametrize("what", STRANGE)
def test_what_lies_in_the_sockets_place_and_is_none_is_left_alone(
    endpoint: str, short_path: Path, what: str
) -> None:
    path = short_path / "engine.sock"
    _write_notes(short_path / "elsewhere")
    STRANGE[what](path)
    before = path.lstat()
    with pytest.raises(ConfigError, match=r"engine\.sock exists and is not a socket") as caught:
        EndpointLock(endpoint, "--some-endpoint")
    assert "choose another endpoint with --some-endpoint" in str(caught.value)
    after = path.lstat()
    assert (after.st_ino, after.st_mode, after.st_size) == (
        before.st_ino,
        before.st_mode,
        before.st_size,
    )
    (short_path / "engine.sock").rename(short_path / "away")
    EndpointLock(endpoint).release()


@pytest.mark.parametrize("what", sorted(STRANGE.keys() - {"an empty file"}))
def test_what_lies_in_the_locks_place_and_is_no_lock_is_left_alone(
    endpoint: str, short_path: Path, what: str
) -> None:
    """`--listen ipc:///project/poetry.sock` would have cost a project its poetry.lock."""
    path = short_path / "engine.lock"
    _write_notes(short_path / "elsewhere")
    STRANGE[what](path)
    before = path.lstat()
    with pytest.raises(ConfigError, match=r"engine\.lock") as caught:
        EndpointLock(endpoint)
    assert "choose another endpoint with --listen" in str(caught.value)
    assert path.lstat().st_ino == before.st_ino
    assert path.lstat().st_size == before.st_size
    assert "copy" in (short_path / "elsewhere").read_text()


def test_a_place_that_cannot_be_written_to_is_a_config_error(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(path: Path, *_: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", deny)
    with pytest.raises(ConfigError, match=r"engine\.lock: Permission denied; choose another"):
        EndpointLock(endpoint)


def test_a_symlinked_directory_is_refused(short_path: Path) -> None:
    (short_path / "real").mkdir(mode=0o700)
    (short_path / "link").symlink_to(short_path / "real")
    with pytest.raises(ConfigError, match="a symlink is not followed"):
        EndpointLock(_endpoint(short_path / "link"))
    assert list((short_path / "real").iterdir()) == []


def test_a_symlink_to_nothing_is_refused(short_path: Path) -> None:
    (short_path / "link").symlink_to(short_path / "nothing")
    with pytest.raises(ConfigError):
        EndpointLock(_endpoint(short_path / "link"))


def test_a_file_in_the_directorys_place_is_refused(short_path: Path) -> None:
    (short_path / "file").touch()
    with pytest.raises(ConfigError):
        EndpointLock(_endpoint(short_path / "file"))


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o701, 0o710])
def test_a_directory_open_to_others_is_refused_with_its_mode(short_path: Path, mode: int) -> None:
    directory = short_path / "open"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.* use 0700") as caught:
        EndpointLock(_endpoint(directory))
    assert str(directory) in str(caught.value)
    assert list(directory.iterdir()) == []


def test_another_users_directory_is_refused(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {owner}, not to user {owner + 1}"):
        EndpointLock(endpoint)


def test_a_directory_that_others_could_replace_is_refused(short_path: Path) -> None:
    """Whoever may write to the parent may rename our directory away and put up his own."""
    parent = short_path / "parent"
    parent.mkdir()
    parent.chmod(0o777)  # no sticky bit, unlike /tmp
    with pytest.raises(ConfigError, match="parent"):
        EndpointLock(_endpoint(parent / "default"))


def test_a_path_that_cannot_be_made_is_a_config_error(short_path: Path) -> None:
    (short_path / "file").touch()
    with pytest.raises(ConfigError):
        EndpointLock(_endpoint(short_path / "file" / "default"))
