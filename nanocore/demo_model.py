"""The demo model, which is served when no model is named.

It is a separate distribution (`demo_model/` in the repository), so that clients stay small.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from nanocore.protocol.errors import ConfigError


def demo_model_folder() -> Path:
    """Return the demo model's folder; raises ConfigError if it is not installed."""
    spec = importlib.util.find_spec("nanocore_demo_model")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "no --model given, and the demo model is not installed: name a model, or in the "
            "repository, pip install ./demo_model"
        )
    return Path(spec.origin).parent
