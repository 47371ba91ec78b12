"""How memory is measured: the arithmetic of shares, and the steps that are run to find the peak."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanocore.kernels.kv_quantization import kv_cache_format
from nanocore.kernels.logit_edits import LogitEdits, TokenMask
from nanocore.kernels.select import select_kernels
from nanocore.protocol.errors import CacheMemoryError, ConfigError, WorkerError
from nanocore.worker.layers.decoder import fill_and_pack
from nanocore.worker.memory import kv_cache_bytes as memory
from nanocore.worker.memory.host_memory import host_bytes
from nanocore.worker.models import build_model, load_model_config
from nanocore.worker.placement import Placement
from nanocore.worker.plan import SchedulerOutput
from nanocore.worker.step.model_runner import ModelRunner
from nanocore.worker.worker import NUM_PROFILED_GRAPHS, Worker, run_largest_steps
from tests.fake_device import FakeGraphRecorder, FakeStream
from tests.model_families import BUILDERS
from tests.worker.configs import make_worker_config
from tests.worker.device_engine import DeviceKernels, load_model
from tests.worker.filling import fill_with

GB = 10**9
CUDA = torch.device("cuda", 0)


def test_ranks_on_a_cpu_share_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_bytes", lambda: 10 * GB)
    monkeypatch.setattr(memory, "process_bytes", lambda: None)
    assert memory.cpu_memory_bytes(1) == 10 * GB
    assert memory.cpu_memory_bytes(2) == 5 * GB
    assert memory.cpu_memory_bytes(2, taken_bytes=4 * GB) == 3 * GB
    assert memory.cpu_memory_bytes(2, taken_bytes=40 * GB) == 0
    assert memory.cpu_kv_bytes(5 * GB, num_ranks=2) == 2 * GB
    assert memory.cpu_kv_bytes(1000 * GB, num_ranks=4) == 2 * 2**30


def test_what_a_process_may_have_is_each_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_bytes", lambda: 10 * GB)
    monkeypatch.setattr(memory, "process_bytes", lambda: 3 * GB)
    assert memory.cpu_memory_bytes(1) == 3 * GB
    assert memory.cpu_memory_bytes(2, taken_bytes=2 * GB) == 2 * GB
    assert memory.cpu_memory_bytes(5) == 2 * GB


def test_weights_that_would_not_fit_are_refused_before_memory_is_taken_for_them(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "host_bytes", lambda: 100_000)
    with pytest.raises(CacheMemoryError, match=r"the weights need .* is 0\.1 MB"):
        Worker(make_worker_config(folder=str(tiny_model), load_format="auto"))


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A device of 100 GB, of which torch has reserved 30, had 40 at its peak; others hold 5."""
    state = {"free": 65 * GB, "total": 100 * GB, "reserved": 30 * GB, "peak": 0}
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: state["peak"])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: state["reserved"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (state["free"], state["total"]))
    return state


def test_on_cuda_the_peak_of_the_largest_step_and_other_processes_are_taken_off(
    fake_cuda: dict[str, int],
) -> None:
    def largest_step() -> int:
        fake_cuda["peak"] = 40 * GB
        return 0

    assert memory.cuda_kv_bytes(CUDA, 0.9, largest_step) == (90 - 40 - 5) * GB


def test_on_cuda_graphs_that_are_kept_and_those_to_come_are_taken_off(
    fake_cuda: dict[str, int],
) -> None:
    def largest_step() -> int:
        fake_cuda["peak"] = 40 * GB
        fake_cuda["reserved"] += 2 * GB
        fake_cuda["free"] -= 3 * GB
        return 4 * GB

    assert memory.cuda_kv_bytes(CUDA, 0.9, largest_step) == (90 - 40 - (5 + 1) - 2 - 4) * GB


def test_on_cuda_a_share_that_is_used_up_is_an_error_with_the_flag(
    fake_cuda: dict[str, int],
) -> None:
    fake_cuda["peak"] = 60 * GB
    with pytest.raises(CacheMemoryError, match=r"--gpu-memory-utilization 0\.5.*60\.0 GB.*5\.0"):
        memory.cuda_kv_bytes(CUDA, 0.5, lambda: 0)


def test_the_largest_steps_fill_the_budget_every_row_and_the_longest_context(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = Placement(torch.float32, torch.device("cpu"))
    model = build_model(load_model_config(tiny_model), placement)
    runner = ModelRunner(model, select_kernels("torch", placement.device))
    config = make_worker_config(
        folder=str(tiny_model), max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=300
    )
    fill_and_pack(model, runner.kernels, fill_with(0))
    plans: list[SchedulerOutput] = []
    sampled: list[int] = []
    longest: list[int] = []
    assert runner.sampler is not None
    begin, sample, forward = runner.begin, runner.sampler.sample_processed, model.forward

    def record_forward(x_TE, caches, context, index_R):  # type: ignore[no-untyped-def]
        longest.append(max(context.metadata[0].seq_lens))
        return forward(x_TE, caches, context, index_R)

    monkeypatch.setattr(model, "forward", record_forward)
    monkeypatch.setattr(runner, "begin", lambda plan: (plans.append(plan), begin(plan))[1])
    monkeypatch.setattr(
        runner.sampler,
        "sample_processed",
        lambda *args, **more: (sampled.append(len(args[0])), sample(*args, **more))[1],
    )
    masks: list[TokenMask | None] = []
    best = runner.kernels.best_filtered_token
    monkeypatch.setattr(
        runner.kernels,
        "best_filtered_token",
        lambda *args: (masks.append(args[-1]), best(*args))[1],
    )
    edited: list[LogitEdits] = []
    monkeypatch.setattr(runner.kernels, "edit_logits", lambda _, edits: edited.append(edits))
    run_largest_steps(runner, kv_cache_format("auto", placement.dtype), config)
    assert [len(edits.rows_R) for edits in edited] == sampled
    assert {
        len(getattr(edits.lists, name)) // len(edits.rows_R)
        for edits in edited
        for name in ("allowed_N", "bad_N")
    } == {1024}
    assert {len(edits.lists.biased_N) // len(edits.rows_R) for edits in edited} == {384}
    assert [plan.num_tokens for plan in plans] == [8 * 37, 300]
    assert longest == [37, 1023]
    assert sampled == [8, 8, 1]
    assert [None if mask is None else len(mask.words_MW) for mask in masks] == [8, None, None]
    assert runner.stage.kv_caches == []


def test_the_largest_steps_look_at_the_logits_of_all_rows_and_of_a_prompt(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ModelRunner(load_model(tiny_model), DeviceKernels(), stream=FakeStream(1))
    config = make_worker_config(
        folder=str(tiny_model), max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=300
    )
    looked: list[tuple[int, int]] = []
    assert runner.sampler is not None
    logprobs = runner.sampler.logprobs

    def recording(logits_RV: Tensor, token_ids_N: Tensor, num_top: int, *more: Any) -> object:
        looked.append((len(token_ids_N), num_top))
        return logprobs(logits_RV, token_ids_N, num_top, *more)

    monkeypatch.setattr(runner.sampler, "logprobs", recording)
    run_largest_steps(runner, kv_cache_format("auto", torch.float32), config)
    of_prompt = [64] * 4 + [43]  # the last token's logits are sampled from
    assert looked == [(rows, 20) for rows in (8, 1, *of_prompt)]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_on_a_device_the_largest_graphs_are_recorded_to_be_counted(
    tiny_model: Path, kv_cache_dtype: str
) -> None:
    graph_capture = FakeGraphRecorder()
    kv_format = kv_cache_format(kv_cache_dtype, torch.float32, "cuda")
    model = load_model(tiny_model)
    stream = FakeStream(1, graph_capture)
    runner = ModelRunner(model, DeviceKernels(), stream=stream)
    config = make_worker_config(
        folder=str(tiny_model), max_model_len=64, max_num_seqs=8, max_num_batched_tokens=300
    )
    run_largest_steps(runner, kv_format, config)
    assert graph_capture.num_records == NUM_PROFILED_GRAPHS
    num_graphs = len(runner.shapes(300))
    assert num_graphs > NUM_PROFILED_GRAPHS
    assert runner.stage.kv_caches == []
    runner.allocate(kv_format, 20, 16, 8, 64)
    runner.capture(300)
    gc.collect()  # a fake graph refers to what it repeats, and that to it
    assert graph_capture.pools.num_graphs == {1: 0, 2: num_graphs}


def test_a_graph_that_cannot_be_recorded_is_told_with_a_remedy(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("out of resource: shared memory")

    monkeypatch.setattr(FakeGraphRecorder, "capture", fail)
    stream = FakeStream(1, FakeGraphRecorder())
    runner = ModelRunner(load_model(tiny_model), DeviceKernels(), stream=stream)
    runner.allocate(kv_cache_format("auto", torch.float32), 20, 16, 8, 64)
    with pytest.raises(WorkerError, match=r"graph of 8 decodes.*shared memory.*--enforce-eager"):
        runner.capture(48)


MB = 2**20
UNLIMITED_V1 = 2**63 - 4096
V2_MOUNT = "41 31 0:38 {root} /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
V1_MOUNT = "35 31 0:32 {root} /cg\\040v1/memory rw shared:9 - cgroup cgroup rw,memory\n"
CPU_MOUNT = "32 31 0:29 / /cg\\040v1/cpu rw - cgroup cgroup rw,cpu\n"


def make_host(root: Path, cgroup: str, mounts: str, free_mb: int = 1000) -> None:
    folder = root / "proc/self"
    folder.mkdir(parents=True)
    meminfo = f"MemTotal: {2 * free_mb * 1024} kB\nMemAvailable: {free_mb * 1024} kB\n"
    (root / "proc/meminfo").write_text(meminfo)
    (folder / "cgroup").write_text(cgroup)
    (folder / "mountinfo").write_text(mounts)


def make_v2(path: Path, used_mb: int, cached_mb: int = 0, **limits: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.current").write_text(f"{used_mb * MB}\n")
    (path / "memory.stat").write_text(f"anon 7\ninactive_file {cached_mb * MB}\n")
    for name, limit in limits.items():
        (path / f"memory.{name}").write_text(f"{limit}\n")


def make_v1(path: Path, used_mb: int, limit: int, cached_mb: int = 0) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.usage_in_bytes").write_text(f"{used_mb * MB}\n")
    (path / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (path / "memory.stat").write_text(f"cache 1\ntotal_inactive_file {cached_mb * MB}\n")


def test_without_limits_it_is_what_the_system_has_free(tmp_path: Path) -> None:
    make_host(tmp_path, "0::/\n", V2_MOUNT.format(root="/"))
    assert host_bytes(tmp_path) == 1000 * MB


def test_the_tightest_cgroup_above_us_counts_and_cached_files_count_as_free(
    tmp_path: Path,
) -> None:
    make_host(tmp_path, "0::/a/b/c\n", V2_MOUNT.format(root="/"))
    top = tmp_path / "sys/fs/cgroup/unified"
    make_v2(top / "a/b/c", 50, max="max", high="max")
    make_v2(top / "a/b", 400, cached_mb=100, max=str(500 * MB))
    make_v2(top / "a", 450, max=str(900 * MB), high="max")
    assert host_bytes(tmp_path) == 200 * MB
    make_v2(top / "a", 450, max=str(900 * MB), high=str(500 * MB))
    assert host_bytes(tmp_path) == 50 * MB
    make_v2(top / "a", 600, max=str(500 * MB))
    assert host_bytes(tmp_path) == 0


def test_version_1_is_found_by_its_controller(tmp_path: Path) -> None:
    cgroup = "4:memory:/a/b\n2:cpu,cpuacct:/x\n0::/\n"
    make_host(tmp_path, cgroup, CPU_MOUNT + V1_MOUNT.format(root="/"))
    top = tmp_path / "cg v1/memory"
    make_v1(top, 9, UNLIMITED_V1)
    make_v1(top / "a", 300, 512 * MB, cached_mb=30)
    make_v1(top / "a/b", 300, UNLIMITED_V1)
    assert host_bytes(tmp_path) == (512 - 270) * MB


def test_in_a_container_our_own_cgroup_is_the_mounts_root(tmp_path: Path) -> None:
    # As Docker mounts it: what /proc says is the host's path, what is mounted is its end.
    make_host(tmp_path, "4:memory:/docker/abc\n", V1_MOUNT.format(root="/docker/abc"))
    make_v1(tmp_path / "cg v1/memory", 100, 300 * MB)
    assert host_bytes(tmp_path) == 200 * MB


def test_a_system_that_does_not_say_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="how much memory"):
        host_bytes(tmp_path)


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_process_knows_what_its_own_limits_leave(limit: str) -> None:
    program = (
        "import resource, mmap; from nanocore.worker.memory.host_memory import process_bytes\n"
        f"resource.setrlimit(resource.{limit}, (2**30, 2**30))\n"
        "before = process_bytes(); room = mmap.mmap(-1, 2**28, mmap.MAP_PRIVATE)\n"
        "print(before < 2**30, before - process_bytes() >= 2**28)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"True True\n"


def test_this_machine_says_how_much_it_has() -> None:
    assert 0 < host_bytes() < 2**50


@pytest.mark.parametrize("name", ["gemma2", "qwen35_square"])
def test_the_largest_steps_have_blocks_of_every_group(name: str, tmp_path: Path) -> None:
    """Layers that keep all tokens, a window of them, or a state."""
    runner = ModelRunner(load_model(BUILDERS[name](tmp_path)), DeviceKernels())
    config = make_worker_config(
        folder=str(tmp_path), max_model_len=100, max_num_seqs=3, max_num_batched_tokens=60
    )
    run_largest_steps(runner, kv_cache_format("auto", torch.float32), config)
    assert runner.stage.kv_caches == []
