"""Runs a document as a reader would: `python -m tests.docs.run_page docs/quickstart.md`.

In namespaces of its own: port 8000 and the user's endpoint are free there, nothing outside can be
reached, and whatever a block started ends with the page.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.docs.blocks import ROOT, blocks

NAMESPACES = ["unshare", "-r", "-n", "-p", "-f", "--mount-proc", "--kill-child"]
_INSIDE = "--inside"
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSIFADDR, _IFF_UP = 0x8913, 0x8914, 0x8916, 1
EXAMPLE_ADDRESS = "192.0.2.7"
"""What documents call this machine: one of those that are kept for examples."""


def in_namespaces(page: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a page; what is printed says what was wrong, with exit code 1."""
    command = [*NAMESPACES, sys.executable, "-m", "tests.docs.run_page", _INSIDE, page]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def are_possible() -> bool:
    """Whether this machine lets us have the namespaces."""
    try:
        return (
            subprocess.run([*NAMESPACES, "true"], capture_output=True, check=False).returncode == 0
        )
    except FileNotFoundError:
        return False


def _raise_network() -> None:
    """The loopback device, with the documents' address beside its own."""
    with socket.socket() as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request)
        flags = struct.unpack("16sH14x", answer)[1] | _IFF_UP
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags))
        address = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(EXAMPLE_ADDRESS))
        fcntl.ioctl(any_socket, _SIOCSIFADDR, struct.pack("16s16s", b"lo:1", address))


def _play(page: str) -> int:
    from tests.docs.session import BlockFailed, Session

    with tempfile.TemporaryDirectory(prefix="nc-", dir="/tmp") as place:
        session = Session(Path(place))
        try:
            for block in blocks(page):
                begun_s = time.monotonic()
                session.play(block)
                if block.is_run:
                    print(f"{block}: {time.monotonic() - begun_s:.1f} s", flush=True)
            session.end()
        except BlockFailed as error:
            print(error)
            return 1
    return 0


def main(arguments: list[str]) -> int:
    """Run the pages that are named; the exit code is 0 if all do what they say."""
    if arguments[:1] == [_INSIDE]:
        _raise_network()
        return _play(arguments[1])
    codes = []
    for page in arguments:
        command = [*NAMESPACES, sys.executable, "-m", "tests.docs.run_page", _INSIDE, page]
        codes.append(subprocess.run(command, check=False).returncode)
    return max(codes, default=0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
