"""The rooms' walls: who may import whom, what stays out of thin clients, and forbidden words."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import nanocore
from tests.campaign import in_campaign

PACKAGE = Path(nanocore.__file__).parent
ALLOWED: dict[str, set[str]] = {
    "protocol": set(),
    "kv_cache": set(),
    "kernels": set(),
    "system": {"protocol"},
    "client": {"protocol", "system"},
    "http": {"client", "protocol"},
    "bench": {"client", "protocol", "system", "worker"},
    "tracing": set(),
    "cli": {"bench", "client", "engine_core", "http", "protocol", "system", "tracing", "worker"},
    "worker": {"kernels", "protocol", "system"},
    "engine_core": {"protocol", "kv_cache", "worker", "system"},
}
FORBIDDEN_WORDS = (
    "pickle", "marshal", "dill", "eval(", "exec(", "torch.load", "recv_pyobj", "send_pyobj",
    "trust_remote_code", "auto_map", "get_class_from_dynamic_module",
)  # fmt: skip


def sources() -> Iterator[Path]:
    yield from sorted(PACKAGE.rglob("*.py"))


@cache
def imported_modules(path: Path) -> list[str]:
    modules: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide which room they enter"
            modules.append(node.module or "")
            modules += (f"{node.module}.{alias.name}" for alias in node.names)
    return modules


def import_graph(package: Path) -> dict[str, set[str]]:
    """Which modules each one imports: at the top, within functions, or for type checking alone."""
    paths = {
        ".".join((package.name, *path.relative_to(package).with_suffix("").parts)): path
        for path in sorted(package.rglob("*.py"))
    }
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}

    def edges(path: Path) -> Iterator[str]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    yield name if name in paths else node.module or ""

    return {name: paths.keys() & set(edges(path)) - {name} for name, path in paths.items()}


def import_circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module."""

    def reached_from(start: str) -> set[str]:
        reached: set[str] = set()
        ahead = [start]
        while ahead:
            new = graph[ahead.pop()] - reached
            reached |= new
            ahead += new
        return reached

    reach = {name: reached_from(name) for name in graph}
    circles = {
        tuple(sorted(other for other in reach[name] if name in reach[other]))
        for name in graph
        if name in reach[name]
    }
    return sorted(map(list, circles))


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


def test_policy_knows_neither_rows_nor_blocks() -> None:
    """It decides who, over requests and plain values; `scheduling/` decides what."""
    imported = {
        module
        for path in (PACKAGE / "engine_core" / "policy").glob("*.py")
        for module in imported_modules(path)
        if module.startswith("nanocore.")
    }
    assert imported, "no module was read"
    for module in imported:
        assert not module.startswith(("nanocore.engine_core.scheduling", "nanocore.kv_cache")), (
            f"policy/ imports {module}"
        )


@pytest.mark.parametrize(
    ("room", "names"),
    [
        ("cli", {"engine_core.cli.build_parser", "engine_core.cli.parse_config",
                 "worker.loading.hub.cached_models",
                 "worker.loading.model_folder.locate_model",
                 "worker.loading.model_folder.resolve_model"}),
        ("bench", {"worker.loading.gguf.gguf_files.first_file",
                   "worker.loading.gguf.model_files.gguf_model_files"}),
    ],
)  # fmt: skip
def test_commands_import_nothing_of_the_engine_but_flags_and_files(
    room: str, names: set[str]
) -> None:
    imported = {
        module.removeprefix("nanocore.")
        for path in (PACKAGE / room).rglob("*.py")
        for module in imported_modules(path)
        if module.startswith(("nanocore.engine_core.", "nanocore.worker."))
    }
    assert imported == names | {name.rpartition(".")[0] for name in names}


def test_no_modules_import_each_other_in_a_circle() -> None:
    circles = import_circles(import_graph(PACKAGE))
    assert not circles, "these modules import each other in a circle: " + "; ".join(
        ", ".join(circle) for circle in circles
    )


def test_circles_would_be_noticed_however_they_are_hidden(tmp_path: Path) -> None:
    """For types alone, within a function, and through what a package exports again."""
    package = tmp_path / "ours"
    (package / "room").mkdir(parents=True)
    for name, text in {
        "__init__": "",
        "alone": "import ours.a, ours.room.inner",
        "a": "if TYPE_CHECKING:\n    from ours.b import B",
        "b": "def make():\n    import ours.c",
        "c": "from ours import a",
        "room/__init__": "from ours.room.inner import X",
        "room/inner": "from ours.room import Y",
        "room/apart": "from ours.room import inner",
    }.items():
        (package / f"{name}.py").write_text(text)
    graph = import_graph(package)
    assert graph["ours.alone"] == {"ours.a", "ours.room.inner"}
    assert graph["ours.room.apart"] == {"ours.room.inner"}
    assert import_circles(graph) == [
        ["ours.a", "ours.b", "ours.c"],
        ["ours.room", "ours.room.inner"],
    ]


def test_zmq_is_imported_in_one_package() -> None:
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in sources()
        if any(module.split(".")[0] == "zmq" for module in imported_modules(path))
    }
    assert {user.rsplit("/", 1)[0] for user in users} == {"protocol/sockets"}


def test_opentelemetry_is_imported_in_one_module() -> None:
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in sources()
        if any(module.split(".")[0] == "opentelemetry" for module in imported_modules(path))
    }
    assert users == {"http/request_spans.py"}


def test_llguidance_is_imported_in_one_room() -> None:
    users = {
        path.relative_to(PACKAGE).parent.as_posix()
        for path in sources()
        if any(module.split(".")[0] == "llguidance" for module in imported_modules(path))
    }
    assert users == {"engine_core/grammars"}


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("nanocore.client",
         "torch triton flash_attn transformers numpy safetensors xxhash llguidance"),
        ("nanocore.http.app,nanocore.http.server.http_server,nanocore.cli.main",
         "torch triton flash_attn transformers numpy safetensors xxhash llguidance"),
        ("nanocore.bench.serve,nanocore.bench.http_target,nanocore.bench.offline",
         "torch triton flash_attn transformers safetensors xxhash llguidance"),
        ("nanocore.cli.chat.session,nanocore.cli.chat.openai_target",
         "torch triton flash_attn transformers numpy safetensors xxhash llguidance uvicorn"),
        ("nanocore.cli.chat.command", "prompt_toolkit rich aiohttp torch numpy"),
        ("nanocore.cli.trace",
         "torch triton flash_attn transformers numpy tokenizers zmq uvicorn"),
        ("nanocore_conformance.vectors", "torch triton flash_attn transformers numpy zmq"),
        ("nanocore_conformance.cli", "torch triton flash_attn transformers numpy tokenizers"),
        ("nanocore.protocol.messages,nanocore.protocol.codec,nanocore.protocol.sockets,"
         "nanocore.worker.plan", "torch triton flash_attn transformers numpy"),
        ("nanocore.kv_cache", "torch triton flash_attn transformers numpy zmq"),
        ("nanocore.engine_core.scheduling.scheduler,nanocore.engine_core.core,"
         "nanocore.engine_core.io.io_thread", "torch triton flash_attn transformers llguidance"),
        ("nanocore.engine_core.io.kv_event_publisher",
         "torch triton flash_attn transformers numpy"),
        ("nanocore.keygen", "torch triton flash_attn transformers numpy safetensors"),
        ("nanocore.engine_core.cli", "torch triton flash_attn transformers numpy llguidance"),
        ("nanocore.engine_core.grammars.grammar_compiler",
         "torch triton flash_attn transformers llguidance"),
        ("nanocore.engine_core.process.process,nanocore.engine_core.process.check",
         "flash_attn transformers llguidance uvicorn httptools uvloop prometheus_client "
         "opentelemetry prompt_toolkit rich aiohttp"),
    ],
)  # fmt: skip
def test_imports_stay_light(modules: str, absent: str) -> None:
    script = f"import sys, {modules}; print(*(m for m in {absent.split()!r} if m in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == ""


IMPORTS = """
import sys, {before}
known = set(sys.modules)
import {module}
ours, packages = [], set()
for name in sys.modules.keys() - known:
    top = name.partition(".")[0]
    if top == "nanocore":
        ours.append(name)
    elif top not in sys.stdlib_module_names and getattr(sys.modules[name], "__file__", None):
        packages.add(top)
slow = sum(
    isinstance(value, type) and value.__module__ == name and hasattr(value, "__dataclass_fields__")
    for name in ours
    for value in vars(sys.modules[name]).values()
)
print(len(ours), slow, *packages)
"""


@pytest.mark.parametrize(
    ("before", "module", "packages", "max_modules", "max_dataclasses"),
    [
        ("torch", "nanocore.engine_core.process.process",
         "msgspec numpy safetensors xxhash", 217, 20),
        ("os", "nanocore.cli.serve.supervisor", "msgspec typing_extensions uvloop", 32, 0),
        ("nanocore.cli.serve.supervisor", "nanocore.http.server.service",
         "click h11 httptools tokenizers uvicorn zmq", 105, 5),
    ],
    ids=["engine", "server until it launches an engine", "what serves HTTP"],
)  # fmt: skip
def test_a_start_imports_little(
    before: str, module: str, packages: str, max_modules: int, max_dataclasses: int
) -> None:
    """A start takes as long as its imports: what few starts need is imported where it is used.

    To define a dataclass takes 1 to 2 ms, a hundred times as long as to define a Struct.
    """
    script = IMPORTS.format(before=before, module=module)
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    num_modules, num_dataclasses, *found = result.stdout.split()
    assert set(found) <= set(packages.split())
    assert int(num_modules) <= max_modules
    assert int(num_dataclasses) <= max_dataclasses


@pytest.mark.parametrize("quantization", ["int4", *in_campaign("int8")])
def test_a_quantized_start_imports_no_compiler_of_torch(quantization: str) -> None:
    # Some operations on meta tensors import it, which takes longer than the rest of a start.
    script = (
        "import sys\nfrom nanocore.demo_model import demo_model_folder\n"
        "from nanocore.engine_core.config import EngineConfig\n"
        "from nanocore.worker.worker import LocalExecutor\n"
        f"config = EngineConfig(device='cpu', quantization={quantization!r})\n"
        "executor = LocalExecutor(config.worker_config(str(demo_model_folder()), 64))\n"
        "executor.load_model()\nexecutor.close()\n"
        "print(*sys.modules.keys() & {'torch._dynamo', 'sympy'})\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []


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
