"""The C interface is written in C++ and for ctypes: both say the same, and a step's columns too."""

from __future__ import annotations

import ctypes
import re
from ctypes import c_bool, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import pytest
import torch

from nanocore.kernels.cpu import library
from nanocore.worker.step.step_memory import STEP_FIELDS

FOLDER = Path(library.__file__).parent
SOURCES = {path.name: path.read_text() for path in (*FOLDER.glob("*.h"), FOLDER / "program.cpp")}
STRUCTS = {
    type_.__name__.removesuffix("Struct"): type_
    for type_ in vars(library).values()
    if isinstance(type_, type) and issubclass(type_, ctypes.Structure)
}
SCALARS: dict[str, type] = {
    "int64_t": c_int64, "int": c_int, "float": c_float, "bool": c_bool,
    "Kind": c_int, "Scales": c_int, "Minima": c_int,
}  # fmt: skip


def ctype(name: str) -> Any:
    """The ctypes type of a C++ type that is no pointer."""
    return SCALARS.get(name) or STRUCTS[name.removesuffix("Call")]


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*", "", text)


def members(file: str, name: str) -> list[tuple[str, Any]]:
    """Names and ctypes types of a struct's members, in their order."""
    (body,) = re.findall(rf"^struct {name} {{\n(.*?)^}};", SOURCES[file], re.MULTILINE | re.DOTALL)
    found = []
    # Members come first, and then, behind an empty line, functions.
    for line in without_comments(body.split("\n\n")[0]).split(";"):
        declaration = re.fullmatch(r"\s*(?:const )?(\w+)([^(]+?)\s*", line)
        if declaration is None:
            continue
        type_, names = declaration.groups()
        for one in names.split(","):
            own = re.search(r"(\w+)(?: = [\w.]+)?$", one.strip())
            assert own, one
            found.append((own.group(1), c_void_p if "*" in one else ctype(type_)))
    return found


def as_pointers(type_: Any) -> Any:
    return c_void_p if issubclass(type_, ctypes._Pointer) else type_


@pytest.mark.parametrize("name", STRUCTS)
def test_a_struct_has_the_same_members_in_cpp(name: str) -> None:
    struct = STRUCTS[name]
    cpp = re.match(r"`(\w+)` of (\w+\.\w+)", struct.__doc__ or "")
    assert cpp, f"{name}: its docstring says where it is in C++"
    assert members(cpp.group(2), cpp.group(1)) == [
        (member, as_pointers(type_)) for member, type_ in struct._fields_
    ]


@pytest.mark.parametrize("name", library._SIGNATURES)
def test_a_function_takes_the_same_arguments_in_cpp(name: str) -> None:
    pattern = rf"NANOCORE_API ([\w*]+) \*?nanocore_{name}\((.*?)\) {{"
    ((result, parameters),) = re.findall(pattern, SOURCES["program.cpp"], re.DOTALL)
    result_type, arguments = library._SIGNATURES[name]
    assert (result_type is not None) == (result != "void")
    parsed = [one.strip() for one in without_comments(parameters).split(",") if one.strip()]
    for parameter, argument in zip(parsed, arguments, strict=True):
        declared = re.fullmatch(r"(?:const )?(\w+)([ *]+)\w+", parameter)
        assert declared, parameter
        type_ = declared.group(1)
        if "*" not in declared.group(2):
            assert argument is ctype(type_), parameter
        elif type_ in STRUCTS or type_.removesuffix("Call") in STRUCTS or argument is not c_void_p:
            assert argument._type_ is ctype(type_), parameter


def test_a_native_step_reads_columns_of_the_declared_names_and_dtypes() -> None:
    (body,) = re.findall(r"^struct Step {\n(.*?)^};", SOURCES["program.cpp"], re.DOTALL | re.M)
    read = {name: bits for bits, name in re.findall(r"const int(\d\d)_t\* (\w+_G?[A-Z]);", body)}
    del read["token_ids_T"]  # it is no column: it stands for the table
    sizes = {torch.int64: "64", torch.int32: "32"}
    declared = {field.name: sizes[field.dtype] for field in STEP_FIELDS}
    assert read.items() <= declared.items()
    # What it does not read, the host does before: blocks are in its table, decodes are rows.
    unread = {"num_decodes_1", "block_rows_W", "block_columns_W", "block_ids_W"}
    assert declared.keys() - read.keys() == unread
