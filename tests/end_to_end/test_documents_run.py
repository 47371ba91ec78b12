"""What the documents tell a newcomer to run, run as written."""

from __future__ import annotations

import itertools
import os
import re
import select
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nanocore.cli.main import main
from nanocore.engine_core.io.kv_event_publisher import KVEventPublisher
from nanocore.protocol.codec import pack_int32
from nanocore.protocol.endpoint import default_endpoint
from tests.cli.served import serving
from tests.end_to_end.forked import engine
from tests.kv_event_peers import numbered

ROOT = Path(__file__).parents[2]
# The documents' programs need only zmq and msgpack; this stands in for the latter.
MSGPACK = "import msgspec; packb, unpackb = msgspec.msgpack.encode, msgspec.msgpack.decode\n"


def python_blocks(document: str) -> list[str]:
    text = (ROOT / document).read_text()
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def programs(document: str) -> list[tuple[str, str | None]]:
    """Each program of a document, and what it prints if a block of text follows that says so."""
    text = (ROOT / document).read_text()
    found = re.findall(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", text, flags=re.DOTALL)
    return [(source, printed or None) for source, printed in found]


def run_python(source: str, folder: Path, *arguments: str) -> str:
    """Run a script with `folder` importable; returns what it printed."""
    result = subprocess.run(
        [sys.executable, "-c", source, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"PYTHONPATH": str(folder)},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_protocols_raw_client_prints_eight_tokens_as_it_stands(tmp_path: Path) -> None:
    """With the model that `nanocore-engine` serves when no other is named."""
    (tmp_path / "msgpack.py").write_text(MSGPACK)
    source = python_blocks("PROTOCOL.md")[0]
    with engine(ROOT / "nanocore" / "demo_model") as running:
        printed = run_python(source, tmp_path, running.endpoint)
    assert len(printed.split()) == 8
    assert all(int(token) >= 0 for token in printed.split())


def test_the_protocols_decoder_of_columns_reads_what_the_codec_writes() -> None:
    source = python_blocks("PROTOCOL.md")[1]
    assert len(source.splitlines()) <= 10
    scope: dict[str, Any] = {"struct": struct, "itertools": itertools}
    exec(source, scope)
    columns = scope["columns"]
    assert columns({}) == {}
    one_each = {"handles": pack_int32([7, 9]), "tokens": pack_int32([1, 2])}
    assert columns(one_each) == {7: [1], 9: [2]}
    assert columns(one_each | {"tokens": pack_int32([1, 2, 3]), "counts": pack_int32([2, 1])}) == {
        7: [1, 2],
        9: [3],
    }
    for wrong in (pack_int32([1, 1, 1]), pack_int32([2, 1])):
        with pytest.raises(ValueError, match="fit together"):
            columns(one_each | {"counts": wrong})


def test_the_kv_events_subscriber_prints_every_batch(tmp_path: Path, short_path: Path) -> None:
    (tmp_path / "msgpack.py").write_text(MSGPACK)
    (source,) = python_blocks("docs/kv-events.md")
    found = re.findall(r'"(ipc://[^"]+)"', source)
    endpoints = [f"ipc://{short_path}/events.sock", f"ipc://{short_path}/replay.sock"]
    for written, endpoint in zip(found, endpoints, strict=True):
        source = source.replace(written, endpoint)
    with closing(KVEventPublisher(*endpoints)) as publisher:
        publisher.start()
        router = subprocess.Popen(
            [sys.executable, "-c", source],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
        )
        with router:
            assert router.stdout is not None
            heard = select.poll()
            heard.register(router.stdout, select.POLLIN)
            num_published = 0
            while not heard.poll(50):  # it is too late for the first ones: it must replay them
                publisher.publish(numbered(num_published))
                num_published += 1
            printed = [router.stdout.readline() for _ in range(num_published)]
            router.kill()
    assert [line.split()[0] for line in printed] == [str(i) for i in range(num_published)]
    assert "BlockRemoved" in printed[0]


def test_the_readmes_program_prints_what_the_readme_says(tmp_path: Path) -> None:
    ((source, printed),) = programs("README.md")
    assert printed is not None
    assert run_python(source, tmp_path) == printed


def programs_of_clients_page() -> tuple[list[tuple[str, str | None]], list[tuple[str, str | None]]]:
    """Those that join the engine at the user's default endpoint, and those that launch one."""
    of_page = programs("docs/client.md")
    assert [printed is None for _, printed in of_page] == [False] * 10 + [True, False]
    joining = [program for program in of_page if "connect()" in program[0]]
    return joining, [program for program in of_page if program not in joining]


def test_the_programs_of_the_clients_page_that_join_an_engine_print_what_it_says(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    with engine(ROOT / "nanocore" / "demo_model", "--listen", default_endpoint()):
        for source, printed in programs_of_clients_page()[0]:
            exec(source, {})
            found = capsys.readouterr().out
            assert found == printed or (printed is None and len(found) > 2)


@pytest.mark.campaign
def test_the_programs_of_the_clients_page_that_launch_an_engine_print_what_it_says(
    tmp_path: Path, tiny_model: Path
) -> None:
    for source, printed in programs_of_clients_page()[1]:
        found = run_python(source.replace("path/to/folder", str(tiny_model)), tmp_path)
        assert found == printed or (printed is None and len(found) > 2)


def test_the_program_of_the_http_page_prints_what_it_says(tmp_path: Path) -> None:
    ((source, printed),) = programs("docs/http.md")
    with serving() as served:
        served.line("ready:")
        assert "127.0.0.1:8000" in source
        source = source.replace("127.0.0.1:8000", f"{served.host}:{served.port}")
        assert run_python(source, tmp_path) == printed


def test_the_batch_of_its_page_is_answered_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "batch.md").read_text()
    (lines,) = re.findall(r"```json\n(.*?)```", page, flags=re.DOTALL)
    (command,) = re.findall(r"```\nnanocore (batch .*?) --model path/to/folder\n```", page)
    ((source, printed),) = programs("docs/batch.md")
    monkeypatch.chdir(tmp_path)
    Path("questions.jsonl").write_text(lines)
    with engine(ROOT / "nanocore" / "demo_model") as running, pytest.raises(SystemExit) as ended:
        main([*command.split(), "--endpoint", running.endpoint])
    assert ended.value.code == 1
    exec(source, {})
    assert capsys.readouterr().out == printed


def test_every_program_of_the_documents_is_run_here() -> None:
    """A page that gains one must be named in a test, too; excerpts of code are no programs."""
    documents = {path.relative_to(ROOT).as_posix(): path for path in ROOT.glob("docs/*.md")}
    documents |= {path.name: path for path in ROOT.glob("*.md")}
    program = re.compile(r"(?:import|from) ")
    assert {name for name in documents if any(map(program.match, python_blocks(name)))} == {
        "PROTOCOL.md",
        "README.md",
        "docs/batch.md",
        "docs/client.md",
        "docs/concepts.md",  # by tests/test_concepts.py
        "docs/http.md",
        "docs/kv-events.md",
    }


@pytest.mark.timeout(300)
def test_the_demo_answers_streams_and_shares_its_prefix() -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py")],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "123 + 456 = 579" in result.stdout
    assert 'an integer "sum")\n  model  {"sum": 579}\n' in result.stdout
    right = re.search(r"right answers +(\d+) of 64", result.stdout)
    assert right is not None
    assert int(right.group(1)) >= 60
    hit_rate = re.search(r"prefix-cache hit rate +([\d.]+)%", result.stdout)
    assert hit_rate is not None
    assert float(hit_rate.group(1)) > 90
    for figure in ("output tokens/s", "time to first token"):
        assert figure in result.stdout
