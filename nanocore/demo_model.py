"""Where the demo model is, which is served when no model is named.

It is a distribution of its own (`demo_model/` in the repository), so that clients stay small. Its
package is looked for and not imported: there is no code in it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from nanocore.protocol.errors import ConfigError


def demo_model_folder() -> Path:
    """The installed demo model's folder.

    Raises:
        ConfigError: it is not installed.
    """
    spec = importlib.util.find_spec("nanocore_demo_model")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "no --model given, and the demo model is not installed: name a model, or in the "
            "repository, pip install ./demo_model"
        )
    return Path(spec.origin).parent
