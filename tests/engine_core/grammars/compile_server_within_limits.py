"""`compile_server` with other limits: a JSON object of their names in the environment."""

from __future__ import annotations

import json
import os

from nanocore.engine_core.grammars import compile_server

if __name__ == "__main__":
    for name, value in json.loads(os.environ["TRIAL_LIMITS"]).items():
        assert hasattr(compile_server, name)
        setattr(compile_server, name, value)
    compile_server.main()
