"""The executor that runs the model in the engine's own process: tensor parallel size 1."""

from __future__ import annotations

from pathlib import Path

import torch

from nanocore.kernels.backend import select_kernels
from nanocore.protocol.errors import ConfigError, ModelFileError
from nanocore.protocol.plan import ModelRunnerOutput, SchedulerOutput
from nanocore.worker.model_config import ModelConfig
from nanocore.worker.model_runner import ModelRunner

_CPU_KV_SHARE = 0.4
_CPU_KV_CAP_BYTES = 8 * 2**30
_CUDA_KV_SHARE = 0.8


class LocalExecutor:
    """A model runner in this process.

    Args:
        folder: the model's. device: "auto", "cpu" or "cuda". dtype: "auto" takes the checkpoint's.
        kernels: backend name, or "auto".

    Raises:
        ConfigError: the device is not there. ModelFileError: a dtype that is not implemented.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        max_model_len: int,
        device: str = "auto",
        dtype: str = "auto",
        kernels: str = "auto",
    ) -> None:
        self._folder = folder
        self.device = select_device(device)
        self.kernels = select_kernels(kernels, self.device)
        self.dtype = _dtype(config.dtype if dtype == "auto" else dtype)
        self._runner = ModelRunner(config, max_model_len, self.dtype, self.device, self.kernels)

    @property
    def dtype_name(self) -> str:
        """The dtype of weights, activations and KV cache, e.g. "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    def load_model(self) -> int:
        """Read the weights; returns their bytes."""
        return self._runner.load_model(self._folder)

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes of one KV block over all layers."""
        return self._runner.kv_block_bytes(block_size)

    def available_kv_bytes(self) -> int:
        """Memory that the KV cache may take: a share of what is free after loading."""
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[0] * _CUDA_KV_SHARE)
        return min(int(_available_memory_bytes() * _CPU_KV_SHARE), _CPU_KV_CAP_BYTES)

    def allocate_kv_cache(self, num_blocks: int, block_size: int, max_num_seqs: int) -> None:
        """Allocate the KV cache and the persistent batch."""
        self._runner.allocate_kv_cache(num_blocks, block_size, max_num_seqs)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; returns the tokens it sampled."""
        return self._runner.execute(plan)


def select_device(name: str) -> torch.device:
    """The device that `name` stands for; "auto" is CUDA if there is one.

    Raises:
        ConfigError: the device is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu")
    return torch.device(name)


def _dtype(name: str) -> torch.dtype:
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in dtypes:
        raise ModelFileError(
            f"the checkpoint's dtype {name!r} is not implemented: choose one of "
            f"{', '.join(dtypes)} with --dtype"
        )
    return dtypes[name]


def _available_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise ConfigError("/proc/meminfo has no MemAvailable: give --kv-cache-memory-bytes")
