"""An engine, and the client that launches it, without packages that only some features need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from nanocore.demo_model import demo_model_folder

ABSENT = (
    "llguidance", "httptools", "uvloop", "prometheus_client", "opentelemetry",
    "prompt_toolkit", "rich", "aiohttp", "transformers",
)  # fmt: skip
SCRIPT = """
import sys
from concurrent.futures import ThreadPoolExecutor
from nanocore.client import LLM, InvalidRequestError, SamplingParams, StructuredOutputsParams

PLAIN = SamplingParams(temperature=0, max_tokens=8)
QUESTION = [{"role": "user", "content": "What is 123 + 456?"}]
llm = LLM(sys.argv[1])

def refused(ask):
    try:
        ask()
    except InvalidRequestError as error:
        print(error)

print(llm.chat(QUESTION, PLAIN, use_tqdm=False)[0].outputs[0].text)
pool = ThreadPoolExecutor()
long = SamplingParams(max_tokens=64, ignore_eos=True)
beside = pool.submit(llm.generate, [[5] * 8], long, use_tqdm=False)
refused(lambda: llm.generate("1", SamplingParams(structured_outputs=StructuredOutputsParams(
    regex="a")), use_tqdm=False))
refused(lambda: llm.chat(QUESTION, PLAIN, response_format={"type": "json_object"}, use_tqdm=False))
print(len(beside.result()[0].outputs[0].token_ids))
print(llm.chat(QUESTION, PLAIN, use_tqdm=False)[0].outputs[0].text)
llm.close()
"""


def test_an_engine_without_llguidance_serves_all_but_structured_outputs(tmp_path: Path) -> None:
    hide = f"import sys\nsys.modules |= dict.fromkeys({ABSENT})"
    (tmp_path / "sitecustomize.py").write_text(hide)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(demo_model_folder())],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, refusal, of_chat, beside, last = done.stdout.splitlines()
    assert first == last != ""
    assert beside == "64"
    assert refusal == of_chat
    assert "structured_outputs: it cannot import the package llguidance" in refusal
    assert "leave them out, or pip install 'llguidance>=1.9,<2' where the engine runs" in refusal
    (line,) = [line for line in done.stderr.splitlines() if "llguidance" in line]
    assert line.endswith(refusal)
