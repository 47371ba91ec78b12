"""Child processes that run a module of the same nanocore as their parent, and die with it.

`python -m` would search the working directory first, where a checkout of nanocore or a file called
random.py may lie. So a child runs this file, by its path and without any script's folder (`-P`).
It imports the package around it as `nanocore`, as the parent did; the environment decides all else.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from typing import Final

_FILE: Final = os.path.abspath(__file__)
_PR_SET_PDEATHSIG: Final = 1
_PACKAGE: Final = os.path.dirname(os.path.dirname(_FILE))


def module_command(module: str) -> tuple[str, ...]:
    """Return the command that runs a module as `__main__`; append arguments.

    The child inherits the parent's -E and -s.
    """
    flags = [
        *(["-E"] if sys.flags.ignore_environment else []),
        *(["-s"] if sys.flags.no_user_site else []),
    ]
    return sys.executable, "-P", *flags, _FILE, module


def signal_at_parent_death(number: int) -> None:
    """Let the kernel send this signal when the thread that started this process ends.

    Raises:
        OSError: the system refuses.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process, so that it never replies; a debugger does not
    count."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
    except OSError:  # it has just ended, or there is no /proc
        return False


def _run() -> None:
    spec = importlib.util.spec_from_file_location(
        "nanocore", os.path.join(_PACKAGE, "__init__.py"), submodule_search_locations=[_PACKAGE]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["nanocore"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["nanocore"])
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run()
