"""A step that was recorded, and what stands for a step while it is."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nanocore.kernels.cpu.program import NotRecordable, Program
from nanocore.kernels.cpu.structs import step_struct
from nanocore.kernels.interface import AttentionMetadata


class Unknown:
    """In place of a step's metadata while there is no step: it is for kernels alone."""

    def __getattr__(self, name: str) -> Any:
        raise NotRecordable(f"a look at {name}")


class Captured:
    """Implements `interface.Replay`."""

    def __init__(self, program: Program, result: Tensor) -> None:
        self.program, self._result = program, result

    def __call__(
        self, token_ids_T: Tensor, metadata: AttentionMetadata, sample_index_R: Tensor
    ) -> Tensor:
        step = step_struct(metadata)
        step.num_tokens, step.num_samples = len(token_ids_T), len(sample_index_R)
        step.token_ids, step.sample_index = token_ids_T.data_ptr(), sample_index_R.data_ptr()
        self.program.run(step)
        return self._result[: len(sample_index_R)]
