"""One question without a terminal, and without the packages that a prompt needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.bench.fake_server import chat, serving

PROGRAM = """\
import sys
sys.modules["prompt_toolkit"] = sys.modules["rich"] = None
from nanocore.cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(("flags", "typed"), [(["-q", "hi"], ""), ([], "hi\n")])
def test_a_question_needs_nothing_to_prompt_with(flags: list[str], typed: str) -> None:
    with serving(lambda body: (200, chat(["a", "b"]))) as server:
        command = [sys.executable, "-c", PROGRAM, "chat", "--url", server.url, *flags]
        done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ab\n"), done.stderr
