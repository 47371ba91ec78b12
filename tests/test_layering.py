"""The rooms' walls: who may import whom, what stays out of thin clients, and forbidden words."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nanocore

PACKAGE = Path(nanocore.__file__).parent
ALLOWED: dict[str, set[str]] = {
    "protocol": set(),
    "kv_cache": set(),
    "kernels": set(),
    "system": {"protocol"},
    "client": {"protocol", "system"},
    "conformance": {"protocol", "system"},
    "worker": {"kernels", "protocol", "system"},
    "engine_core": {"protocol", "kv_cache", "worker", "system"},
}
FORBIDDEN_WORDS = (
    "pickle", "marshal", "dill", "eval(", "exec(", "torch.load", "recv_pyobj", "send_pyobj",
    "trust_remote_code", "auto_map", "get_class_from_dynamic_module",
)  # fmt: skip


def sources() -> Iterator[Path]:
    yield from sorted(PACKAGE.rglob("*.py"))


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide which room they enter"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_room_is_in_the_table() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms == ALLOWED.keys()


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_rooms_it_may(room: str) -> None:
    for path in sorted((PACKAGE / room).rglob("*.py")):
        for module in imported_modules(path):
            if module.startswith("nanocore."):
                other = module.split(".")[1]
                if other in ALLOWED:
                    assert other == room or other in ALLOWED[room], f"{path} imports {module}"


def test_zmq_is_imported_in_one_package() -> None:
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in sources()
        if any(module.split(".")[0] == "zmq" for module in imported_modules(path))
    }
    assert {user.rsplit("/", 1)[0] for user in users} == {"protocol/sockets"}


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("nanocore.client", "torch triton flash_attn transformers numpy safetensors xxhash"),
        ("nanocore.conformance.vectors", "torch triton flash_attn transformers numpy zmq"),
        ("nanocore.conformance.cli", "torch triton flash_attn transformers numpy tokenizers"),
        ("nanocore.protocol.messages,nanocore.protocol.codec,nanocore.protocol.sockets,"
         "nanocore.worker.plan", "torch triton flash_attn transformers numpy"),
        ("nanocore.kv_cache", "torch triton flash_attn transformers numpy zmq"),
        ("nanocore.engine_core.scheduling.scheduler,nanocore.engine_core.core,"
         "nanocore.engine_core.io.io_thread", "torch triton flash_attn transformers"),
        ("nanocore.engine_core.io.kv_event_publisher",
         "torch triton flash_attn transformers numpy"),
        ("nanocore.keygen", "torch triton flash_attn transformers numpy safetensors"),
        ("nanocore.engine_core.cli", "torch triton flash_attn transformers numpy"),
    ],
)  # fmt: skip
def test_imports_stay_light(modules: str, absent: str) -> None:
    script = f"import sys, {modules}; print(*(m for m in {absent.split()!r} if m in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == ""


def test_no_source_names_what_runs_foreign_code() -> None:
    for path in sources():
        text = path.read_text()
        for word in FORBIDDEN_WORDS:
            assert not re.search(rf"(?<![\w.]){re.escape(word)}", text), f"{path}: {word}"


def test_the_word_list_would_be_noticed() -> None:
    """The pattern finds calls and imports, and leaves longer names alone."""

    def found(text: str, word: str) -> bool:
        return re.search(rf"(?<![\w.]){re.escape(word)}", text) is not None

    assert found("import pickle", "pickle")
    assert found("x = eval(y)", "eval(")
    assert found("torch.load(f)", "torch.load")
    assert not found("retrieval(x)", "eval(")
