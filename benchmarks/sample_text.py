"""A real text and the tokenizer of a real model, for measurements that need no model."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

TEXT = (
    "An engine keeps the keys and values of every token it has read. When two questions begin "
    "alike, the second one should not pay for the first part again: the blocks are hashed, found, "
    "and shared. In 2024 a busy server answered 1,250 requests per minute; today the same machine "
    "answers 4,800. Café, naïve, façade and 東京 need more than one byte per letter, so the "
    "decoder holds a token back until its bytes are whole. def step(self): return "
    "self.schedule() — and so on. "
)
"""Words, numbers, code, and letters of several bytes."""


def demo_folder() -> Path:
    """The bundled demo model's folder."""
    return Path(str(resources.files("nanocore") / "demo_model"))
