"""CURVE keys: an engine's identity, its clients' keys, and the files that hold them.

An engine's folder holds engine.key, engine.key_secret and clients/NAME.key, its allow-list;
admins/NAME.key lists those of its clients that are administrators. A client's folder holds
client.key, client.key_secret and engine.key. The files are zmq.auth's certificates with keys as Z85
text of 40 characters. A secret that other users can read is refused, and so is an allow-list that
others can add to. A secret never appears in a message, a log or a repr.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import zmq

from nanocore.protocol.endpoint import TCP
from nanocore.protocol.errors import ConfigError, KeyFileError

ENGINE: Final = "engine"
CLIENT: Final = "client"
CLIENTS_FOLDER: Final = "clients"
ADMINS_FOLDER: Final = "admins"
ZAP_DOMAIN: Final = "nanocore"
_OTHERS_WRITE: Final = 0o022
_OTHERS_OPEN: Final = 0o077
_KEY: Final = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True, slots=True)
class EngineKeys:
    """An engine's key pair, Z85 text, and the folders with keys of its clients and of admins.

    Without a folder of admins no client is one.
    """

    public_key: bytes
    secret_key: bytes = field(repr=False)
    clients: Path
    admins: Path

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read an engine's folder.

        Raises:
            KeyFileError: a file is missing or none, or open to other users.
        """
        clients, admins = folder / CLIENTS_FOLDER, folder / ADMINS_FOLDER
        for directory in (folder, clients, *([admins] if admins.exists() else [])):
            _require_directory(directory, f"make it with `nanocore-keygen {folder}`")
            require_closed(directory, directory.stat(), _OTHERS_WRITE, "700")
        return cls(*_load_pair(folder, ENGINE), clients, admins)

    @property
    def options(self) -> dict[int, int | bytes]:
        """Socket options of the binding side."""
        return {
            zmq.CURVE_SERVER: 1,
            zmq.CURVE_SECRETKEY: self.secret_key,
            # Without these, libzmq admits every client while nobody answers for the allow-list.
            zmq.ZAP_DOMAIN: ZAP_DOMAIN.encode(),
            zmq.ZAP_ENFORCE_DOMAIN: 1,
        }


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """A client's key pair, and the key of the engine that it wants to talk to; Z85 text."""

    public_key: bytes
    secret_key: bytes = field(repr=False)
    engine_public_key: bytes

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read a client's folder.

        Raises:
            KeyFileError: a file is missing or none, or the secret is open to other users.
        """
        _require_directory(folder, "make it with `nanocore-keygen DIR --client NAME --out FOLDER`")
        require_closed(folder, folder.stat(), _OTHERS_WRITE, "700")
        pair = _load_pair(folder, CLIENT)
        return cls(*pair, load_public_key(folder / f"{ENGINE}.key"))

    @property
    def options(self) -> dict[int, int | bytes]:
        """Socket options of the connecting side."""
        return {
            zmq.CURVE_SERVERKEY: self.engine_public_key,
            zmq.CURVE_PUBLICKEY: self.public_key,
            zmq.CURVE_SECRETKEY: self.secret_key,
        }


def client_keys(endpoint: str, folder: str | Path | None) -> ClientKeys | None:
    """Load the keys that a client needs at an endpoint: none for ipc.

    Raises:
        ConfigError: TCP without a folder, or a folder without TCP. KeyFileError: as `load` says.
    """
    is_tcp = endpoint.startswith(TCP)
    if is_tcp and folder is None:
        raise ConfigError(
            f"endpoint {endpoint!r} needs curve_dir: the folder that `nanocore-keygen DIR --client "
            "NAME --out FOLDER` made where the engine runs; only ipc:// endpoints need no keys"
        )
    if folder is None:
        return None
    if not is_tcp:
        raise ConfigError(
            f"curve_dir {str(folder)!r} is for tcp://HOST:PORT; the endpoint {endpoint!r} is "
            "guarded by its directory's mode: leave curve_dir out"
        )
    return ClientKeys.load(Path(folder))


def load_public_key(path: Path) -> bytes:
    """Load the public key in a certificate file.

    Raises:
        KeyFileError: the file is missing, holds no key, or can be changed by other users.
    """
    return _load(path)[0]


def create_key_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """Create name.key and, readable by its owner alone, name.key_secret; return their paths.

    Raises:
        KeyFileError: one of them exists, or cannot be written.
    """
    from zmq.auth.certs import create_certificates  # for TCP alone

    public, secret = folder / f"{name}.key", folder / f"{name}.key_secret"
    for path in (public, secret):
        if path.exists():
            raise KeyFileError(f"{path} exists, and keys are never overwritten: remove it first")
    try:
        # In a private folder first: nobody else sees the secret, and a link overwrites nothing.
        with tempfile.TemporaryDirectory(prefix=".keygen-", dir=folder) as scratch:
            made_public, made_secret = create_certificates(scratch, name)
            os.chmod(made_public, 0o644)
            os.chmod(made_secret, 0o600)
            os.link(made_secret, secret)
            os.link(made_public, public)
    except OSError as error:
        raise KeyFileError(f"{folder}: cannot write {name}'s keys: {error.strerror}") from None
    return public, secret


def _load(path: Path) -> tuple[bytes, bytes | None]:
    from zmq.auth.certs import load_certificate  # for TCP alone

    try:
        if not path.exists():
            raise KeyFileError(f"key file {path} is missing: nanocore-keygen makes it")
        require_closed(path, path.stat(), _OTHERS_WRITE, "600")
        public, secret = load_certificate(path)
    except KeyFileError:
        raise
    except OSError as error:
        raise KeyFileError(f"key file {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise KeyFileError(f"key file {path} holds no public key: make a new one") from None
    for kind, key in (("public", public), ("secret", secret)):
        if key is not None and not _KEY.fullmatch(key):
            raise KeyFileError(
                f"key file {path}: its {kind} key is not Z85 text of 40 characters: make a new one"
            )
    return public, secret


def _load_pair(folder: Path, name: str) -> tuple[bytes, bytes]:
    path = folder / f"{name}.key_secret"
    public, secret = _load(path)
    require_closed(path, path.stat(), _OTHERS_OPEN, "600")
    if secret is None or zmq.curve_public(secret) != public:
        raise KeyFileError(f"key file {path} holds no secret key that fits its public one")
    public_path = folder / f"{name}.key"
    # A client's own public key stands in the other file, too; it need not keep this one.
    if (name != CLIENT or public_path.exists()) and load_public_key(public_path) != public:
        raise KeyFileError(f"key files {path} and {name}.key are of different pairs")
    return public, secret


def _require_directory(path: Path, remedy: str) -> None:
    if not path.is_dir():
        raise KeyFileError(f"key folder {path} does not exist: {remedy}")


def require_closed(path: Path, info: os.stat_result, forbidden: int, mode: str) -> None:
    """Raise KeyFileError if other users can open or own a file. info: the file's. mode: a closed
    one."""
    if info.st_mode & forbidden:
        raise KeyFileError(
            f"{path} has mode {stat.S_IMODE(info.st_mode):04o}, open to other users: "
            f"chmod {mode} {path}"
        )
    if info.st_uid not in (0, os.getuid()):
        raise KeyFileError(
            f"{path} belongs to user {info.st_uid}, who is neither root nor user {os.getuid()}: "
            f"chown {os.getuid()} {path}"
        )
