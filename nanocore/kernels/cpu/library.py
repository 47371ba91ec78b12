"""The compiled kernels: which of the libraries this machine can run, and their C interface.

setup.py compiles the same sources once for each instruction set, as libraries beside this file that
ctypes loads (so they know no Python, and calls release the interpreter). Where no compiler was at
hand there are none, and the torch backend serves.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import xxhash

from nanocore.kernels.cpu.build import INSTRUCTION_SETS, library_name

ABI_VERSION: Final = 22


class GroupFormatStruct(ctypes.Structure):
    """`GroupFormat` of groups.h."""

    _fields_ = (("bits", c_int), ("scales", c_int), ("minima", c_int), ("group", c_int64))


class LinearWeightStruct(ctypes.Structure):
    """`LinearWeight` of linear_weight.h."""

    _fields_ = (
        ("kind", c_int), ("packed", c_void_p), ("scale", c_void_p), ("in_features", c_int64),
        ("out_features", c_int64), ("format", GroupFormatStruct), ("codebook", c_void_p),
        ("permutation", c_void_p),
    )  # fmt: skip


class ExpertWeightsStruct(ctypes.Structure):
    """`ExpertWeights` of moe.h."""

    _fields_ = (
        ("num_experts", c_int64), ("gates", POINTER(LinearWeightStruct)),
        ("values", POINTER(LinearWeightStruct)), ("downs", POINTER(LinearWeightStruct)),
    )  # fmt: skip


class ExpertOperandsStruct(ctypes.Structure):
    """`ExpertOperands` of program.cpp."""

    _fields_ = (
        ("logits", c_void_p), ("logits_stride", c_int64), ("num_chosen", c_int64),
        ("is_normalized", ctypes.c_bool), ("is_sigmoid", ctypes.c_bool), ("bias", c_void_p),
        ("epsilon", c_float), ("factor", c_float), ("shared_gate", c_void_p),
        ("shared_gate_stride", c_int64), ("shared_out", c_void_p), ("shared_out_stride", c_int64),
    )  # fmt: skip


class GroupedRowsStruct(ctypes.Structure):
    """`GroupedRows` of packing.h."""

    _fields_ = (
        ("values", c_void_p), ("scales", c_void_p), ("minima", c_void_p),
        ("super_scales", c_void_p), ("super_minima", c_void_p),
    )  # fmt: skip


class NormWeightStruct(ctypes.Structure):
    """`NormWeight` of rows.h; without data there is no norm."""

    _fields_ = (("data", c_void_p), ("is_float", ctypes.c_bool), ("eps", c_float))


class CacheLayoutStruct(ctypes.Structure):
    """`CacheLayout` of program.cpp."""

    _fields_ = (
        ("k", c_void_p), ("v", c_void_p), ("k_scale", c_void_p), ("v_scale", c_void_p),
        ("num_heads", c_int64), ("head_dim", c_int64), ("block_size", c_int64),
        ("block_bytes", c_int64), ("group", c_int64),
    )  # fmt: skip


class StateLayoutStruct(ctypes.Structure):
    """`StateLayout` of program.cpp."""

    _fields_ = (
        ("states", c_void_p), ("block_size", c_int64), ("block_bytes", c_int64), ("group", c_int64),
        ("drafts", c_void_p), ("row_bytes", c_int64), ("draft_bytes", c_int64),
    )  # fmt: skip


class DeltaHeadsStruct(ctypes.Structure):
    """`DeltaHeads` of program.cpp."""

    _fields_ = (
        ("key_heads", c_int64), ("value_heads", c_int64), ("key_dim", c_int64),
        ("value_dim", c_int64), ("is_tiled", ctypes.c_bool), ("decay", c_void_p),
        ("time_bias", c_void_p),
    )  # fmt: skip


class RankGroupStruct(ctypes.Structure):
    """`RankGroup` of collective.h."""

    _fields_ = (
        ("counters", c_void_p), ("buffers", c_void_p), ("buffer_bytes", c_int64), ("rank", c_int64),
        ("size", c_int64), ("entered", c_void_p),
    )  # fmt: skip


class TokenMaskStruct(ctypes.Structure):
    """`TokenMask` of token_mask.h."""

    _fields_ = (("words", c_void_p), ("num_words", c_int64), ("index", c_void_p))


class TokenListStruct(ctypes.Structure):
    """`TokenList` of logit_edits.h."""

    _fields_ = (("starts", c_void_p), ("ids", c_void_p))


class EditLogitsStruct(ctypes.Structure):
    """`EditLogitsCall` of logit_edits.h."""

    _fields_ = (
        ("logits", c_void_p), ("size", c_int64), ("stride", c_int64), ("token_table", c_void_p),
        ("table_stride", c_int64), ("table_rows", c_void_p), ("num_prompt_tokens", c_void_p),
        ("num_tokens", c_void_p), ("min_tokens", c_void_p), ("repetition_penalty", c_void_p),
        ("frequency_penalty", c_void_p), ("presence_penalty", c_void_p),
        ("allowed", TokenListStruct), ("biased", TokenListStruct), ("biases", c_void_p),
        ("stops", TokenListStruct), ("sequence_starts", c_void_p), ("bad", TokenListStruct),
        ("rows", c_int64),
    )  # fmt: skip


class StepStruct(ctypes.Structure):
    """`Step` of program.cpp."""

    _fields_ = (
        ("num_tokens", c_int64), ("num_samples", c_int64), ("num_seqs", c_int64),
        ("token_ids_T", c_void_p), ("token_table", c_void_p), ("token_table_stride", c_int64),
        ("rows_T", c_void_p), ("positions_T", c_void_p), ("slots_GT", c_void_p),
        ("group_slots", c_int64), ("query_start_A", c_void_p), ("seq_lens_B", c_void_p),
        ("block_tables", c_void_p), ("group_block_ids", c_int64), ("block_table_stride", c_int64),
        ("rows_B", c_void_p), ("sample_index_R", c_void_p), ("num_right_B", c_void_p),
        ("num_drafts_B", c_void_p),
    )  # fmt: skip


_FUNCTIONS: Final = {
    "is_supported": (c_int, ()),
    "uses_amx": (c_int, ()),
    "workspace_new": (c_void_p, (POINTER(c_int), c_int)),
    "workspace_free": (None, (c_void_p,)),
    "program_new": (c_void_p, (c_void_p,)),
    "program_free": (None, (c_void_p,)),
    "program_run": (None, (c_void_p, POINTER(StepStruct))),
    "packed_bytes": (c_int64, (POINTER(LinearWeightStruct),)),
    "pack": (None, (c_void_p, c_int, c_void_p, POINTER(LinearWeightStruct))),
    "pack_groups": (None, (c_void_p, POINTER(GroupedRowsStruct), POINTER(LinearWeightStruct))),
    "ngram_propose": (None, (c_void_p, *[c_int64] * 4, *[c_void_p] * 6, c_int64)),
    "suffix_new": (c_void_p, (c_void_p, *[c_int64] * 4, c_float, c_float, c_int64)),
    "suffix_free": (None, (c_void_p,)),
    "suffix_begin": (None, (c_void_p, c_int64, c_int64)),
    "suffix_end": (None, (c_void_p, c_int64, c_int64, c_int64, c_int)),
    "suffix_propose": (None, (c_void_p, c_int64, *[c_void_p] * 6, c_int64)),
    "suffix_bytes": (c_int64, (c_void_p,)),
}
"""Result and arguments of `nanocore_*` in program.cpp, but for kernels."""
_KERNELS: Final = {
    "embedding": (POINTER(LinearWeightStruct), c_int64, c_float, c_void_p),
    "rms_norm": (c_void_p, c_int64, c_void_p, POINTER(NormWeightStruct), c_int64, c_void_p),
    "linear": (c_void_p, c_int64, POINTER(LinearWeightStruct), c_void_p, c_int, c_int, c_void_p,
               c_int64),
    "moe": (c_void_p, c_int64, POINTER(ExpertWeightsStruct), POINTER(ExpertOperandsStruct), c_int,
            c_void_p),
    "gate": (c_void_p, c_int64, c_int, c_void_p),
    "add": (c_void_p, c_void_p, c_int64, c_void_p),
    "all_reduce": (POINTER(RankGroupStruct), c_void_p, c_int64, c_void_p),
    "rope": (c_void_p, c_int64, POINTER(CacheLayoutStruct), POINTER(NormWeightStruct),
             POINTER(NormWeightStruct), c_void_p, c_void_p, c_int64),
    "attention": (c_void_p, c_int64, c_int64, POINTER(CacheLayoutStruct), c_float, c_int64, c_float,
                  c_void_p),
    "short_conv": (c_int, c_void_p, *[c_int64] * 3, c_void_p, c_void_p,
                   POINTER(StateLayoutStruct), c_void_p),
    "delta_rule": (c_void_p, c_int64, c_void_p, c_int64, POINTER(DeltaHeadsStruct),
                   POINTER(StateLayoutStruct), c_void_p),
    "sigmoid_gate": (c_void_p, c_void_p, c_int64, c_int64, c_void_p),
    "gated_norm": (c_void_p, c_void_p, c_int64, POINTER(NormWeightStruct), c_int64, c_int64,
                   c_void_p),
    "join_previous": (c_void_p, c_void_p, c_int64, POINTER(StateLayoutStruct), c_void_p),
    "keep_last": (c_void_p, c_int64, POINTER(StateLayoutStruct)),
    "select": (c_void_p, c_int64, c_void_p),
}  # fmt: skip
"""Arguments of kernels on rows of activations, behind the program, the rows and their dtype."""
LOGIT_KERNELS: Final = {
    "best_token": (c_void_p, *[c_int64] * 3, POINTER(TokenMaskStruct), *[c_void_p] * 6, c_int64,
                   c_void_p, c_void_p),
    "best_filtered_token": (c_void_p, c_int64, c_int64, POINTER(TokenMaskStruct), *[c_void_p] * 8),
    "edit_logits": (POINTER(EditLogitsStruct),),
    "logprobs": (c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, *[c_void_p] * 3),
    "softcap": (c_void_p, c_int64, c_float),
}  # fmt: skip
"""The same of kernels on rows of logits, which are float32 always: they take no dtype."""
_SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    **_FUNCTIONS,
    **{name: (None, (c_void_p, c_int64, c_int, *rest)) for name, rest in _KERNELS.items()},
    **{name: (None, (c_void_p, c_int64, *rest)) for name, rest in LOGIT_KERNELS.items()},
}


class Library:
    """One compiled library. functions: those of `_SIGNATURES`.

    Raises:
        OSError: it cannot be loaded.
        RuntimeError: it was compiled from other sources than these.
    """

    def __init__(self, path: str, instruction_set: str) -> None:
        self.instruction_set = instruction_set
        self.path = path
        loaded = ctypes.CDLL(path)
        version = loaded.nanocore_abi_version()
        if version != ABI_VERSION:
            raise RuntimeError(
                f"{path} has interface {version} and not {ABI_VERSION}: it was compiled from other "
                "sources; reinstall nanocore"
            )
        self.functions: dict[str, Callable[..., Any]] = {}
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, f"nanocore_{name}")
            function.restype, function.argtypes = result, arguments
            self.functions[name] = function

    @cached_property
    def digest(self) -> str:
        """xxh3 of the file: compilers differ in how they round."""
        return xxhash.xxh3_64_hexdigest(Path(self.path).read_bytes())

    def call(self, name: str, *arguments: Any) -> Any:
        """Call `nanocore_<name>` of program.cpp; the interpreter is free meanwhile."""
        return self.functions[name](*arguments)


def find_library() -> Library | None:
    """The best library for this machine, or None if none was compiled.

    NANOCORE_CPU_ISA names another instruction set to use, for tests and comparisons.

    Raises ValueError: NANOCORE_CPU_ISA names none that is here and can run.
    """
    wanted = os.environ.get("NANOCORE_CPU_ISA") or None
    for library in runnable_libraries():
        if wanted in (None, library.instruction_set):
            return library
    if wanted is not None:
        runnable = ", ".join(library.instruction_set for library in runnable_libraries()) or "none"
        raise ValueError(f"NANOCORE_CPU_ISA={wanted}: compiled and runnable here: {runnable}")
    return None


def runnable_libraries() -> Iterator[Library]:
    """Compiled libraries that this machine can run, the best first."""
    for name in INSTRUCTION_SETS:
        path = Path(__file__).with_name(library_name(name))
        if not path.is_file():
            continue
        library = Library(str(path), name)
        if library.call("is_supported"):
            yield library
