"""Modules of ours as processes of their own, which run the nanocore that starts them.

`python -m` would look in the working directory first: what lies there, a checkout of ours or a file
called random.py, would run in the child and not in its parent. So a child begins with this file,
by its path and without any script's folder (`-P`). It makes the package it is in `nanocore`,
wherever the parent imported that from; all else is found as the environment says.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from typing import Final

_FILE: Final = os.path.abspath(__file__)
_PACKAGE: Final = os.path.dirname(os.path.dirname(_FILE))


def module_command(module: str) -> tuple[str, ...]:
    """The command line that runs a module as `__main__`; what is added are its arguments.

    What the parent was told not to look at, its environment or its user's packages, is not looked
    at by the child.
    """
    flags = [
        *(["-E"] if sys.flags.ignore_environment else []),
        *(["-s"] if sys.flags.no_user_site else []),
    ]
    return sys.executable, "-P", *flags, _FILE, module


def _run() -> None:
    """Be the module that the first argument names."""
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
