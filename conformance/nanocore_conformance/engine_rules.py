"""All rules for engines, in the order in which they are run: importing the modules adds them."""

from __future__ import annotations

from nanocore_conformance import (  # noqa: F401 - they add their rules
    engine_connections,
    engine_control,
    engine_embeddings,
    engine_ends,
    engine_logprobs,
    engine_messages,
    engine_parameters,
    engine_requests,
    engine_resumed,
    engine_samples,
    engine_sampling,
    engine_sessions,
    engine_structured,
    engine_watched,
)
from nanocore_conformance.engine_under_test import ENGINE_RULES

__all__ = ["ENGINE_RULES"]
