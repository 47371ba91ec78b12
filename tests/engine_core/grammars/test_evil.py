"""Input made to break the engine costs its own request an error, or is served; nothing dies."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.campaign import in_campaign
from tests.engine_core.grammars.evil_inputs import EVIL_INPUTS

QUICK = [
    "json_ref_to_itself", "json_refs_chained_bare", "json_refs_doubling", "json_max_items_huger",
    "json_guidance_separator", "json_array_30000", "json_nul_and_controls", "json_digits_5000",
    "json_multiples_of_all", "regex_groups_30000", "regex_optional_dots", "regex_empty",
    "regex_nul", "regex_unicode_classes", "grammar_parentheses_30000", "grammar_surrogate",
    "grammar_rules_chained_3700", "grammar_terminals_renamed", "grammar_rules_overlapping",
    "grammar_negations", "grammar_json_deep_100", "grammar_token_any", "grammar_stop",
]  # fmt: skip
"""Those which crashed something, or nearly, while this was written, as far as they are quick."""

SCRIPT = """
import sys
from nanocore.system.large_stack_threads import start_thread
from nanocore.protocol.errors import InvalidRequestError
from tests.engine_core.grammars.evil_inputs import EVIL_INPUTS
from tests.engine_core.grammars.walks import allowed, compiled, demo_vocabulary
vocabulary = demo_vocabulary()
names = sys.argv[1:]
answers = []

def work():
    for name in names:
        kind, text = EVIL_INPUTS[name]
        try:
            matcher = compiled(vocabulary, **{kind: text}).matcher()
            for step in range(30):
                tokens = allowed(vocabulary, matcher)
                assert tokens or matcher.failure, name
                matcher.append([tokens[step * 7919 % len(tokens)]])
            answers.append(matcher.failure or "served")
        except InvalidRequestError as error:
            answers.append(str(error))

start_thread(work, "work").join()
print(len(answers), max(map(len, answers)))
assert all(one == "served" or one.startswith("structured_outputs") for one in answers), answers
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "names", [QUICK, *in_campaign(sorted(EVIL_INPUTS.keys() - set(QUICK)))], ids=len
)
def test_no_evil_input_ends_the_process(names: list[str]) -> None:
    """Nor does llguidance print anything, nor is an answer longer than a few lines."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *names], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    count, longest = map(int, done.stdout.split())
    assert count == len(names)
    assert longest < 800
