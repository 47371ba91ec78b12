"""The code base stays small enough to read: files, functions, folders, names and comments."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

import nanocore
from tests.test_layering import import_graph

PACKAGE = Path(nanocore.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef
MAX_MODULES = 430
MAX_LINES = 70_000
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_MODULE_DOCSTRING_LINES = 25
MAX_FILES_IN_FOLDER = 12
MANY_FILES = re.compile(r"kernels(/\w+)?|worker/models")
"""Folders that may have more files: each is a kernel or a model family."""
MAX_ONE_IMPORTER = 90
MIN_LINES_OF_ONE_IMPORTER = 60
CONTRACTS = {
    "kernels/cpu/build.py", "client/sdk.py", "engine_core/drafting/ngram.py",
    "kernels/torch/states.py",
}  # fmt: skip
"""Short modules with one importer: setup.py runs the first, too; the second is a list of names."""
SAME_IDEA: set[str] = {"AllBlocksCleared", "BlockRemoved", "BlockStored", "KVEventBatch"}
"""Public classes in two packages, which are one idea: the cache's events, and the wire's."""
ODD_OPENERS = re.compile(r"(Of|As|Those|It|That|Likewise|Which|Whose|Who)\b")


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def num_lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text("utf-8")) for path in SOURCES}


def functions() -> list[tuple[Path, Function]]:
    return [
        (path, node)
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, Function)
    ]


def test_the_package_does_not_grow_beyond_what_one_can_read() -> None:
    assert len(SOURCES) <= MAX_MODULES
    assert sum(map(num_lines, SOURCES)) <= MAX_LINES


def test_no_file_is_long() -> None:
    assert {name_of(p): num_lines(p) for p in SOURCES if num_lines(p) > MAX_FILE_LINES} == {}


def test_no_function_is_long() -> None:
    sizes = {
        f"{name_of(path)}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path, node in functions()
    }
    assert {name: size for name, size in sizes.items() if size > MAX_FUNCTION_LINES} == {}


def test_no_folder_has_many_files() -> None:
    counts = Counter(path.parent for path in SOURCES if path.name != "__init__.py")
    many = {name_of(folder): n for folder, n in counts.items() if n > MAX_FILES_IN_FOLDER}
    assert {name: n for name, n in many.items() if not MANY_FILES.fullmatch(name)} == {}


def test_a_module_with_one_importer_is_long_or_a_contract() -> None:
    importers: dict[str, set[str]] = defaultdict(set)
    for name, imported in import_graph(PACKAGE).items():
        for other in imported:
            importers[other].add(name)
    single = [
        path
        for path in SOURCES
        if path.name != "__init__.py"
        and len(importers[".".join(("nanocore", *path.relative_to(PACKAGE).with_suffix("").parts))])
        == 1
    ]
    assert len(single) <= MAX_ONE_IMPORTER
    assert {name_of(p) for p in single if num_lines(p) < MIN_LINES_OF_ONE_IMPORTER} <= CONTRACTS


def test_a_public_class_name_occurs_once() -> None:
    names = Counter(
        node.name
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, n in names.items() if n > 1} == SAME_IDEA


def test_a_backend_is_put_together_from_parts_and_inherits_from_no_other() -> None:
    classes = [
        node
        for path, tree in trees().items()
        if path.is_relative_to(PACKAGE / "kernels")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    implements = re.compile(r"Implements `interface\.Kernels`")
    backends = {n.name: n for n in classes if implements.match(ast.get_docstring(n) or "")}
    assert backends.keys() == {"CpuKernels", "FlashKernels", "TorchKernels", "TritonKernels"}
    parts = {name: [ast.unparse(base) for base in n.bases] for name, n in backends.items()}
    assert {len(bases) for bases in parts.values()} == {5}
    assert not backends.keys() & {ast.unparse(base) for n in classes for base in n.bases}
    of_torch = {name for name, bases in parts.items() if any("Torch" in base for base in bases)}
    assert of_torch == {"TorchKernels"}


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    """Docstrings of constants and fields, too."""
    odd = [
        f"{name_of(path)}: {docstring.splitlines()[0]}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(docstring := node.value.value, str) and ODD_OPENERS.match(docstring)
    ]
    assert odd == []


def test_every_module_says_what_it_is_for() -> None:
    for path, tree in trees().items():
        docstring = ast.get_docstring(tree)
        assert docstring, f"{path} has no docstring"
        assert len(docstring.splitlines()) <= MAX_MODULE_DOCSTRING_LINES, path


def test_functions_are_annotated() -> None:
    for path, node in functions():
        assert node.returns is not None, f"{path}:{node.lineno} {node.name} has no return type"


def comments_per_100_lines(paths: Iterable[Path]) -> float:
    """Share of comments in lines of code: docstrings and empty lines do not count."""
    num_comments, code_lines = 0, 0
    for path in paths:
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
            if token.type == tokenize.COMMENT:
                num_comments += not re.match(r"#\s*(fmt|type|noqa)\b", token.string)
            elif token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING):
                lines.update(range(token.start[0], token.end[0] + 1))
        for node in ast.walk(trees()[path]):
            if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node):
                first = node.body[0]
                lines -= set(range(first.lineno, (first.end_lineno or 0) + 1))
        code_lines += len(lines)
    return 100 * num_comments / code_lines


@pytest.mark.parametrize(
    ("folder", "least"), [("", 2), ("engine_core/scheduling", 5), ("kv_cache", 5)]
)
def test_comments_say_why(folder: str, least: float) -> None:
    assert comments_per_100_lines(sorted((PACKAGE / folder).rglob("*.py"))) >= least


def is_flag(call: ast.Call) -> bool:
    """Whether a call declares a flag: the first argument is its name, or `help` is given."""
    match call.args[:1]:
        case [ast.Constant(value=str(name))] if name.startswith("-"):
            return True
        case _:
            return any(keyword.arg == "help" for keyword in call.keywords)


def test_only_tables_and_kernels_keep_a_layout_of_their_own() -> None:
    """Tables: literals, and the calls of a command's flags. Kernels: launches and headers."""
    odd = []
    for path, tree in trees().items():
        if path.is_relative_to(PACKAGE / "kernels"):
            continue
        ends: dict[int, ast.stmt] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.stmt) and node.end_lineno is not None:
                ends[node.end_lineno] = node  # the innermost: `walk` goes from outside to inside
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if line.endswith("# fmt: skip"):
                match ends.get(number):
                    case ast.Assign() | ast.AnnAssign() | ast.Return():
                        pass
                    case ast.Expr(value=ast.Call() as call) if is_flag(call):
                        pass
                    case _:
                        odd.append(f"{name_of(path)}:{number}")
    assert odd == []
