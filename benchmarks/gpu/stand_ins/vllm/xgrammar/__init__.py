"""An empty package by the name of one that vLLM imports for structured output, which is not used.

The real one is 45 MB. Any attribute is a class, for annotations and `isinstance`.
"""

from __future__ import annotations

__version__ = "0.0.0"


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
