"""What runs the blocks of one page: a folder, an environment, and what stays in the background.

The folder is new and empty but for the demo model at path/to/folder. A later sh block goes on in
the folder, and with the exported variables, that the one before it ended with.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

from tests.cli.served import DEMO
from tests.docs.blocks import Block
from tests.docs.output import is_as_said

PATIENCE_S = 300.0
_FOREIGN = ("NANOCORE_", "OPENAI_", "ANTHROPIC_", "HF_", "XDG_", "PYTEST_", "MAKE", "MFLAGS")
_SHELL = """\
[ ! -e "$PAGE/env" ] || . "$PAGE/env"
cd "$(cat "$PAGE/folder")"
trap 'export -p > "$PAGE/env"; pwd > "$PAGE/folder"' EXIT
. "$PAGE/block"
"""
_BACKGROUND = """\
[ ! -e "$PAGE/env" ] || . "$PAGE/env"
cd "$(cat "$PAGE/folder")"
. "$PAGE/block"
"""


class BlockFailed(Exception):
    """A block did not do what its page says."""


class Background:
    """A command that stays until the page's end. log: what it has printed so far."""

    def __init__(self, block: Block, command: list[str], environment: Mapping[str, str]) -> None:
        self.block = block
        self.log = ""
        self._text = block.markers["background"]
        self._seen = Event()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=dict(environment),
            start_new_session=True,
        )
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._seen.wait(PATIENCE_S) or self._text not in self.log:
            self._kill()
            raise BlockFailed(f"{block}: did not print {self._text!r}:\n{self.log}")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.log += line
            if self._text in line:
                self._seen.set()
        self._seen.set()

    def end(self) -> None:
        """As Ctrl-C does; an end that is not in order is a failure, too."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGINT)
        try:
            code = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._kill()
            raise BlockFailed(f"{self.block}: Ctrl-C does not end it:\n{self.log}") from None
        self._kill()
        if code not in (0, 130, -signal.SIGINT):
            raise BlockFailed(f"{self.block}: ended with {code}:\n{self.log}")

    def _kill(self) -> None:
        """All that is left of it."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Session:
    """Of one page. place: an empty folder, short enough for the paths of Unix sockets."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.folder = place / "page"
        for name in ("home", "run", "page/path/to"):
            (place / name).mkdir(mode=0o700, parents=True)
        (self.folder / "path" / "to" / "folder").symlink_to(DEMO)
        (place / "folder").write_text(str(self.folder))
        self._background: list[Background] = []
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
        self._environment = inherited | {
            "HOME": str(place / "home"),
            "XDG_RUNTIME_DIR": str(place / "run"),
            "PAGE": str(place),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
        }

    def play(self, block: Block) -> None:
        """Run it, or write its file.

        Raises:
            BlockFailed: it ended otherwise, or printed something else, than its page says.
        """
        if "file" in block.markers:
            path = self.folder / block.markers["file"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, "utf-8")
        elif not block.is_run:
            return
        elif "background" in block.markers:
            self._write(block)
            command = ["bash", "-euo", "pipefail", "-c", _BACKGROUND]
            self._background.append(Background(block, command, self._environment))
        else:
            self._run(block)

    def end(self) -> None:
        """End what is in the background, the last one first."""
        while self._background:
            self._background.pop().end()

    def _write(self, block: Block) -> None:
        (self._place / "block").write_text(block.text, "utf-8")

    def _run(self, block: Block) -> None:
        self._write(block)
        command = ["bash", "-euo", "pipefail", "-c", _SHELL]
        if block.language == "python":
            command = [sys.executable, "-c", block.text]
        try:
            done = subprocess.run(
                command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=self._environment,
                timeout=PATIENCE_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise BlockFailed(f"{block}: {error}{self._logs()}") from None
        told = f"\nstdout:\n{done.stdout}\nstderr:\n{done.stderr}{self._logs()}"
        wanted = int(block.markers.get("exit code", "0"))
        if done.returncode != wanted:
            raise BlockFailed(f"{block}: ended with {done.returncode}, not {wanted}{told}")
        if block.prints is not None and not is_as_said(done.stdout, block.prints):
            raise BlockFailed(f"{block}: the page says that it prints\n{block.prints}{told}")

    def _logs(self) -> str:
        return "".join(f"\nof {one.block}:\n{one.log}" for one in self._background)
