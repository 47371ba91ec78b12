"""The SDK: text in, text out, over the wire. Needs no torch; imports only `nanocore.protocol`.

Its names are imported when they are first used: `nanocore serve` launches its engine with a module
of this package before it imports a client.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanocore.client.sdk import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name.startswith("__"):  # asked for by the import system
        raise AttributeError(name)
    return getattr(import_module("nanocore.client.sdk"), name)


def __dir__() -> list[str]:
    return [name for name in vars(import_module("nanocore.client.sdk")) if name[0] != "_"]
