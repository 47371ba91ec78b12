"""Where a rank computes and in which dtype, from what flags and checkpoint say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from nanocore.kernels.cpu.cpu_backend import NATIVE_MULTIPLE, is_native_delta
from nanocore.kernels.cpu.library import Library, find_library
from nanocore.kernels.interface import Kernels
from nanocore.kernels.kv_quantization import KVCacheFormat, kv_cache_format
from nanocore.kernels.select import select_kernels
from nanocore.protocol.errors import ConfigError, ModelFileError, is_out_of_memory, shorten
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.rank_messages import Quantization, WorkerConfig

_FP8_CAPABILITY: Final = (8, 9)
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def select_device(name: str, rank: int = 0) -> torch.device:
    """The device that `name` stands for on this rank; "auto" is CUDA if there is one.

    Raises ConfigError: the device is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cuda":
        return torch.device(name)
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu")
    num_devices = torch.cuda.device_count()
    if rank >= num_devices:
        raise ConfigError(
            f"rank {rank} needs a CUDA device of its own and there are {num_devices}: lower "
            "--tensor-parallel-size or --pipeline-parallel-size"
        )
    return torch.device("cuda", rank)


def select_dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype of weights and activations; "auto" is the checkpoint's.

    float16 is for CUDA, and for models whose activations it holds; where a checkpoint's cannot be
    had, "auto" is bfloat16: as many bytes, and a range that nothing leaves.

    Raises ConfigError: it cannot be had here. ModelFileError: the checkpoint's is not implemented.
    """
    if name == "float16" and device.type != "cuda":
        raise ConfigError(f"--dtype float16: not on {device}; use --dtype auto (bfloat16)")
    if name == "float16" and not model.fits_float16:
        raise ConfigError(
            f"--dtype float16: the activations of {model.architecture} exceed its range; use "
            "bfloat16 or float32"
        )
    if name == "auto":
        name = model.dtype or "float32"
        if name == "float16" and (device.type != "cuda" or not model.fits_float16):
            name = "bfloat16"
    if name not in _DTYPES:
        raise ModelFileError(
            f"the checkpoint's dtype {name!r} is not implemented: choose one of "
            f"{', '.join(_DTYPES)} with --dtype"
        )
    return _DTYPES[name]


def select_kv_format(name: str, model_dtype: torch.dtype, device: torch.device) -> KVCacheFormat:
    """Choose the storage format of K and V; "auto" is the model's dtype.

    Raises ConfigError: not on this device.
    """
    if name == "fp8":
        require_fp8("--kv-cache-dtype", device)
    return kv_cache_format(name, model_dtype, device.type)


def check_quantized_linear(
    name: Quantization | None, kernels: Kernels, dtype: torch.dtype, device: torch.device
) -> None:
    """Check that weights can be stored so and multiplied, before they are read.

    dtype: of activations. What torch's products of fp8 take depends on its version, on the GPU and
    on dtype, so one is tried.

    Raises ConfigError: not on this device, or not with this dtype.
    """
    if name != "fp8":
        return
    require_fp8("--quantization", device)
    x_TI, bias_O = (torch.ones(*shape, dtype=dtype, device=device) for shape in ((1, 16), (16,)))
    try:
        weight = kernels.pack_linear(torch.ones(16, 16, dtype=dtype, device=device), name)
        kernels.linear(x_TI, weight, bias_O).cpu()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        reason = shorten(str(error).partition("\n")[0])
        raise ConfigError(
            f"--quantization fp8: {device} and torch {torch.__version__} have no such product of "
            f"{dtype_name(dtype)} ({reason}); int8 needs as little memory, or try --dtype bfloat16"
        ) from None


def require_fp8(flag: str, device: torch.device) -> None:
    """Raises ConfigError, naming the flag, if this device has no fp8."""
    if device.type != "cuda":
        raise ConfigError(f"{flag} fp8 needs CUDA; on a CPU int8 needs as little memory")
    if torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise ConfigError(
            f"{flag} fp8: {device} has no fp8 (compute capability 8.9); int8 needs as little memory"
        )


def steps_in_flight(config: WorkerConfig, device: torch.device) -> int:
    """Number of steps that may be begun and not done.

    On a device beside the host the next step is begun while one runs (--async-scheduling); a CPU
    would only deliver a step's tokens later, so there it must be asked for. Pipeline stages have a
    step each.
    """
    overlaps = config.async_scheduling
    if overlaps is None:
        overlaps = device.type == "cuda"
    return max(config.pipeline_parallel_size, 2 if overlaps else 1)


def make_kernels(
    config: WorkerConfig, device: torch.device, cores: Sequence[int] | None = None
) -> Kernels:
    """The kernel backend that a rank is to use, on a CPU on these cores.

    Raises ConfigError: it cannot run here, or not with these blocks.
    """
    name = config.attention_backend
    try:
        kernels = select_kernels(
            name,
            device,
            config.batch_invariant,
            keeps_activations=config.activation_quantization == "none",
            cores=cores,
        )
    except ValueError as error:
        raise ConfigError(f"--attention-backend {name}: {error}") from None
    if config.block_size % kernels.block_multiple:
        raise ConfigError(
            f"--block-size {config.block_size}: kernel backend {kernels.name} needs a multiple of "
            f"{kernels.block_multiple}; leave it out, or choose another --attention-backend"
        )
    return kernels


def native_library() -> Library:
    """Compiled functions for the host, whatever device computes.

    Raises ConfigError: none were compiled, or NANOCORE_CPU_ISA names others.
    """
    try:
        if (library := find_library()) is not None:
            return library
        reason = "nanocore was installed without its compiled kernels, which it needs"
    except ValueError as error:
        reason = str(error)
    raise ConfigError(f"--speculative-config: {reason}; docs/install.md tells how to build them")


def check_batch_invariance(config: WorkerConfig, model: ModelConfig, kernels: Kernels) -> None:
    """Check that --batch-invariant can be kept: what a CPU has no kernel for, torch computes.

    Raises ConfigError: it cannot.
    """
    if not config.batch_invariant or kernels.name != "cpu":
        return
    if found := computed_by_torch(config, model):
        raise ConfigError(
            f"--batch-invariant: with {' and '.join(found)} part of the model is computed by torch "
            "on a CPU, whose results depend on the batch; leave it out, or use blocks of "
            f"{NATIVE_MULTIPLE} tokens, and a model whose heads are multiples of {NATIVE_MULTIPLE} "
            "(values of DeltaNet's: of 32)"
        )


def computed_by_torch(config: WorkerConfig, model: ModelConfig) -> list[str]:
    """Reasons why native CPU kernels leave work to torch, whose results depend on the batch."""
    block_size, head_dim = config.block_size, model.attention.head_dim
    causes = {
        f"heads of {head_dim} values": head_dim % NATIVE_MULTIPLE != 0,
        f"--block-size {block_size}": block_size % NATIVE_MULTIPLE != 0,
    }
    if (dims := model.delta_dims) is not None:
        causes["DeltaNet's heads of {} and {} values".format(*dims)] = not is_native_delta(*dims)
    return [cause for cause, is_there in causes.items() if is_there]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
