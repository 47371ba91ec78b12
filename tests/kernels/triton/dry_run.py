"""Compiles every Triton kernel that an engine launches, without a GPU, by the JIT's own path.

    python -m tests.kernels.triton.dry_run speed check attention

The real ModelRunner runs on the meta device, at start and in steps. Triton's driver says that the
GPU is of capability 9.0, and a launch only compiles. What is compiled lies in TRITON_CACHE_DIR
afterwards, where an engine on a GPU finds it. One line of JSON is printed for each set: how many
kernels it launches, how many of these were not in the cache, and which of these only after the
engine had started. It must be a process of its own, as `compilation` is.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest import mock

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.gpu import (
    attention_cases,
    engine_checks,
    kernels,
    product_cases,
    state_cases,
    tile_shapes,
)
from benchmarks.gpu.results import Session, UnavailableError
from benchmarks.gpu.shapes import MODELS
from benchmarks.models import SHAPES, ModelShape
from nanocore.engine_core.config import EngineConfig
from nanocore.kernels import Activation
from nanocore.kernels.grouped_weight import CheckpointWeight
from nanocore.kernels.kv_quantization import kv_cache_format
from nanocore.kernels.linear_weight import LinearWeight, StackedExperts
from nanocore.kernels.triton import grouped_linear
from nanocore.kernels.triton.grouped_packing import GroupedLinear
from nanocore.kernels.triton.triton_backend import TritonKernels
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.layers.moe import SparseMLP
from nanocore.worker.layers.packing import WeightPacker
from nanocore.worker.models import build_model, load_model_config
from nanocore.worker.placement import Placement
from nanocore.worker.plan import SchedulerOutput
from nanocore.worker.rank_messages import Quantization, WorkerConfig
from nanocore.worker.step.model_runner import ModelRunner
from nanocore.worker.step.stream import Pending, Stream, Tensors, Work
from nanocore.worker.worker import run_largest_steps
from tests.kernels.triton.model_shapes import SHAPES as PUBLISHED
from tests.step_plans import make_plan, make_row

ROOT: Final = Path(__file__).resolve().parents[3]
META: Final = torch.device("meta")
TARGET: Final = GPUTarget("cuda", 90, 32)
MAX_SHARED_BYTES: Final = 227 << 10
"""Shared memory that a program may have on these, see `compilation.SHARED_BYTES`."""
NUM_SMS: Final = 132
"""Multiprocessors of an H100 and of an H200."""

_NUM_BLOCKS: Final = 64
_STEPS: Final = ([(1, 1)], [(40, 1), (7, 7)], [(40, 1)] * 3 + [(200, 17)], [(200, 100)] * 4)
"""Rows of steps that an engine runs once it has started: (tokens, those that are computed)."""

R = TypeVar("R")


class _Driver:
    """Triton's driver of a GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Kernels(TritonKernels):
    """The backend as it is on the GPU, for tensors on the meta device."""

    def __init__(self, batch_invariant: bool = False) -> None:
        self.variant, self.num_sms = "dry run", NUM_SMS
        self.batch_invariant, self.keeps_activations = batch_invariant, False


class _Packer(WeightPacker):
    """Packs outlines of weights, too, as the backend packs weights."""

    def _pack_one(
        self, weight: CheckpointWeight, quantization: Quantization | None
    ) -> LinearWeight:
        return self._kernels.pack_linear(weight, quantization, self._dtype)


class _Done:
    """Implements `Pending`: zeros, for nothing was computed."""

    def __init__(self, result: Tensors) -> None:
        self._result = {n: torch.zeros(t.shape, dtype=t.dtype) for n, t in result.items()}

    def is_done(self) -> bool:
        return True

    def wait(self) -> Tensors:
        return self._result


class _Stream(Stream):
    """Implements `Stream`."""

    def join(self) -> None:
        pass

    def enqueue(self, work: Work) -> Pending:
        return _Done(work())


class _Recorder:
    """Implements `GraphCapture`: a graph that replays nothing."""

    def begin_set(self) -> None:
        pass

    def capture(self, work: Callable[[], R]) -> tuple[R, Callable[[], None]]:
        return work(), lambda: None


class Launches:
    """Kernels that were launched. compiled: names of those that were not in the cache."""

    def __init__(self) -> None:
        self.kernels: dict[str, Any] = {}
        self.compiled: list[str] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Have launches compile and do nothing else, as for the GPU."""
        run = JITFunction.run

        def compile_only(function: Any, *args: Any, warmup: bool, **options: Any) -> Any:
            kernel = run(function, *args, warmup=True, **options)
            self.kernels[kernel.hash] = kernel
            return kernel

        def listen(*, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
            if not cache_hit:
                self.compiled.append(metadata["name"])

        with (
            mock.patch.object(JITFunction, "run", compile_only),
            mock.patch.object(knobs.compilation, "listener", listen),
            torch.inference_mode(),
        ):
            yield


def run_engine(config: WorkerConfig, launches: Launches) -> list[str]:
    """Start an engine and run a few steps; returns names of kernels that only these compiled."""
    dtype = torch.bfloat16 if config.dtype == "auto" else getattr(torch, config.dtype)
    model = build_model(load_model_config(Path(config.folder)), Placement(dtype, META))
    backend = _Kernels(config.batch_invariant)
    model.entries()
    model.pack(_Packer(backend, dtype, config.quantization))
    model.finish()
    stream = _Stream(2, None if config.enforce_eager else _Recorder())
    runner = ModelRunner(model, backend, stream=stream, max_drafts=config.max_drafts)
    kv_format = kv_cache_format(config.kv_cache_dtype, dtype, TARGET.backend)
    run_largest_steps(runner, kv_format, config)
    sizes = config.block_size, config.max_num_seqs, config.max_model_len
    runner.allocate(kv_format, _NUM_BLOCKS, *sizes)
    runner.capture(config.max_num_batched_tokens)
    num_compiled, num_rows = len(launches.compiled), 0
    num_groups = len(runner.batch.blocks.ids)
    for step, rows in enumerate(_STEPS):
        rows = rows[: config.max_num_seqs]
        runner.execute(_plan(step, rows, num_rows, config.block_size, num_groups))
        num_rows = len(rows)
    return launches.compiled[num_compiled:]


def _plan(
    step: int, rows: Sequence[tuple[int, int]], num_rows: int, block_size: int, num_groups: int
) -> SchedulerOutput:
    """Return a step of these rows alone; num_rows: those of the step before."""
    added = [
        make_row(
            row,
            [0] * length,
            EngineSamplingParams(temperature=float(row % 2), max_tokens=2),
            num_computed=length - count,
            blocks=[0] * (-(-length // block_size) * num_groups),
            seed=row,
        )
        for row, (length, count) in enumerate(rows)
    ]
    counts = {row: count for row, (_, count) in enumerate(rows)}
    return make_plan(added, counts, removed=range(num_rows), step=step)


@contextmanager
def on_hopper(has_pdl: bool = True) -> Iterator[None]:
    """Have nanocore do with tensors on the meta device what it does on such a GPU.

    has_pdl: whether launches are programmatic dependent ones, see `launch`.
    """
    options = {"PDL": True, "launch_pdl": True} if has_pdl else {"PDL": False}
    launch = grouped_linear.linear

    def linear(
        x_TI: Tensor,
        weight: GroupedLinear,
        bias_O: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        activation: Activation | None = None,
        *,
        batch_invariant: bool = False,
    ) -> Tensor:
        least = grouped_linear.DEQUANTIZED_ROWS[weight.layout.has_minima]
        if activation is None and len(x_TI) >= least and not batch_invariant:
            return grouped_linear.by_cublas(x_TI, weight, bias_O, out_dtype or x_TI.dtype)
        return launch(x_TI, weight, bias_O, out_dtype, activation, batch_invariant=batch_invariant)

    def experts(mlp: SparseMLP) -> StackedExperts:
        router, (gate, _, _) = mlp.router.weight, mlp._projections[0]
        num, hidden, inner = router.out_features, router.in_features, gate.weight.out_features
        empty = partial(torch.empty, dtype=router.packed.dtype, device=META)
        return StackedExperts(empty(num, 2 * inner, hidden), empty(num, hidden, inner))

    with ExitStack() as patches:
        for name, module in sorted(sys.modules.items()):
            if name.startswith("nanocore.kernels.triton.") and hasattr(module, "pdl"):
                patches.enter_context(mock.patch.object(module, "pdl", return_value=options))
        patches.enter_context(mock.patch.object(grouped_linear, "linear", linear))
        patches.enter_context(mock.patch.object(SparseMLP, "experts", property(experts)))
        yield


def engine(shape: dict[str, Any], launches: Launches, **settings: Any) -> list[str]:
    """Run an engine of the model that has this config.json."""
    settings = {"max_model_len": 4096} | settings
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape))
        config = EngineConfig(**settings).for_device(TARGET.backend)
        return run_engine(config.worker_config(folder, settings["max_model_len"]), launches)


def engines(
    shape: dict[str, Any], variants: Sequence[dict[str, Any]], launches: Launches
) -> list[str]:
    return [name for settings in variants for name in engine(shape, launches, **settings)]


def compile_launchers(compiled: Iterable[Any]) -> None:
    """Compile the C code that Triton launches these kernels by, which it keeps in the same cache.

    From 3.7 on there is one piece of code for all of them. See `make_libcuda`.
    """
    nvidia.CudaUtils()
    if hasattr(nvidia, "make_launcher"):
        for kernel in compiled:
            nvidia.CudaLauncher(kernel.src, kernel.metadata)


def make_libcuda(folder: Path) -> None:
    """Make a library in place of libcuda, which is only where a GPU is; its functions do nothing.

    It is loaded, so that what is linked with it can be loaded, too.
    """
    library, sources = folder / "libcuda.so.1", Path(nvidia.__file__).parent
    text = "".join((sources / name).read_text() for name in ("driver.py", "driver.c"))
    functions = sorted({*re.findall(r"\bcu[A-Z]\w*(?=\()", text)})
    code = "".join(f"void {name}(void) {{}}\n" for name in functions)
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library)]
    subprocess.run(["gcc", *flags, "-xc", "-"], input=code, text=True, check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    knobs.nvidia.libcuda_path = str(folder)


class _MetaSession(Session):
    """A session of benchmarks/gpu with the real shapes, on the meta device."""

    on_gpu = True


@contextmanager
def _drawn_on_meta() -> Iterator[_MetaSession]:
    """Have cases of benchmarks/gpu make operands that have no data."""

    def draw(_session: Session, *shape: int, std: float = 1.0) -> Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device=META)

    with ExitStack() as patches:
        for module in (attention_cases, product_cases, state_cases, tile_shapes):
            patches.enter_context(mock.patch.object(module, "draw", draw))
        yield _MetaSession(folders=(), device=META)


def kernel_cases(part: str, _launches: Launches) -> list[str]:
    backend = _Kernels()
    with _drawn_on_meta() as session:
        for case in kernels.cases(session, part):
            with suppress(UnavailableError):
                case.run(backend, case.make(backend))
    return []


def tile_cases(launches: Launches, prefix: str = "tiles/") -> list[str]:
    """Run all candidates of benchmarks/gpu/tile_shapes.py whose cases' names begin so.

    Raises:
        AssertionError: a candidate cannot be compiled, or needs more shared memory than there is.
    """
    backend, refused = _Kernels(), list[str]()
    with _drawn_on_meta() as session:
        for case in tile_shapes.cases(session):
            if not case.name.startswith(prefix):
                continue
            operands = case.make(backend)
            for name, shape in case.candidates(backend, operands).items():
                known = {*launches.kernels}
                try:
                    with case.choosing(shape):
                        case.run(backend, operands)
                except Exception as error:  # of whatever stage of the compiler
                    refused.append(f"{case.name} {name}: {type(error).__name__} {error}"[:300])
                for key in launches.kernels.keys() - known:
                    num_bytes = launches.kernels[key].metadata.shared
                    if num_bytes > MAX_SHARED_BYTES:
                        refused.append(f"{case.name} {name}: {num_bytes} bytes of shared memory")
            for run in case.others.values():
                run(backend, operands)
    assert not refused, "\n".join(refused)
    return []


def _published_moe(name: str) -> dict[str, Any]:
    """Return a config.json of two layers that are a published model's."""
    shape = PUBLISHED[name]
    assert shape.experts is not None
    sizes = ModelShape(
        hidden_size=shape.hidden,
        num_hidden_layers=2,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.inner,
        vocab_size=shape.vocabulary,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
    )
    return sizes.config() | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": shape.experts.num,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": shape.experts.inner,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


_HYBRID: Final[dict[str, Any]] = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
"""Of Qwen3.5's config.json."""
_DAY: Final[dict[str, Any]] = {"max_num_seqs": 256, "max_num_batched_tokens": 16384}
_TINY: Final[dict[str, Any]] = {
    "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 256
}  # fmt: skip
_SMOKE: Final[dict[str, Any]] = {
    "dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 512
}  # fmt: skip
_CHECK: Final[dict[str, Any]] = {"max_num_seqs": 32, "max_num_batched_tokens": 1024}
_EAGER: Final[dict[str, Any]] = {"enforce_eager": True}
_DRAFTS: Final[dict[str, Any]] = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}
}
_INVARIANT: Final[dict[str, Any]] = {"batch_invariant": True}
_VARIANTS: Final[dict[str, dict[str, Any]]] = {
    "weights-int8": {"quantization": "int8"},
    "weights-int4": {"quantization": "int4"},
    "weights-fp8": {"quantization": "fp8"},
    "kv-int8": {"kv_cache_dtype": "int8"},
    "kv-fp8": {"kv_cache_dtype": "fp8"},
}


def sets() -> dict[str, Callable[[Launches], list[str]]]:
    """Return what can be run, by name; each returns what was compiled after an engine's start."""
    small, large = (model.shape.config() for model in MODELS)
    checked, tiny = engine_checks._SHAPE.config(), SHAPES["tiny"].config()
    demo = json.loads((ROOT / "demo_model/nanocore_demo_model/config.json").read_text())
    found: dict[str, Callable[[Launches], list[str]]] = {
        "tiny": partial(engines, tiny, [_TINY]),
        "smoke": partial(engines, demo, [_SMOKE, _SMOKE | _EAGER, _SMOKE | {"dtype": "bfloat16"}]),
        "speed": partial(engines, small, [_DAY, _DAY | _EAGER]),
        "8b": partial(engines, large, [_DAY]),
        "check": partial(
            engines,
            checked,
            [
                _CHECK | {"dtype": "float32"},
                _CHECK | {"dtype": "bfloat16"},
                _CHECK | _INVARIANT | _EAGER,
                _CHECK | _INVARIANT,
                _CHECK | _INVARIANT | {"max_num_batched_tokens": 48},
                _CHECK | _INVARIANT | {"max_num_seqs": 1},
            ],
        ),
        "invariant": partial(engines, small, [_DAY | _INVARIANT]),
        "hybrid": partial(engines, small | _HYBRID, [_DAY, _DAY | _EAGER, _DAY | _DRAFTS]),
        "moe": partial(engines, _published_moe("Qwen3-30B-A3B"), [_DAY, _DAY | _INVARIANT]),
        "attention": partial(kernel_cases, "attention"),
        "products": partial(kernel_cases, "products"),
        "states": partial(kernel_cases, "states"),
        "tiles": tile_cases,
    }
    for kind in ("prefill", "int8", "int4", "decode"):
        found[f"tiles/{kind}"] = partial(tile_cases, prefix=f"tiles/{kind}/")
    for model in MODELS:
        for name, settings in _VARIANTS.items():
            shape = model.shape.config()
            found[f"{model.name}/{name}"] = partial(engines, shape, [_DAY | settings])
    return found


DAY: Final = (
    "smoke", "speed", "8b", "check", "attention", "products", "states",
    *(f"{MODELS[0].name}/{name}" for name in _VARIANTS),
)  # fmt: skip
"""Sets of what a day of benchmarks/gpu launches, but for `tiles` and tests/gpu."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    found = sets()
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"day, or: {', '.join(found)}")
    parser.add_argument("--no-pdl", action="store_true", help="as NANOCORE_PDL=0 has it")
    parser.add_argument("--launchers", action="store_true", help="compile their C code, too")
    arguments = parser.parse_args(argv)
    names = [*arguments.names]
    if "day" in names:
        names[names.index("day") : names.index("day") + 1] = DAY
    if unknown := {*names} - found.keys():
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(found)}")
    driver.set_active(_Driver())
    with tempfile.TemporaryDirectory() as folder, on_hopper(not arguments.no_pdl):
        if arguments.launchers:
            make_libcuda(Path(folder))
        for name in names:
            launches, start_s = Launches(), time.perf_counter()
            with launches.noted():
                late = found[name](launches)
                if arguments.launchers:
                    compile_launchers(launches.kernels.values())
            line = {"set": name, "launched": len(launches.kernels)}
            line |= {"compiled": len(launches.compiled), "late": late}
            line |= {"seconds": round(time.perf_counter() - start_s, 1)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
