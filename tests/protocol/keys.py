"""Key folders of an engine and its clients, and a TCP port, for tests."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from nanocore.keygen import create_client, create_engine
from nanocore.protocol.sockets.curve import ClientKeys, EngineKeys


@dataclass(frozen=True)
class KeyFolders:
    """An engine's folder, in one with its clients' folders."""

    root: Path

    @property
    def engine(self) -> Path:
        """What --curve-dir names."""
        return self.root / "engine"

    @property
    def engine_keys(self) -> EngineKeys:
        """The engine's keys."""
        return EngineKeys.load(self.engine)

    def client(self, name: str, is_admin: bool = False) -> Path:
        """A client's folder, made and put on the allow-list at its first use."""
        folder = self.root / name
        if not folder.exists():
            create_client(self.engine, name, folder, is_admin)
        return folder

    def client_keys(self, name: str) -> ClientKeys:
        """A client's keys."""
        return ClientKeys.load(self.client(name))

    def revoke(self, name: str) -> None:
        """Take a client off the allow-list."""
        (self.engine / "clients" / f"{name}.key").unlink()


def make_key_folders(root: Path) -> KeyFolders:
    """An engine's folder with an empty allow-list."""
    create_engine(root / "engine")
    return KeyFolders(root)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens at now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
