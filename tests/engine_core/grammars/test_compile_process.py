"""The compile process: an endless, huge or crashing grammar costs its own request alone."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Queue

import pytest

from nanocore.engine_core.grammars import compile_process
from nanocore.engine_core.grammars.compilation import compile_text
from nanocore.engine_core.grammars.compile_process import NUM_WORKERS, CompileProcess, too_complex
from nanocore.engine_core.grammars.grammar_compiler import GrammarCompiler
from nanocore.engine_core.grammars.token_matcher import Compiled, CompiledGrammar
from nanocore.engine_core.grammars.token_table import TokenTable
from nanocore.protocol.errors import EngineOverloadedError, InvalidRequestError
from nanocore.protocol.structured_outputs import StructuredOutputs
from tests.campaign import in_campaign
from tests.end_to_end.rank_processes import child_pids
from tests.engine_core.grammars import compile_process_within_limits
from tests.engine_core.grammars.evil_inputs import EVIL_INPUTS
from tests.engine_core.grammars.walks import DEMO_MODEL, allowed, demo_vocabulary, source_of

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


def demo_process() -> CompileProcess:
    process = CompileProcess(source_of(DEMO_MODEL, 1030, [2]))
    process.start()
    return process


@pytest.fixture(scope="module")
def process() -> Iterator[CompileProcess]:
    process = demo_process()
    yield process
    process.close()


@pytest.fixture(scope="module")
def patient() -> Iterator[CompileProcess]:
    """One whose trials end by what is done to them alone."""
    limits = {"CPU_LIMIT_S": WAIT_S, "MEMORY_LIMIT_MIB": 2**20}
    with pytest.MonkeyPatch.context() as patch, trials_within(patch, **limits) as process:
        yield process


def want(name: str) -> StructuredOutputs:
    return StructuredOutputs(choice=[name])


def is_running(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def ended_by(process: CompileProcess, number: int, times: int = 1) -> str:
    """What is told of a trial whose process is ended by a signal in its midst, so many times."""
    answers: Queue[str] = Queue()

    def ask() -> None:
        try:
            answers.put(process.run(ENDLESS))
        except (InvalidRequestError, EngineOverloadedError) as error:
            answers.put(f"{type(error).__name__}: {error}")

    before = busy_ticks(process)
    thread = threading.Thread(target=ask)
    thread.start()
    for _ in range(times):
        while not (
            busy := [pid for pid, t in busy_ticks(process).items() if t > before.get(pid, 0) + 5]
        ):
            assert thread.is_alive()
        os.kill(busy[0], number)
        before[busy[0]] = 10**9
    thread.join(WAIT_S)
    return answers.get(timeout=WAIT_S)


def pid_of(process: CompileProcess) -> int | None:
    running = process._running
    return None if running is None else running.process.pid


def busy_ticks(process: CompileProcess) -> dict[int, int]:
    """CPU time of each trial's process, in 1/100 s."""
    ticks = {}
    for pid in child_pids(pid_of(process)):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ticks[pid] = int(fields[11]) + int(fields[12])
    return ticks


def test_what_passes_compiles_to_what_was_tried(process: CompileProcess) -> None:
    vocabulary = demo_vocabulary()
    grammar = compile_text(vocabulary, process.run(want("a"))[0])
    assert vocabulary.tokenizer.decode_str(allowed(vocabulary, grammar.matcher())) == "a"


def test_a_refusal_comes_as_it_is(process: CompileProcess) -> None:
    with pytest.raises(InvalidRequestError, match="json is not JSON"):
        process.run(StructuredOutputs(json="{"))


def test_a_trial_that_does_not_end_is_refused_and_the_next_is_served(
    process: CompileProcess,
) -> None:
    with pytest.raises(InvalidRequestError, match=r"more than 0\.5 s of CPU time; make it simpler"):
        process.run(ENDLESS)
    assert process.run(want("a"))
    assert process.run(want("b"))


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (signal.SIGSEGV, "takes more stack than there is"),
        (signal.SIGABRT, "takes more than 512 MiB of memory"),
    ],
)
def test_a_trial_that_crashes_twice_is_refused_and_the_next_is_served(
    patient: CompileProcess, number: int, text: str
) -> None:
    told = ended_by(patient, number, times=2)
    assert told == f"InvalidRequestError: {too_complex(ENDLESS, number)}"
    assert text in told
    assert patient.run(want("a"))


def test_a_trial_that_crashes_once_is_tried_again(process: CompileProcess) -> None:
    told = ended_by(process, signal.SIGSEGV)
    assert told == f"InvalidRequestError: {too_complex(ENDLESS, signal.SIGPROF)}"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGALRM, signal.SIGILL, signal.SIGSTOP])
def test_what_ends_a_trial_from_outside_is_no_refusal(patient: CompileProcess, number: int) -> None:
    told = ended_by(patient, number)
    assert "EngineOverloadedError: structured_outputs.grammar could not be compiled" in told
    assert patient.run(want("a"))


def test_a_model_whose_folder_is_gone_has_structured_outputs(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"model \xff")
    folder.symlink_to(DEMO_MODEL)
    source = source_of(folder, 1030, [2])
    folder.unlink()
    process = CompileProcess(source)
    try:
        assert process.run(want("a"))
        process._running.process.kill()  # type: ignore[union-attr]
        process._running.process.wait()  # type: ignore[union-attr]
        with pytest.raises(EngineOverloadedError):
            process.run(want("a"))
        assert process.run(want("a")), "it was started again"
    finally:
        process.close()
    assert TokenTable.load(source).vocab_size == 1030


@contextmanager
def trials_within(monkeypatch: pytest.MonkeyPatch, **limits: float) -> Iterator[CompileProcess]:
    """With these constants of `process` in place of its own."""
    command = (sys.executable, "-m", compile_process_within_limits.__name__)
    monkeypatch.setattr(compile_process, "_COMMAND", command)
    monkeypatch.setenv("TRIAL_LIMITS", json.dumps(limits))
    process = demo_process()
    try:
        yield process
    finally:
        process.close()


def test_one_process_serves_quick_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    with trials_within(monkeypatch, _QUICK_S=WAIT_S) as process:
        assert process.run(want("a"))
        first = set(child_pids(pid_of(process)))
        for name in "bcd":
            assert process.run(want(name))
        assert set(child_pids(pid_of(process))) == first


@pytest.mark.parametrize("limits", [{"_QUICK_S": 0}, {"_QUICK_S": WAIT_S, "_MAX_GROWTH_MIB": 0}])
def test_one_that_was_slow_or_grew_serves_no_other(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, float]
) -> None:
    with trials_within(monkeypatch, **limits) as process:
        for name in "abc":
            long = StructuredOutputs(choice=[f"{name}{i:x}" * 4 for i in range(4000)])
            while len(before := set(child_pids(pid_of(process)))) < NUM_WORKERS:
                pass
            assert process.run(long)
            while before <= set(child_pids(pid_of(process))):
                pass


def test_a_long_trial_gives_way_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with trials_within(monkeypatch, CPU_LIMIT_S=WAIT_S) as process:
        asking = threading.Thread(target=lambda: ended_of(process))
        asking.start()
        ours = os.getpriority(os.PRIO_PROCESS, 0)
        while max(map(niceness, child_pids(pid_of(process))), default=ours) <= ours:
            assert asking.is_alive()
        process.close()
        asking.join(WAIT_S)


def ended_of(process: CompileProcess) -> None:
    with pytest.raises(EngineOverloadedError):
        process.run(ENDLESS)


def niceness(pid: int) -> int:
    """The highest of a process's threads."""
    found = [-20]
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found.append(int(stat.read_text().rpartition(")")[2].split()[16]))
    return max(found)


MEMORY_SCRIPT = """
import sys
from nanocore.engine_core.grammars import compile_process as process
from nanocore.system.large_stack_threads import start_thread
from tests.engine_core.grammars.test_compile_process import ENDLESS
from tests.engine_core.grammars.walks import load_table, source_of
from tests.engine_core.grammars.walks import demo_vocabulary
process.MEMORY_LIMIT_MIB, process.CPU_LIMIT_S = int(sys.argv[1]), 60
vocabulary, results = demo_vocabulary(), []
start_thread(lambda: results.append(process._compile(vocabulary, ENDLESS)), "trial").join()
sys.exit(-results[0].signal)
"""


def test_a_trial_that_takes_all_memory_ends_at_its_limit() -> None:
    """With 8 MiB in place of 512, and a minute of CPU time: it is memory that ends it."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, "8"], capture_output=True, check=False
    )
    assert done.returncode in (-signal.SIGABRT, 256 - signal.SIGABRT), done.stderr


def test_one_that_is_killed_before_its_trial_leaves_it_to_the_next(process: CompileProcess) -> None:
    assert process.run(want("a"))
    for pid in child_pids(pid_of(process)):
        os.kill(pid, signal.SIGKILL)
    for _ in range(NUM_WORKERS):
        assert process.run(want("b"))


def test_a_process_that_is_gone_is_told_of_and_started_again() -> None:
    grammars = GrammarCompiler(demo_vocabulary, process := demo_process())
    done: Queue[Compiled] = Queue()
    grammars.compile(want("a"), done.put)
    assert isinstance(done.get(timeout=WAIT_S), CompiledGrammar)
    before = pid_of(process)
    assert before is not None
    places = [os.pidfd_open(pid) for pid in child_pids(before)]
    os.kill(before, signal.SIGKILL)
    for place in places:  # each may answer until the kernel has ended it, too
        select.select([place], [], [])
        os.close(place)
    results: list[Compiled] = []
    while not results or isinstance(results[-1], EngineOverloadedError):
        grammars.compile(want("b"), done.put)
        results.append(done.get(timeout=WAIT_S))
    assert isinstance(results[-1], CompiledGrammar)
    assert len(results) > 1
    assert pid_of(process) != before
    grammars.close()
    assert pid_of(process) is None


def test_processes_that_are_stopped_are_told_of_and_started_again(
    process: CompileProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_process, "_LOOK_S", 0.02)
    assert process.run(want("a"))
    pid = pid_of(process)
    assert pid is not None
    for one in [pid, *child_pids(pid)]:
        os.kill(one, signal.SIGSTOP)
    with pytest.raises(EngineOverloadedError, match="gone or hangs"):
        process.run(want("b"))
    assert pid_of(process) != pid
    assert process.run(want("b"))


def test_closing_ends_a_trial_in_its_midst() -> None:
    grammars = GrammarCompiler(demo_vocabulary, process := demo_process())
    done: Queue[Compiled] = Queue()
    grammars.compile(want("a"), done.put)
    assert isinstance(done.get(timeout=WAIT_S), CompiledGrammar)
    pids = child_pids(pid_of(process))
    grammars.compile(ENDLESS, done.put)
    grammars.close()
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
def test_no_evil_input_outlives_its_trial(
    process: CompileProcess, wanted: StructuredOutputs
) -> None:
    before = pid_of(process)
    with suppress(InvalidRequestError):
        assert process.run(wanted)
    assert pid_of(process) == before
    assert process.run(want("a"))
