"""Trials in processes: what never ends, takes all memory or crashes costs its own request alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import Queue

import pytest

from nanocore.engine_core.structured.compilation import CompiledGrammar, compile_text
from nanocore.engine_core.structured.grammars import Grammars
from nanocore.engine_core.structured.matcher import Compiled
from nanocore.engine_core.structured.trial_messages import NUM_TRIALS, too_complex
from nanocore.engine_core.structured.trial_process import TrialProcess
from nanocore.protocol.errors import EngineOverloadedError, InvalidRequestError
from nanocore.protocol.structured_outputs import StructuredOutputs
from tests.campaign import in_campaign
from tests.end_to_end.rank_processes import child_pids
from tests.engine_core.structured.evil_inputs import EVIL_INPUTS
from tests.engine_core.structured.walks import DEMO_MODEL, allowed, demo_vocabulary

WAIT_S = 120
PRIMES = (7, 11, 13, 17, 19, 23, 29, 31)
ENDLESS = StructuredOutputs(
    grammar="start: A\nA: " + " & ".join(f"/([a-z]{{{prime}}})*/" for prime in PRIMES)
)
"""An automaton of as many states as the product of these."""
FOUR_HUNDRED_PATTERNS = json.dumps(
    {
        "properties": {
            f"p{i}": {"type": "string", "pattern": f"^(a|b)*{i}(x{{1,300}}y){{1,300}}$"}
            for i in range(400)
        }
    }
)


@pytest.fixture(scope="module")
def trials() -> Iterator[TrialProcess]:
    process = TrialProcess(DEMO_MODEL, 1030, [2])
    yield process
    process.close()


def want(name: str) -> StructuredOutputs:
    return StructuredOutputs(choice=[name])


def is_running(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def ended_by(trials: TrialProcess, number: int) -> str:
    """What is told of a trial whose process is ended by a signal in its midst."""
    answers: Queue[str] = Queue()

    def ask() -> None:
        try:
            answers.put(trials.run(0, ENDLESS))
        except InvalidRequestError as error:
            answers.put(str(error))

    before = busy_ticks(trials)
    thread = threading.Thread(target=ask)
    thread.start()
    while not (
        busy := [pid for pid, t in busy_ticks(trials).items() if t > before.get(pid, 0) + 5]
    ):
        assert thread.is_alive()
    os.kill(busy[0], number)
    thread.join(WAIT_S)
    return answers.get(timeout=WAIT_S)


def busy_ticks(trials: TrialProcess) -> dict[int, int]:
    """CPU time of each trial's process, in 1/100 s."""
    ticks = {}
    for pid in child_pids(trials.pid):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ticks[pid] = int(fields[11]) + int(fields[12])
    return ticks


def test_what_passes_compiles_to_what_was_tried(trials: TrialProcess) -> None:
    vocabulary = demo_vocabulary()
    grammar = compile_text(vocabulary, trials.run(0, want("a")))
    assert vocabulary.tokenizer.decode_str(allowed(vocabulary, grammar.matcher())) == "a"


def test_a_refusal_comes_as_it_is(trials: TrialProcess) -> None:
    with pytest.raises(InvalidRequestError, match="json is not JSON"):
        trials.run(1, StructuredOutputs(json="{"))


def test_a_trial_that_does_not_end_is_refused_and_the_next_is_served(
    trials: TrialProcess,
) -> None:
    with pytest.raises(InvalidRequestError, match="more than 1 s of CPU time; make it simpler"):
        trials.run(0, ENDLESS)
    assert trials.run(0, want("a"))
    assert trials.run(1, want("b"))


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (signal.SIGSEGV, "takes more stack than there is"),
        (signal.SIGKILL, "MiB of memory"),
        (signal.SIGABRT, "MiB of memory"),
        (signal.SIGILL, "an error of the engine"),
    ],
)
def test_a_trial_that_crashes_is_refused_and_the_next_is_served(
    trials: TrialProcess, number: int, text: str
) -> None:
    told = ended_by(trials, number)
    assert told == too_complex(ENDLESS, number)
    assert text in told
    assert trials.run(0, want("a"))


MEMORY_SCRIPT = """
import sys
from nanocore.engine_core.structured import trials
from nanocore.engine_core.structured.threads import start_thread
from tests.engine_core.structured.test_trials import ENDLESS
from tests.engine_core.structured.walks import demo_vocabulary
trials.MEMORY_LIMIT_MIB, trials.CPU_LIMIT_S = int(sys.argv[1]), 60
vocabulary, verdicts = demo_vocabulary(), []
trial = trials.Trial(1, ENDLESS)
start_thread(lambda: verdicts.append(trials._verdict(vocabulary, trial)), "trial").join()
sys.exit(-verdicts[0].signal)
"""


def test_a_trial_that_takes_all_memory_ends_at_its_limit() -> None:
    """With 8 MiB in place of 512, and a minute of CPU time: it is memory that ends it."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, "8"], capture_output=True, check=False
    )
    assert done.returncode in (-signal.SIGABRT, 256 - signal.SIGABRT), done.stderr


def test_one_that_is_killed_before_its_trial_leaves_it_to_the_next(trials: TrialProcess) -> None:
    assert trials.run(0, want("a"))
    for pid in child_pids(trials.pid):
        os.kill(pid, signal.SIGKILL)
    for place in range(NUM_TRIALS):
        assert trials.run(place, want("b"))


def test_a_process_that_is_gone_is_told_of_and_started_again() -> None:
    grammars = Grammars(demo_vocabulary(), trials := TrialProcess(DEMO_MODEL, 1030, [2]))
    done: Queue[Compiled] = Queue()
    grammars.compile(want("a"), done.put)
    assert isinstance(done.get(timeout=WAIT_S), CompiledGrammar)
    before = trials.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    results: list[Compiled] = []
    while not results or isinstance(results[-1], EngineOverloadedError):
        grammars.compile(want("b"), done.put)
        results.append(done.get(timeout=WAIT_S))
    assert isinstance(results[-1], CompiledGrammar)
    assert len(results) > 1
    assert trials.pid != before
    assert grammars.close()
    assert trials.pid is None


def test_closing_ends_a_trial_in_its_midst() -> None:
    grammars = Grammars(demo_vocabulary(), trials := TrialProcess(DEMO_MODEL, 1030, [2]))
    done: Queue[Compiled] = Queue()
    grammars.compile(want("a"), done.put)
    assert isinstance(done.get(timeout=WAIT_S), CompiledGrammar)
    pids = child_pids(trials.pid)
    grammars.compile(ENDLESS, done.put)
    assert grammars.close()
    assert done.empty()
    while any(is_running(pid) for pid in pids):
        pass


@pytest.mark.parametrize(
    "wanted",
    in_campaign(
        StructuredOutputs(regex="(a{1000}){990}1"),
        StructuredOutputs(regex=".?" * 900),
        StructuredOutputs(json=FOUR_HUNDRED_PATTERNS),
        *(StructuredOutputs(**{kind: text}) for kind, text in EVIL_INPUTS.values()),  # type: ignore[arg-type]
    ),
    ids=lambda wanted: wanted.kind,
)
def test_no_evil_input_outlives_its_trial(trials: TrialProcess, wanted: StructuredOutputs) -> None:
    before = trials.pid
    with suppress(InvalidRequestError):
        assert trials.run(0, wanted)
    assert trials.pid == before
    assert trials.run(0, want("a"))
