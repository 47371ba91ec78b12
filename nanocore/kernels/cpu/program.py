"""Programs of native kernels: one at a time, or a whole step captured once and replayed.

While a program is captured the model's own Python code runs on operands without meaning, whose
first dimension is the largest a step can have; each kernel it calls is appended, with the addresses
of its operands. A replay runs the list on as many rows as the step has. Kernels' results share
memory as the captured code lets go of them. Anything else than kernels and views would be computed
once and be missing from then on, so torch's other operations are refused meanwhile.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nanocore.kernels.attention import AttentionMetadata
from nanocore.kernels.cpu.library import LOGIT_KERNELS, Library, StepStruct
from nanocore.kernels.cpu.structs import DTYPES, step_struct
from nanocore.kernels.step import BegunStep, StepInputs

TOKENS: Final = -1
SAMPLES: Final = -2
"""Row counts that are those of the step; see `Step` in program.cpp."""


class NotCapturable(Exception):
    """A kernel that is not native was called while a program was captured; the text says which."""


class Workspace:
    """The native threads and their memory; for one caller at a time.

    cores: where they run, one on each, or anywhere if below 0; without any, on all that this
        process may use.
    """

    def __init__(self, library: Library, cores: Sequence[int] | None = None) -> None:
        cores = cores or sorted(os.sched_getaffinity(0))
        self.library = library
        self.handle = library.call("workspace_new", (ctypes.c_int * len(cores))(*cores), len(cores))
        weakref.finalize(self, library.call, "workspace_free", self.handle)


class Program:
    """A list of native kernels. Memory that they use must be kept with `keep`."""

    def __init__(self, workspace: Workspace) -> None:
        self._library = workspace.library
        self._kept: list[Any] = [workspace]
        self._handle = self._library.call("program_new", workspace.handle)
        weakref.finalize(self, self._library.call, "program_free", self._handle)

    def append(self, kernel: str, rows: int, *arguments: Any) -> None:
        """Add a kernel: `nanocore_*` of program.cpp without its first argument.

        Tensors are given as addresses, structs are copied.
        """
        operands = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
        self._library.call(kernel, self._handle, rows, *operands)

    def keep(self, *memory: Any) -> None:
        """Let these live as long as the program."""
        self._kept.extend(memory)

    def run(self, step: StepStruct) -> None:
        """Run all kernels on a step; the interpreter is free meanwhile."""
        self._library.call("program_run", self._handle, ctypes.byref(step))


class ProgramCapture(TorchFunctionMode):
    """A program in the making; while it is entered, torch computes nothing.

    rows: of what is captured, TOKENS or SAMPLES. token_ids_T: what stands for a step's, if it takes
    any. Raises NotCapturable: no kernel was called.
    (A TorchDispatchMode would say the same by schema, and takes a second and a half to enter.)
    """

    _VIEWS: Final = frozenset(
        ("view", "unflatten", "flatten", "reshape", "contiguous", "split", "chunk", "unbind",
         "__getitem__", "select", "narrow", "unsqueeze", "squeeze", "transpose", "t", "expand")
    )  # fmt: skip
    _FACTS: Final = frozenset(
        ("__get__", "__len__", "size", "dim", "numel", "stride", "data_ptr", "element_size",
         "is_contiguous", "untyped_storage")
    )  # fmt: skip
    """About a tensor, whatever is in it."""

    def __init__(self, workspace: Workspace, max_tokens: int, max_samples: int) -> None:
        super().__init__()
        self.program = Program(workspace)
        self.rows = TOKENS
        self.token_ids_T = torch.zeros(max_tokens, dtype=torch.int64)
        self.takes_token_ids = False
        self._max_rows = {TOKENS: max_tokens, SAMPLES: max_samples}
        self._free: defaultdict[int, list[np.ndarray]] = defaultdict(list)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        result = func(*args, **(kwargs or {}))
        if name in self._FACTS and not isinstance(result, Tensor):
            return result
        views = result if isinstance(result, (tuple, list)) else (result,)
        # Some of them copy what they cannot view.
        memory = args[0].untyped_storage().data_ptr() if isinstance(args[0], Tensor) else None
        if name not in self._VIEWS or any(x.untyped_storage().data_ptr() != memory for x in views):
            raise NotCapturable(f"torch's {name}")
        return result

    def empty(self, width: int, dtype: torch.dtype) -> Tensor:
        """A kernel's result, [rows, width]; its memory is used again once no view of it is left."""
        max_rows = self._max_rows[self.rows]
        num_bytes = max_rows * width * dtype.itemsize
        free = self._free[num_bytes]
        if free:
            memory = free.pop()
        else:
            # Pages that no step reaches are never touched.
            memory = np.empty(num_bytes + 64, np.uint8)
            memory = memory[-memory.ctypes.data % 64 :][:num_bytes]
            self.program.keep(memory)
        # torch holds this array, and not the memory itself, for as long as a tensor views it.
        lease = memory[:]
        weakref.finalize(lease, free.append, memory)
        with torch._C.DisableTorchFunction():
            return torch.from_numpy(lease).view(dtype).view(max_rows, width)


class NativeKernels:
    """What the parts of `CpuKernels` share: a workspace, and what captures a step meanwhile."""

    def __init__(self, library: Library, cores: Sequence[int] | None = None) -> None:
        self.library = library
        self.workspace = Workspace(library, cores)
        self.capturing: ProgramCapture | None = None

    def empty(self, like: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """A result with as many rows as `like`."""
        if self.capturing is not None:
            return self.capturing.empty(width, dtype)
        return torch.empty(len(like), width, dtype=dtype)

    def run(
        self, kernel: str, rows: Tensor, *arguments: Any, step: StepStruct | None = None
    ) -> None:
        """Capture a kernel, or run it at once on the rows of this tensor."""
        head = () if kernel in LOGIT_KERNELS else (DTYPES[rows.dtype],)
        if self.capturing is not None:
            self.capturing.program.append(kernel, self.capturing.rows, *head, *arguments)
            return
        program = Program(self.workspace)
        program.append(kernel, rows.shape[0], *head, *arguments)
        program.run(step or StepStruct())

    def step(self, metadata: AttentionMetadata) -> StepStruct | None:
        return None if self.capturing is not None else step_struct(metadata)

    def refuse_capture(self, what: str) -> None:
        if self.capturing is not None:
            raise NotCapturable(what)


class Unknown:
    """Stand-in for a step's rows and metadata in a capture: a look at it ends the capture."""

    def __getitem__(self, group: int) -> Unknown:
        return self

    def __getattr__(self, name: str) -> Any:
        raise NotCapturable(f"a look at {name}")


class UnknownInputs(msgspec.Struct, frozen=True):
    """Stands for `StepInputs` in a capture."""

    sample_index_R: Tensor
    rows: Unknown = Unknown()

    def attention(self, begun: BegunStep) -> Unknown:
        return self.rows


class Captured:
    """Implements `step.Replay`. result: of what was captured, which is over."""

    def __init__(self, captured: ProgramCapture, result: Tensor) -> None:
        self.program = captured.program
        self._takes_token_ids = captured.takes_token_ids
        self._result = result
        self._rows = captured.rows

    def __call__(self, inputs: StepInputs) -> Tensor:
        rows, sample_index_R = inputs.rows, inputs.sample_index_R
        rows.append_blocks()
        num_tokens, num_samples = rows.rows_T.shape[0], sample_index_R.shape[0]
        table_stride = rows.block_tables.stride(0)
        step = StepStruct(
            num_seqs=len(inputs.seq_lens),
            num_tokens=num_tokens,
            num_samples=num_samples,
            positions_T=rows.positions_T.data_ptr(),
            slots_GT=inputs.slots_GT.data_ptr(),
            group_slots=num_tokens,
            query_start_A=inputs.query_start_A.data_ptr(),
            seq_lens_B=rows.seq_lens_B.data_ptr(),
            block_tables=rows.block_tables.data_ptr(),
            group_block_ids=rows.block_tables.shape[0] // rows.num_groups * table_stride,
            block_table_stride=table_stride,
            rows_B=rows.rows_B.data_ptr(),
            sample_index_R=sample_index_R.data_ptr(),
            num_right_B=rows.num_right_B.data_ptr(),
            num_drafts_B=rows.num_drafts_B.data_ptr(),
        )
        if self._takes_token_ids:
            step.token_table = rows.token_table.data_ptr()
            step.token_table_stride = rows.token_table.stride(0)
            step.rows_T = rows.rows_T.data_ptr()
        self.program.run(step)
        num_rows = num_samples if self._rows == SAMPLES else num_tokens
        return self._result.narrow(0, 0, num_rows)
