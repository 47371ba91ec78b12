"""`compile_process` with other limits: a JSON object of their names in the environment."""

from __future__ import annotations

import json
import os

from nanocore.engine_core.grammars import compile_process

if __name__ == "__main__":
    for name, value in json.loads(os.environ["TRIAL_LIMITS"]).items():
        assert hasattr(compile_process, name)
        setattr(compile_process, name, value)
    compile_process.main()
