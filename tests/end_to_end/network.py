"""Two hosts with a cable between them: network namespaces, whose packets can be made to vanish.

Made with iproute2 alone. A host that is to hear nothing is given a wrong hardware address for at
the other end, so that what is sent to it is lost without a word, as in a network that is gone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count

import pytest

_NUMBERS = count()
_NOWHERE = "02:00:00:00:00:01"


@dataclass(frozen=True)
class Host:
    """One end. namespace: its name. device, address: of its end of the cable."""

    namespace: str
    device: str
    address: str

    def command(self, *command: str) -> list[str]:
        """A command line that runs another on this host."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def lose_all_sent_to(self, other: Host) -> None:
        """From now on."""
        neighbour = ("neigh", "replace", other.address, "lladdr", _NOWHERE, "dev", self.device)
        _ip("-n", self.namespace, *neighbour, "nud", "permanent")

    def reset(self, other: Host) -> None:
        """End all TCP connections to another host, by RST; it hears of that."""
        command = self.command("ss", "--kill", "--tcp", "dst", other.address)
        subprocess.run(command, check=True, capture_output=True)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Skips the test where namespaces cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("ip (iproute2) is not installed")
    number = f"{os.getpid()}{next(_NUMBERS)}"
    hosts = [
        Host(f"nc{end}{number}", f"nc{end}{number}", f"10.99.0.{i}")
        for i, end in [(1, "a"), (2, "b")]
    ]
    one, other = hosts
    try:
        try:
            for host in hosts:
                _ip("netns", "add", host.namespace)
            ends = ("type", "veth", "peer", "name", other.device, "netns", other.namespace)
            _ip("link", "add", one.device, "netns", one.namespace, *ends)
            for host in hosts:
                _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.device)
                for device in (host.device, "lo"):
                    _ip("-n", host.namespace, "link", "set", device, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        yield one, other
    finally:
        for host in hosts:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", host.namespace)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
