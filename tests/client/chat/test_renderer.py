"""The process in which templates run: what ends it, what survives it, and when it is gone."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from nanocore.client.chat import renderer
from nanocore.client.chat.renderer import MAX_MEMORY, Renderer, RenderProcessError
from nanocore.protocol.errors import InvalidRequestError

NOW = datetime(2025, 3, 9, 8, 7, 6, 54321)


def _attack(attack: str) -> str:
    return "{% if attack %}" + attack + "{% else %}fine{% endif %}"


@pytest.fixture
def short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shorter limit of CPU time, as tests wait for its end."""
    monkeypatch.setattr(renderer, "MAX_CPU_S", 0.3)


def _pid(rendering: Renderer) -> int:
    assert rendering._process is not None
    return rendering._process.pid


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "CPU"),
        ("{{ range(99999) | map('list') | list }}", "not iterable"),
        ("{% set x = 'x' * (10**8 * attack) %}{{ x | replace('x', 'xx') | length }}", "memory"),
        ("{{ 'a' * (10**9 + attack) }}", "memory"),
        ("{{ ('a,' * (10**8 * attack)) | list | length }}", "memory"),
        ("{{ [attack] * 10**9 }}", "memory"),
        ("{{ '%0999999999d' % attack }}", "memory"),
        ("{{ 'a' | center(10**9 * attack) }}", "memory"),
        ("{{ 'a\na' | indent(10**9 * attack) }}", "memory"),
        ("{{ (10 ** attack) ** (10 ** 8) }}", "CPU"),
        ("{% for i in range(99999) %}" + "x" * 100 + "{% endfor %}", "writes more than"),
        ("{% for i in range(99) %}{{ 'x' * 99999 }}{% endfor %}", "writes more than"),
        ("{{ range(10**12) }}", "Range too big"),
        ("{{ range(10**9) | list }}", "Range too big"),
        ("{{ range(10**9) | sort }}", "Range too big"),
        ("{{ range(10**9) | join }}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ lipsum(n=99999999) }}", "CPU"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    ],
)  # fmt: skip
def test_what_a_template_must_not_do_ends_in_an_error_and_the_next_prompt_is_good(
    attack: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What passes another limit may take CPU time before, and more of it on a busy machine.
    monkeypatch.setattr(renderer, "MAX_CPU_S", 0.3 if reason == "CPU" else 60.0)
    monkeypatch.setattr(renderer, "MAX_WALL_S", 120.0)
    rendering = Renderer(_attack(attack), "here")
    with pytest.raises(InvalidRequestError, match=reason):
        rendering.render({"attack": 1, "messages": []}, NOW)
    assert rendering.render({"attack": 0}, NOW) == "fine"


@pytest.mark.parametrize(
    "source",
    [
        "{{" + "(" * 30000 + "1" + ")" * 30000 + "}}",
        "{{" + "-" * 60000 + "1}}",
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
        "{{ 'a' * 10**9 }}",
        "{{ (10 ** 9) ** (10 ** 8) }}",
    ],
)
@pytest.mark.usefixtures("short_time")
def test_a_template_may_be_its_own_compilers_trouble(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="the chat template of here failed"):
        Renderer(source, "here").render({}, NOW)


def test_the_process_has_no_more_memory_than_it_is_granted() -> None:
    rendering = Renderer("{{ messages }}", "here")
    rendering.render({}, NOW)
    size = int(Path(f"/proc/{_pid(rendering)}/statm").read_text().split()[0]) * 4096
    limits = Path(f"/proc/{_pid(rendering)}/limits").read_text().splitlines()
    granted = next(line.split()[3] for line in limits if line.startswith("Max address space"))
    assert size <= int(granted) <= size + MAX_MEMORY


def test_one_process_serves_many_calls_and_threads() -> None:
    rendering = Renderer("{{ x }}", "here")
    rendering.render({"x": 0}, NOW)
    first = _pid(rendering)
    wrong: list[object] = []

    def work(number: int) -> None:
        for i in range(20):
            text = f"{number}/{i} " + "é\ud800" * number * 1000
            if rendering.render({"x": text}, NOW) != text:
                wrong.append((number, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert _pid(rendering) == first


def test_a_process_that_was_killed_is_started_anew() -> None:
    rendering = Renderer("fine", "here")
    rendering.render({}, NOW)
    os.kill(_pid(rendering), signal.SIGKILL)
    os.waitid(os.P_PID, _pid(rendering), os.WEXITED | os.WNOWAIT)
    assert rendering.render({}, NOW) == "fine"


def _kill(rendering: Renderer, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """End the process so that it is not noticed before something is written to it."""
    assert rendering._process is not None
    os.kill(_pid(rendering), number)
    monkeypatch.setattr(rendering._process, "poll", lambda: None)


def test_a_process_that_dies_of_its_template_names_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    rendering = Renderer("fine", "here")
    rendering.render({}, NOW)
    _kill(rendering, signal.SIGSEGV, monkeypatch)
    with pytest.raises(InvalidRequestError, match=r"its process ended \(status -11\)"):
        rendering.render({}, NOW)
    assert rendering.render({}, NOW) == "fine"


def test_a_process_that_somebody_kills_costs_one_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    rendering = Renderer("fine", "here")
    assert rendering.render({}, NOW) == "fine"
    _kill(rendering, signal.SIGKILL, monkeypatch)
    with pytest.raises(RenderProcessError, match=r"was killed \(SIGKILL\)"):
        rendering.render({}, NOW)
    assert rendering.render({}, NOW) == "fine"


def test_ending_frees_all_and_what_is_rendered_next_starts_anew() -> None:
    rendering = Renderer("fine", "here")
    rendering.end()
    rendering.render({}, NOW)
    pid = _pid(rendering)
    rendering.end()
    assert _is_gone(pid)
    assert rendering.render({}, NOW) == "fine"


def test_ending_stops_what_is_rendered_in_another_thread() -> None:
    loop = "{% for i in range(10**5) %}"
    rendering = Renderer("{% if loops %}" + loop * 3 + "{% endfor %}" * 3 + "{% endif %}", "here")
    rendering.render({}, NOW)
    pid = _pid(rendering)
    os.kill(pid, signal.SIGSTOP)  # it cannot end, however late this thread looks
    with ThreadPoolExecutor(1) as threads:
        endless = threads.submit(rendering.render, {"loops": True}, NOW)
        while not rendering._lock.locked():
            pass
        rendering.end()
        with pytest.raises(RenderProcessError, match="was ended"):
            endless.result()
    assert _is_gone(pid)
    assert rendering.render({}, NOW) == ""


def test_ending_before_a_new_process_runs_stops_what_it_would_render(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rendering = Renderer("text", "here")
    start = rendering._start

    def end_and_start() -> None:
        rendering.end()
        start()

    monkeypatch.setattr(rendering, "_start", end_and_start)
    with pytest.raises(RenderProcessError, match="was ended"):
        rendering.render({}, NOW)
    monkeypatch.undo()
    assert rendering.render({}, NOW) == "text"


def test_a_users_module_of_a_standard_name_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("resource", "struct", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(1)")
    monkeypatch.syspath_prepend(tmp_path)
    assert Renderer("fine", "here").render({}, NOW) == "fine"


def test_why_a_process_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(RenderProcessError, match="No module named 'jinja2'"):
        Renderer("fine", "here").render({}, NOW)
    monkeypatch.setattr(sys, "executable", None)
    with pytest.raises(RenderProcessError, match="None runs"):
        Renderer("fine", "here").render({}, NOW)


def test_a_process_that_a_signal_has_stopped_is_replaced() -> None:
    rendering = Renderer("fine", "here")
    rendering.render({}, NOW)
    pid = _pid(rendering)
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    assert rendering.render({}, NOW) == "fine"
    assert _is_gone(pid)


def test_a_process_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rendering = Renderer("fine", "here")
    rendering.render({}, NOW)
    os.kill(_pid(rendering), signal.SIGSTOP)
    monkeypatch.setattr(renderer, "MAX_WALL_S", 0.0)
    monkeypatch.setattr(renderer, "is_stopped", lambda pid: False)  # not yet
    with pytest.raises(InvalidRequestError, match="takes more than 0 s, the limit"):
        rendering.render({"x": "x" * 10**6}, NOW)
    monkeypatch.undo()
    assert rendering.render({}, NOW) == "fine"


def _is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_the_process_ends_with_its_renderer_and_leaves_no_zombie() -> None:
    rendering = Renderer("fine", "here")
    rendering.render({}, NOW)
    pid = _pid(rendering)
    del rendering
    gc.collect()
    assert _is_gone(pid)


def test_the_process_has_nothing_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        rendering = Renderer("fine", "here")
        rendering.render({}, NOW)
        folder = Path(f"/proc/{_pid(rendering)}/fd")
        targets = [os.readlink(link) for link in folder.iterdir()]
    assert len([t for t in targets if t != "/dev/null"]) == 1, targets

    monkeypatch.setenv("API_KEY", "secret")
    rendering = Renderer("fine", "here")
    rendering.render({}, NOW)
    assert b"secret" not in Path(f"/proc/{_pid(rendering)}/environ").read_bytes()

    rendering = Renderer("fine", "here")
    rendering.render({}, NOW)
    assert os.getsid(_pid(rendering)) == _pid(rendering)


def test_a_fork_leaves_the_process_to_its_owner() -> None:
    rendering = Renderer("{{ x }}", "here")
    rendering.render({"x": 1}, NOW)
    owned = _pid(rendering)
    child = os.fork()
    if child == 0:  # no assertions here: they would run the rest of the tests
        right = rendering.render({"x": 2}, NOW) == "2" and _pid(rendering) != owned
        rendering.close()
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert rendering.render({"x": 3}, NOW) == "3"
    assert _pid(rendering) == owned


OWNER = """
from datetime import datetime
from nanocore.client.chat.renderer import Renderer
rendering = Renderer("{{{{ x }}}}", "here")
rendering.render({{}}, datetime.now())
print(rendering._process.pid, flush=True)
{end}
"""


@pytest.mark.parametrize(
    "end",
    ["", "raise SystemExit(3)", "import os; os._exit(1)", "import os; os.kill(os.getpid(), 9)"],
)
def test_the_process_ends_with_its_owner_however_that_ends(end: str) -> None:
    script = OWNER.format(end=end)
    owner = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=False)
    pid = int(owner.stdout)
    # The end of its standard input reaches it in its own time: this waits for its own end.
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return

    assert select.select([watched], [], [], 60.0)[0]
    os.close(watched)


@pytest.mark.parametrize("executable", ["/nonexistent/python", "/bin/true"])
def test_no_process_is_an_error_of_its_own(
    monkeypatch: pytest.MonkeyPatch, executable: str
) -> None:
    rendering = Renderer("fine", "here")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", executable)
        with pytest.raises(RenderProcessError):
            rendering.render({}, NOW)
    assert rendering.render({}, NOW) == "fine"


def test_an_interrupt_takes_the_answer_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rendering = Renderer("{{ x }}", "here")
    receive = rendering._receive
    calls: list[int] = []

    def interrupted(*args: Any) -> bytes:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return receive(*args)

    monkeypatch.setattr(rendering, "_receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rendering.render({"x": "first"}, NOW)
    assert rendering.render({"x": "second"}, NOW) == "second"


def test_the_clock_is_the_callers_to_the_microsecond() -> None:
    rendering = Renderer("{{ strftime_now('%Y-%m-%d %H:%M:%S.%f é') }}", "here")
    assert rendering.render({}, NOW) == "2025-03-09 08:07:06.054321 é"
