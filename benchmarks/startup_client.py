"""What `startup.py` starts: a user's first script, which tells when it is where.

    python benchmarks/startup_client.py

Prints, as lines of JSON, monotonic times (one clock for all processes of the host): after the
imports, when the engine is there, and when the first token is.
"""

import json
import time

from nanocore.client import LLM, SamplingParams

QUESTION = [{"role": "user", "content": "What is 123 + 456?"}]


def tell(event: str) -> None:
    """Say that this has happened, now."""
    print(json.dumps({"event": event, "time_s": time.monotonic()}), flush=True)


def main() -> None:
    """Start an engine and ask for one token."""
    tell("imported")
    with LLM() as llm:
        tell("connected")
        (output,) = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        tell("first token")
        assert len(output.outputs[0].token_ids) == 1


if __name__ == "__main__":
    main()
