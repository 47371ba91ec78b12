"""One rank: its device, its part of the model, its KV cache; in a process of its own or not.

It is set up in steps that the executor drives on all ranks together: load, profile, allocate; then
it executes plans. `LocalExecutor` runs a single rank in the engine's process.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch
import xxhash

from nanocore.kernels.kv_quantization import KVCacheFormat
from nanocore.kernels.logit_edits import TokenMask
from nanocore.kernels.sampling import TokenPlaces
from nanocore.protocol.fields import MAX_STOP_TOKEN_IDS
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.system.cpu_cores import kernel_cores
from nanocore.worker.communication.links import RankLinks, connect
from nanocore.worker.cost.machine_speed import measure_speed
from nanocore.worker.cost.rank_cost import outlined_info
from nanocore.worker.devices import (
    check_batch_invariance,
    check_quantized_linear,
    make_kernels,
    select_device,
    select_kv_format,
    steps_in_flight,
)
from nanocore.worker.layers.decoder import fill_and_pack
from nanocore.worker.loading.checked_model import (
    check_drafts,
    check_files,
    check_memory,
    read_model,
    read_weight_format,
)
from nanocore.worker.loading.dummy_weights import fill_dummy_weights
from nanocore.worker.loading.formats.checkpoint_format import format_digest
from nanocore.worker.loading.gguf.gguf_files import is_gguf
from nanocore.worker.loading.loader import load_weights
from nanocore.worker.loading.lora import MergedFormat
from nanocore.worker.loading.weights import Entries
from nanocore.worker.memory.kv_cache_bytes import cpu_kv_bytes, cpu_memory_bytes, cuda_kv_bytes
from nanocore.worker.memory.kv_groups import KVGroup
from nanocore.worker.models import build_model
from nanocore.worker.numerics import rank_numerics
from nanocore.worker.placement import Placement
from nanocore.worker.plan import ModelRunnerOutput, NewRow, SchedulerOutput, TokenMasks
from nanocore.worker.rank_messages import MAX_PROMPT_LOGPROBS, RankStart, WorkerConfig, WorkerInfo
from nanocore.worker.sampling.columns import RowColumns, SamplingMetadata, costliest_sampling
from nanocore.worker.sampling.sampler import TokenSampler
from nanocore.worker.step.cuda_stream import CudaGraphCapture, CudaStream
from nanocore.worker.step.model_runner import ModelRunner
from nanocore.worker.step.pending_output import PendingOutput

logger = logging.getLogger(__name__)
NUM_PROFILED_GRAPHS: Final = 2
"""The largest ones, in whose memory the others live; of what each takes beside it, a sample."""


class Worker:
    """A rank.

    Args:
        config: the engine's. start: the rank's first message, if it is one of several.

    Raises:
        ConfigError: the device is not there, or the model cannot be split so.
        ModelFileError: a file is missing, malformed, of another model, or asks for what is not
            implemented. CacheMemoryError: the weights do not fit.
    """

    def __init__(self, config: WorkerConfig, start: RankStart | None = None) -> None:
        self._config = config
        rank = start.rank if start else 0
        self._progress = rank == 0
        self._weights = xxhash.xxh3_128()
        device = self.device = select_device(config.device, rank)
        model_config, dtype = read_model(config, device, log=self._progress)
        links = connect(start, device, model_config.hidden_size) if start else RankLinks()
        self._placement = Placement(
            dtype=dtype,
            device=device,
            tp=links.tp,
            pp_rank=rank // config.tensor_parallel_size,
            pp_size=config.pipeline_parallel_size,
            weight_format=read_weight_format(config, model_config, dtype, self._progress),
        )
        self._kernels = make_kernels(config, device, start.cores if start else kernel_cores()[0])
        check_quantized_linear(config.quantization, self._kernels, dtype, device)
        check_batch_invariance(config, model_config, self._kernels)
        self._kv_format = select_kv_format(config.kv_cache_dtype, self._placement.dtype, device)
        outline = build_model(model_config, self._placement.on_meta())
        check_drafts(config, outline)
        check_files(config, outline)
        files = None
        if config.max_drafts:
            from nanocore.worker.drafting.draft_model import find_draft_files

            files = find_draft_files(config, model_config, dtype, device, self._progress)
        draft = None if files is None else files.outline(outline)
        self._info = outlined_info(outline, config, self._kernels, self._kv_format, device, draft)
        check_memory(config, {rank: self._info.weight_bytes})
        model = build_model(model_config, self._placement)
        proposer, self._fill_draft = None, lambda: 0
        if files is not None:
            proposer = files.proposer(model, self._kernels, links.tp)
            self._fill_draft = partial(files.fill, proposer.model, self._kernels, self._progress)
        self._graph_capture: CudaGraphCapture | None = None
        self.runner = ModelRunner(
            model,
            self._kernels,
            links,
            self._stream(),
            config.enforce_eager,
            config.max_drafts,
            proposer,
        )
        self.begin = self.runner.begin

    def _stream(self) -> CudaStream | None:
        if self.device.type != "cuda":
            return None
        torch.cuda.set_device(self.device)
        if not self._config.enforce_eager and self._config.pipeline_parallel_size == 1:
            self._graph_capture = CudaGraphCapture()
        depth = steps_in_flight(self._config, self.device)
        return CudaStream(depth, self.device, self._graph_capture)

    @torch.inference_mode()
    def load_model(self) -> None:
        """Read this rank's part of the weights, and hand it to the kernel backend.

        Raises ModelFileError: see `loader.load_weights`.
        """
        num_threads = torch.get_num_threads()
        # Weights are unpacked in many short operations, in which torch's threads would mostly wait
        # for each other; native kernels, which pack them, have their own.
        torch.set_num_threads(1)
        try:
            self._weight_bytes = fill_and_pack(
                self.runner.model, self._kernels, self._fill, self._config.quantization
            )
            self._weight_bytes += self._fill_draft()
        finally:
            torch.set_num_threads(num_threads)

    def _fill(self, entries: Entries) -> None:
        weight_format = self._placement.weight_format
        if isinstance(weight_format, MergedFormat):
            adapter = weight_format.adapter
            self._weights.update(adapter.digest)
            if self._progress:
                num_modules = len(adapter.modules)
                logger.info("adapter %s merged into %d projections", adapter.folder, num_modules)
        if self._config.load_format == "dummy":
            fill_dummy_weights(entries, self._config.seed)
            self._weights.update(f"dummy {self._config.seed} {self.device.type}".encode())
            return
        folder, names = Path(self._config.folder), self.runner.model.entry_name
        if not is_gguf(folder):
            self._weights.update(format_digest(folder))
        load_weights(folder, entries, names, self._progress, self._weights)

    def profile(self) -> WorkerInfo:
        """See how much memory is left beside the weights.

        On CUDA the largest steps are run, which compiles kernels, so that no request waits for it.

        Raises CacheMemoryError: nothing is left.
        """
        config, device, speed = self._config, self.device, None
        kv_bytes = config.kv_cache_memory_bytes
        if device.type == "cuda":
            memory_bytes = torch.cuda.mem_get_info(device)[1]
            if kv_bytes is None:
                share = config.gpu_memory_utilization
                kv_bytes = cuda_kv_bytes(device, share, self._run_largest_steps)
            else:
                self._run_largest_steps()
            speed = measure_speed(device, self._placement.dtype)
        else:  # ranks share a CPU: their engine measures it
            memory_bytes = cpu_memory_bytes(config.num_ranks)
            if kv_bytes is None:
                kv_bytes = cpu_kv_bytes(memory_bytes, config.num_ranks)
        return msgspec.structs.replace(
            self._info,
            weight_bytes=self._weight_bytes,
            available_kv_bytes=kv_bytes,
            memory_bytes=memory_bytes,
            numerics=rank_numerics(
                config,
                self.runner.config,
                self._placement.dtype,
                self._kernels,
                self._kv_format,
                self._weights.digest(),
            ),
            speed=speed,
        )

    def allocate_kv_cache(
        self, num_slabs: int, max_model_len: int, groups: Sequence[KVGroup] = ()
    ) -> None:
        """Make the KV cache and the persistent batch, and capture steps, or compile for them.

        What there was before is gone.
        """
        config = self._config
        self.runner.allocate(
            self._kv_format,
            num_slabs,
            config.block_size,
            config.max_num_seqs,
            max_model_len,
            groups,
        )
        self.runner.capture(config.max_num_batched_tokens)

    def _run_largest_steps(self) -> int:
        """Run the largest steps; returns the bytes that further graphs will take."""
        config, runner = self._config, self.runner
        start_s = time.monotonic()
        run_largest_steps(runner, self._kv_format, config)
        logger.info("largest steps, and kernels for them, %.2f s", time.monotonic() - start_s)
        if self._graph_capture is None:
            return 0
        num_graphs = len(runner.shapes(config.max_num_batched_tokens))
        return self._graph_capture.last_bytes * max(0, num_graphs - NUM_PROFILED_GRAPHS)


class LocalExecutor:
    """Implements `Executor` with a worker in this process.

    A CPU runs a step when it is submitted, a GPU while the step loop goes on.

    Raises StartError: see `Worker`.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._worker = Worker(config)
        self.load_model = self._worker.load_model
        self.allocate_kv_cache = self._worker.allocate_kv_cache
        self.max_concurrent_steps = steps_in_flight(config, self._worker.device)
        self._steps: deque[PendingOutput] = deque()

    def profile(self) -> list[WorkerInfo]:
        return [self._worker.profile()]

    def submit(self, plan: SchedulerOutput) -> None:
        self._steps.append(self._worker.begin(plan))

    def sample(self, masks: TokenMasks) -> None:
        self._steps[-1].sample(masks)

    def collect(self) -> ModelRunnerOutput:
        return self._steps.popleft().wait()

    def blame(self) -> str:
        return "it hangs in the engine's own process, whose log has the stacks of its threads"

    def on_failure(self, report: Callable[[str], None]) -> None:
        """Nothing can die here without the engine."""

    def close(self) -> None:
        """The worker ends with the process."""


def run_largest_steps(runner: ModelRunner, kv_format: KVCacheFormat, config: WorkerConfig) -> None:
    """Run a step in which every row samples, as expensively as any, and a long context's end, of
    which every token's logits are looked at.

    All their KV blocks are the same one: what is computed makes no sense, and takes the room it
    would. The model's KV cache is gone afterwards, and the persistent batch is to be allocated
    anew. The captured graphs stay until then.
    """
    max_len = config.max_model_len
    runner.allocate(kv_format, 1, config.block_size, config.max_num_seqs, max_len)
    runner.capture(config.max_num_batched_tokens, NUM_PROFILED_GRAPHS)
    num_rows, vocab_size = config.max_num_seqs, runner.config.vocab_size
    num_logprobs = vocab_size if config.max_logprobs == -1 else config.max_logprobs
    per_row = max(1, min(config.max_num_batched_tokens // num_rows, max_len - 1))
    sampling = msgspec.structs.replace(costliest_sampling(vocab_size), logprobs=num_logprobs)
    blocks = config.block_size, len(runner.batch.blocks.ids)
    rows = [_row(row, per_row, per_row, blocks, sampling) for row in range(num_rows)]
    plan = _plan(rows, [], per_row, awaits_masks=True)
    pending = runner.begin(plan)
    if pending.awaits_masks:  # here the model ends
        words = np.full(num_rows * -(-vocab_size // 32), -1, "<i4").tobytes()
        pending.sample(TokenMasks(step=plan.step, rows=plan.chunk_rows, words=words))
    pending.wait()
    if runner.sampler is not None and runner.model.head is not None:
        width, num_samples = runner.model.head.num_tokens, config.max_samples
        _sample(runner, runner.sampler, width, [rows[i % num_rows] for i in range(num_samples)])
    num_tokens = min(config.max_num_batched_tokens, max_len - 1)
    num_tokens = min(num_tokens, max(1, MAX_PROMPT_LOGPROBS // (1 + num_logprobs)))
    sampling = msgspec.structs.replace(sampling, prompt_logprobs=num_logprobs)
    last = _row(0, max_len - 1, num_tokens, blocks, sampling)
    runner.execute(_plan([last], list(range(num_rows)), num_tokens))
    runner.release_kv_memory()


def _sample(runner: ModelRunner, sampler: TokenSampler, width: int, rows: list[NewRow]) -> None:
    """Sample as expensively as it gets: of equal logits no filter can leave any out.

    Then plain tokens in every way: with noise and masks and without, and with places to write them
    to, unless some rows beside them are processed.
    """
    columns = RowColumns(len(rows), sampler.vocab_size)
    for new in rows:
        columns.set_row(new)
    index = np.array([new.row for new in rows])
    sampled, device = columns.of_rows(index), runner.device
    fields = {name: torch.from_numpy(x).to(device) for name, x in sampled.columns.items()}
    rows_R = torch.from_numpy(index).to(device)
    positions_R = torch.tensor([new.num_prompt_tokens for new in rows], device=device)
    places = TokenPlaces(runner.tables.token_table, rows_R, positions_R)
    sampling = SamplingMetadata(sampled, fields, places)
    logits_RV = torch.zeros(len(rows), width, device=device)
    sampler.sample_processed(logits_RV, sampling)
    words_MW = torch.zeros(1, -(-sampler.vocab_size // 32), dtype=torch.int32, device=device)
    index_R = torch.zeros(len(rows), dtype=torch.int32, device=device)
    mask = TokenMask(words_MW, index_R)
    for way in itertools.product((None, sampling.noise), (None, places), (None, mask)):
        sampler.sample_plain(logits_RV, *way)


def _row(
    row: int,
    length: int,
    num_tokens: int,
    blocks: tuple[int, int],
    sampling: EngineSamplingParams,
) -> NewRow:
    """A row of `length` tokens of which the last num_tokens are to be computed.

    blocks: tokens of a block, and groups of blocks.
    """
    block_size, num_groups = blocks
    return NewRow(
        row=row,
        token_ids=np.zeros(length, "<i4").tobytes(),
        num_prompt_tokens=length,
        num_computed_tokens=length - num_tokens,
        block_ids=np.zeros(num_groups * -(-length // block_size), "<i4").tobytes(),
        sampling=sampling,
        seed=0,
        stop_token_ids=[0] * MAX_STOP_TOKEN_IDS,
        num_prompt_logprobs=length - num_tokens,  # those of computed tokens are known already
    )


def _plan(
    rows: list[NewRow], removed: list[int], num_tokens: int, awaits_masks: bool = False
) -> SchedulerOutput:
    column = np.array([new.row for new in rows], "<i4")
    return SchedulerOutput(
        step=0,
        removed_rows=np.array(removed, "<i4").tobytes(),
        added=rows,
        block_rows=b"",
        block_ids=b"",
        chunk_rows=column.tobytes(),
        chunk_counts=np.full(len(rows), num_tokens, "<i4").tobytes(),
        num_tokens=num_tokens * len(rows),
        awaits_masks=awaits_masks,
    )
