"""`trials` with other limits: a JSON object of their names in the environment's TRIAL_LIMITS."""

from __future__ import annotations

import json
import os

from nanocore.engine_core.structured import trials

if __name__ == "__main__":
    for name, value in json.loads(os.environ["TRIAL_LIMITS"]).items():
        assert hasattr(trials, name)
        setattr(trials, name, value)
    trials.main()
