"""Compiles kernels for GPUs that are not here and says what they take.

`python -m tests.kernels.triton.compilation norm_cases ...` compiles every case of those modules, or
of all there are, on all cores, and prints a line of JSON for each case and target. With --brief it
prints one line in all, and how long it took. It must be a process of its own: tests run kernels in
the interpreter, and one process has that or the compiler.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""What a program may have, by capability; CUDA C++ programming guide, technical specifications."""

CAPABILITIES = (80, 90, 100)
"""What cases compile for that do not say it."""

_FOLDER = Path(__file__).parent
_ACCESS = re.compile(r"\b(?:ld|st|atom|red)\.(?:volatile\.)?global|\bcp\.async")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+);")
_SLOW_LOAD = re.compile(r"\bld\.global\b|\bld\.shared\.[usb]8\b|\bcp\.async\.ca[^;]*, 0x8\b")
_USAGE = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+) SHARED:\d+ LOCAL:(?P<local>\d+)")


@dataclass(frozen=True)
class Case:
    """A kernel as the backend launches it.

    signature: types by argument name, such as "*bf16", "i32", "i64" or "fp32", without those in
    constexprs; an argument that is None at run time is a constexpr. aligned: arguments that are
    multiples of 16, and None is all pointers: what the launcher finds out by itself about arguments
    that are not `do_not_specialize`. instructions: by capability, what PTX must have.
    max_registers: of each thread, as the launch says. max_spill_bytes: of these; ptxas may put away
    a few for the sake of another warp. capabilities: that it is for. max_shared_bytes: that its
    tile is chosen by; all there is. num_early_loads: into registers, in a loop of products, for the
    next time round: they are waited for by nothing but what comes after this time's products.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None
    aligned: tuple[str, ...] | None = None
    instructions: Mapping[int, str] = field(default_factory=dict)
    max_spill_bytes: int = 16
    capabilities: tuple[int, ...] = CAPABILITIES
    max_shared_bytes: int | None = None
    num_early_loads: int = 0


def give_if(
    is_given: bool,
    operands: Mapping[str, str],
    signature: dict[str, str],
    constexprs: dict[str, Any],
) -> None:
    """Add operands to the signature, or as None."""
    if is_given:
        signature |= operands
    else:
        constexprs |= dict.fromkeys(operands)


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel takes: bytes of shared memory of a program, the rest of a thread.

    slow_loads: in loops of matrix products, from global memory into registers, where a copy to
    shared memory ahead of use would not wait, or such copies of 8 bytes, where 16 take one, too; or
    from shared memory by single bytes. may_begin_early: it knows of dependent launches.
    accesses_early: memory of others, before it has waited for the kernel before.
    """

    case: str
    capability: int
    shared_bytes: int
    registers: int
    num_threads: int
    spill_bytes: int
    max_spill_bytes: int
    missing_instruction: str | None
    max_shared_bytes: int
    slow_loads: int
    may_begin_early: bool
    accesses_early: bool


def measure(*modules: str) -> list[Usage]:
    """Compile the cases of these modules, or of all there are, in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", __name__, *modules],
        cwd=_FOLDER.parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return [Usage(**json.loads(line)) for line in result.stdout.splitlines()]


def compile_case(case: Case, capability: int) -> Usage:
    """Compile for a capability, 90 for 9.0, and look at the result."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names, constexprs = case.kernel.arg_names, dict(case.constexprs)
    options = {} if case.max_registers is None else {"maxnreg": case.max_registers}
    if "PDL" in names:  # as `launch.pdl` says
        constexprs["PDL"] = options["launch_pdl"] = capability >= 90
    missing = set(names) ^ {*case.signature, *constexprs}
    assert not missing, f"{case.name}: arguments without a type, or types without one: {missing}"
    pointers = tuple(name for name, kind in case.signature.items() if kind.startswith("*"))
    aligned = pointers if case.aligned is None else case.aligned
    source = ASTSource(
        fn=case.kernel,
        signature={name: case.signature.get(name, "constexpr") for name in names},
        constexprs=constexprs,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages, **options},
    )
    ptx = compiled.asm["ptx"]
    registers, spill_bytes = _registers(compiled.asm["cubin"])
    wanted = case.instructions.get(capability)
    lacks = wanted is not None and wanted not in ptx
    return Usage(
        case.name,
        capability,
        compiled.metadata.shared,
        registers,
        32 * case.num_warps,
        spill_bytes,
        case.max_spill_bytes,
        wanted if lacks else None,
        SHARED_BYTES[capability] if case.max_shared_bytes is None else case.max_shared_bytes,
        max(0, _slow_loads(ptx) - case.num_early_loads),
        options.get("launch_pdl", False),
        _accesses_early(ptx),
    )


def _accesses_early(ptx: str) -> bool:
    before, waits, _ = ptx.partition("griddepcontrol.wait")
    return bool(waits) and _ACCESS.search(before) is not None


def _slow_loads(ptx: str) -> int:
    """Count those of the innermost loops: what is around these is done once for many products."""
    lines = ptx.splitlines()
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if line.startswith("$L")}
    loops = [
        (labels[found[1]], i)
        for i, line in enumerate(lines)
        if (found := _BRANCH.search(line)) and labels[found[1]] < i
    ]
    texts = {loop: "\n".join(lines[loop[0] : loop[1]]) for loop in loops}
    products = [loop for loop, text in texts.items() if "mma" in text]
    inner = [
        (first, end)
        for first, end in products
        if not any(first <= a and b <= end and (a, b) != (first, end) for a, b in products)
    ]
    return max((len(_SLOW_LOAD.findall(texts[loop])) for loop in inner), default=0)


def _registers(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of them that are spilled) of a thread."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.check_output([tool, "-res-usage", file.name], text=True)
    found = _USAGE.search(report)
    assert found is not None, report
    # Kernels of Triton have no stack of their own.
    return int(found["registers"]), int(found["stack"]) + int(found["local"])


@cache
def _cases(module: str) -> list[Case]:
    cases: list[Case] = importlib.import_module(f"{__spec__.parent}.{module}").cases()
    return cases


Job = tuple[str, int, int]
"""Module, index of the case, capability."""


def _compile_nth(job: Job) -> Usage:
    module, index, capability = job
    return compile_case(_cases(module)[index], capability)


def jobs(modules: Sequence[str], capabilities: Collection[int] = SHARED_BYTES) -> list[Job]:
    return [
        (module, index, capability)
        for module in modules or sorted(path.stem for path in _FOLDER.glob("*_cases.py"))
        for index, case in enumerate(_cases(module))
        for capability in case.capabilities
        if capability in capabilities
    ]


def distinct(todo: Sequence[Job]) -> list[Job]:
    """Of cases that differ in types and sizes alone, one for each capability."""
    return [*{_branches(job): job for job in reversed(todo)}.values()]


def covering(todo: Sequence[Job]) -> list[Job]:
    """Few cases that have every argument and every flag's values of every kernel between them."""
    left = {mark for job in todo for mark in marks(job)}
    chosen = []
    while left:
        chosen.append(max(todo, key=lambda job: len(marks(job) & left)))
        left -= marks(chosen[-1])
    return chosen


def marks(job: Job) -> set[Any]:
    """The arguments and the flags' values of a case, with its kernel."""
    kernel, capability, *others = _branches(job)
    return {(kernel, capability, other) for other in (None, *others)}


@cache
def _branches(job: Job) -> tuple[Any, ...]:
    """Return what of a case chooses the lines that are compiled."""
    module, index, capability = job
    case = _cases(module)[index]
    values = case.constexprs.items()
    flags = [(name, str(v)) for name, v in values if isinstance(v, bool) or not isinstance(v, int)]
    return case.kernel.__name__, capability, *case.signature, *sorted(flags)


CHOICES = {"distinct": distinct, "covering": covering}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the usage of all cases of these modules, or of all there are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="such as norm_cases")
    parser.add_argument("--capability", type=int, action="append", default=[],
                        choices=SHARED_BYTES, help="compile for these alone")  # fmt: skip
    parser.add_argument("--choose", choices=CHOICES, help="of the cases that differ in types and "
                        "sizes alone, one; or few with every flag of every kernel")  # fmt: skip
    parser.add_argument("--brief", action="store_true", help="print one line in all")
    arguments = parser.parse_args(argv)
    capabilities = arguments.capability or SHARED_BYTES
    todo = jobs(arguments.modules, capabilities)
    if arguments.choose:
        todo = CHOICES[arguments.choose](todo)
    start_s = time.perf_counter()
    with ProcessPoolExecutor() as pool:
        for usage in pool.map(_compile_nth, todo):
            if not arguments.brief:
                print(json.dumps(asdict(usage)), flush=True)
    if arguments.brief:
        seconds = time.perf_counter() - start_s
        print(f"triton {version('triton')}: {len(todo)} cases compile, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
