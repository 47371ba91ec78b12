"""Files and functions stay small enough to read at a sitting."""

from __future__ import annotations

import ast
from pathlib import Path

import nanocore

PACKAGE = Path(nanocore.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_no_file_is_long() -> None:
    assert {p.name: num_lines(p) for p in SOURCES if num_lines(p) > MAX_FILE_LINES} == {}


def test_no_function_is_long() -> None:
    long = {
        f"{path.name}:{node.name}": size
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (size := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert long == {}


def test_every_module_says_what_it_is_for() -> None:
    for path in SOURCES:
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert docstring, f"{path} has no docstring"
        assert len(docstring.splitlines()) <= 25, path


def test_functions_are_annotated() -> None:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                where = f"{path}:{node.lineno} {node.name}"
                assert node.returns is not None, f"{where} has no return type"
