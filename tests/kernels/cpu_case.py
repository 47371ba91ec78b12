"""Backends of every compiled instruction set, compiling one more, and steps over a paged cache."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import nanocore.kernels.cpu
from benchmarks.attention_step import make_metadata
from nanocore.kernels.attention import AttentionMetadata, AttentionSpec, KVCache, QKNorm, Rotary
from nanocore.kernels.cpu import library
from nanocore.kernels.cpu.build import (
    COMPILE_FLAGS,
    INSTRUCTION_SETS,
    cache_folder,
    make_once,
)
from nanocore.kernels.cpu.cpu_backend import CpuKernels
from nanocore.kernels.interface import Kernels
from nanocore.kernels.torch.backend import TorchKernels
from tests.kernels.layered_cache import layered

SOURCE = Path(nanocore.kernels.cpu.__file__).parent / "program.cpp"
EMULATED_DOT = "emulated_dot"
"""Not an instruction set but its stand-in: pairs of bfloat16 as with avx512_bf16, in software."""
EMULATED_AMX = "emulated_amx"
"""The same for products of bfloat16 in the matrix unit."""
EMULATION = "-DNANOCORE_EMULATE_DOT", "-DNANOCORE_EMULATE_AMX"
"""What the library of both stand-ins is compiled with; one of them runs with the unit off."""

USERS_CACHE = cache_folder()
"""Where compiled kernels are kept; asked before tests get a cache of their own."""
COMPILER_TIMEOUT_S = 900.0
"""What a compiler takes on a busy machine, and more."""


@cache
def runnable_libraries() -> dict[str, library.Library]:
    return {compiled.instruction_set: compiled for compiled in library.runnable_libraries()}


def backend(instruction_set: str) -> CpuKernels:
    """The backend with this library, side by side with others; skips the test if it is not here."""
    found = _backend(instruction_set)
    if found is None:
        pytest.skip(f"{instruction_set}: not compiled, or not for this machine")
    return found


@cache
def _backend(instruction_set: str) -> CpuKernels | None:
    found = runnable_libraries().get(instruction_set)
    return CpuKernels(found) if found is not None else None


def reference_or_backend(name: str) -> Kernels:
    return TorchKernels() if name == "torch" else backend(name)


def loaded_anew(path: str, folder: Path) -> library.Library:
    """A copy of a library, which asks the environment anew for what the first has been told."""
    copy = folder / f"{len(list(folder.iterdir()))}.so"
    shutil.copy(path, copy)
    return library.Library(str(copy), "a copy")


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")


def compile_kernels(to: Path, instruction_set: str, *flags: str) -> None:
    """Compile the kernels, not optimized unless a flag asks for it: it takes half the time.

    The same intrinsics and the same sums in the same order: the results have the same bits. What
    the user's cache has is taken from there.
    """
    # At -O1 GCC 12 takes empty structs, which nothing is read of, for uninitialized.
    warnings = "-Wno-maybe-uninitialized"
    own = INSTRUCTION_SETS[instruction_set]
    compile_file(to, SOURCE, *COMPILE_FLAGS, "-O0", warnings, *own, *flags, "-shared", "-fPIC")


def compile_file(to: Path, source: Path, *flags: str) -> None:
    """Compile a program or a library, once: what failed is not tried again by the next test."""
    found = compiler()
    assert found is not None
    command = (found, *flags)
    if (command, source) not in _failures:
        try:
            make_once(
                to,
                lambda: run_compiler([*command, str(source), "-o", str(to)]),
                source,
                command,
                folder=USERS_CACHE,
            )
        except CompilerFailed as error:
            _failures[command, source] = str(error)
    if (command, source) in _failures:
        raise CompilerFailed(_failures[command, source])


class CompilerFailed(Exception):
    """A compiler had an error or a warning, or was too slow."""


_failures: dict[tuple[tuple[str, ...], Path], str] = {}


def run_compiler(command: Sequence[str]) -> None:
    """Run a compiler to its end, or end it: it leads a process group, as others work for it."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            output = process.communicate(timeout=COMPILER_TIMEOUT_S)[0]
        except subprocess.TimeoutExpired as error:
            raise CompilerFailed(f"not done after {error.timeout} s: {error.cmd}") from None
        finally:  # at Ctrl-C, too
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode or output:
        raise CompilerFailed(output)


@dataclass(frozen=True)
class PagedCase:
    """Sequences that grow over several steps, in blocks scattered over a cache of garbage.

    counts: of every sequence the tokens that each step computes; 0: it has none in that step.
    rotary: dimensions that are turned; 0: cos is 1, so that K and Q are what was drawn.
    is_quantized: the cache is int8.
    """

    counts: Sequence[Sequence[int]]
    block_size: int = 16
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    rotary_dim: int = 0
    has_qk_norm: bool = False
    window: int = 0
    softcap: float = 0.0
    num_padding: int = 0
    dtype: torch.dtype = torch.float32
    is_quantized: bool = False
    seed: int = 0
    generator: torch.Generator = field(default_factory=torch.Generator, compare=False)

    @property
    def num_steps(self) -> int:
        return len(self.counts[0])

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(self.head_dim**-0.5, self.window, self.softcap)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def inputs(self) -> tuple[list[Tensor], QKNorm | None, Rotary, Tensor]:
        """qkv of every sequence [L, (H + 2 K) D], norms, rotation, block table; always the same."""
        self.generator.manual_seed(self.seed)
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        lengths = [sum(counts) for counts in self.counts]
        qkv = [self.draw(length, width) for length in lengths]
        norm = None
        if self.has_qk_norm:
            norm = QKNorm(self.draw(self.head_dim), self.draw(self.head_dim), 1e-6)
        half = max(2, self.rotary_dim) // 2
        angles = torch.outer(torch.arange(float(max(lengths))), 0.3 ** torch.arange(half))
        angles *= self.rotary_dim > 0
        rotary = Rotary(angles.cos().to(self.dtype), angles.sin().to(self.dtype))
        rng = random.Random(self.seed)
        widths = [-(-length // self.block_size) for length in lengths]
        free = list(range(self.num_blocks))
        rng.shuffle(free)
        rows = [
            [free.pop() for _ in range(n)]
            + [rng.randrange(self.num_blocks) for _ in range(max(widths) - n)]
            for n in widths
        ]
        return qkv, norm, rotary, torch.tensor(rows, dtype=torch.int32)

    @property
    def num_blocks(self) -> int:
        return sum(-(-sum(counts) // self.block_size) for counts in self.counts) + 3

    def run(
        self,
        kernels: Kernels,
        dtype: torch.dtype | None = None,
        garbage: float = 0.0,
        keeps_empty: bool = True,
    ) -> list[tuple[Tensor, Tensor]]:
        """Q and attention's result of every step, each [T, H, D].

        dtype: of the computation, if it is not that of the inputs. garbage: what is in the cache,
        or as scales beside int8. keeps_empty: sequences without tokens in a step are a part of it.
        """
        dtype = dtype or self.dtype
        qkv, norm, rotary, table = self.inputs()
        qkv = [x.to(dtype) for x in qkv]
        if norm is not None:
            norm = QKNorm(norm.q_weight.to(dtype), norm.k_weight.to(dtype), norm.eps)
        rotary = Rotary(rotary.cos.to(dtype), rotary.sin.to(dtype))
        cache = self.make_cache(dtype, garbage)
        results = []
        for step in range(self.num_steps):
            order, metadata = self.metadata(step, table, keeps_empty)
            parts = [qkv[i][past : past + count] for i, past, count in order]
            parts.append(torch.full((self.num_padding, qkv[0].shape[1]), 3.0, dtype=dtype))
            q_THD = kernels.rope_and_store_kv(
                torch.cat(parts), self.num_heads, norm, rotary, cache, metadata
            )
            out_THD = kernels.paged_attention(q_THD, cache, metadata, self.spec)
            results.append((q_THD.clone(), out_THD))
        return results

    def make_cache(self, dtype: torch.dtype, garbage: float = 0.0) -> KVCache:
        """Blocks of garbage; dtype: of values that are not quantized."""
        shape = self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim
        if not self.is_quantized:
            return layered(*(torch.full(shape, garbage, dtype=dtype) for _ in range(2)))
        values = [torch.full(shape, -128, dtype=torch.int8) for _ in range(2)]
        scales = [torch.full(shape[:3], garbage, dtype=torch.bfloat16) for _ in range(2)]
        return layered(*values, *scales)

    def without_released(self, order: list[tuple[int, int, int]], table: Tensor) -> Tensor:
        """The table with a block of garbage in place of those that no token sees any more."""
        lengths = [sum(counts) for counts in self.counts]
        used = {
            block_id
            for length, row in zip(lengths, table.tolist(), strict=True)
            for block_id in row[: -(-length // self.block_size)]
        }
        spare = min(set(range(self.num_blocks)) - used)
        table = table.clone()
        for i, past, _ in order:
            table[i, : max(past - self.window + 1, 0) // self.block_size] = spare
        return table

    def metadata(
        self, step: int, table: Tensor, keeps_empty: bool
    ) -> tuple[list[tuple[int, int, int]], AttentionMetadata]:
        """(sequence, tokens before this step, tokens of this step), decodes first; and the rest."""
        order = [(i, sum(row[:step]), row[step]) for i, row in enumerate(self.counts)]
        # Sequences that are not there yet have no row; others may have one without tokens.
        order = [entry for entry in order if entry[2] or (keeps_empty and entry[1])]
        order.sort(key=lambda entry: entry[2] != 1)
        if self.window:
            table = self.without_released(order, table)
        seqs = [(past + count, count) for _, past, count in order]
        rows_B = torch.tensor([i for i, _, _ in order], dtype=torch.int64)
        return order, make_metadata(
            seqs, table, self.block_size, self.num_padding, table_rows_B=rows_B
        )
