"""How many blocks, and how long requests may be: worked numbers, and errors with their remedies."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.process.cache_size import longest_request, size_cache
from nanocore.kv_cache import CacheGroup, Capacity
from nanocore.protocol.errors import CacheMemoryError, ConfigError
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.memory.kv_groups import CacheKind, LayerGroup
from nanocore.worker.models import load_model_config
from nanocore.worker.rank_messages import WorkerInfo
from tests.model_families import BUILDERS


def sized(config: EngineConfig, ranks: list[WorkerInfo], max_model_len: int) -> tuple[int, int]:
    """Slabs, which are blocks where there is one group, and the longest request."""
    size = size_cache(config, ranks, max_model_len)
    return size.capacity.num_slabs, size.max_model_len


def rank(
    num_blocks: int, block_bytes: int = 1024, device: str = "cpu", memory_bytes: int = 10**9
) -> WorkerInfo:
    return WorkerInfo(
        device=device,
        dtype="float32",
        kernels="torch",
        weight_bytes=1,
        kv_groups=[LayerGroup(CacheKind(), 1, block_bytes)],
        available_kv_bytes=num_blocks * block_bytes + block_bytes - 1,
        memory_bytes=memory_bytes,
    )


@pytest.fixture
def model(tiny_model: object) -> ModelConfig:
    return load_model_config(tiny_model)  # type: ignore[arg-type]


def test_the_rank_with_the_least_room_decides_for_all() -> None:
    config = EngineConfig(max_num_seqs=256)
    ranks = [rank(90), rank(70, block_bytes=3072), rank(80, block_bytes=64)]
    assert sized(config, ranks, 64 * 16) == (70, 1024)


def test_no_more_blocks_than_all_rows_can_use() -> None:
    config = EngineConfig(max_num_seqs=3)
    assert sized(config, [rank(10_000)], 100) == (3 * 7, 100)


def test_the_override_is_taken_as_it_is() -> None:
    assert sized(EngineConfig(num_gpu_blocks_override=64), [rank(1)], 1024) == (64, 1024)


def test_an_override_that_holds_no_longest_request_bounds_its_length_with_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert sized(EngineConfig(num_gpu_blocks_override=5), [rank(1)], 1024) == (5, 80)
    (message,) = caplog.messages
    assert message == (
        "--num-gpu-blocks-override 5: blocks of 16 hold 80 tokens: max_model_len is that instead "
        "of 1024"
    )


def test_an_override_that_holds_no_request_of_the_length_asked_for_is_refused() -> None:
    config = EngineConfig(num_gpu_blocks_override=5, max_model_len=100)
    with pytest.raises(ConfigError, match=r"hold 80 tokens, .*-len 100: raise the former to 7, or"):
        size_cache(config, [rank(1)], 100)


def test_auto_cuts_the_length_to_what_fits_and_only_if_it_must() -> None:
    config = EngineConfig(max_model_len="auto", max_num_seqs=2)
    assert sized(config, [rank(10)], 1024) == (10, 160)
    assert sized(config, [rank(64)], 1024) == (64, 1024)
    assert sized(config, [rank(1000)], 1024) == (128, 1024)
    override = EngineConfig(max_model_len="auto", num_gpu_blocks_override=5)
    assert sized(override, [rank(1)], 1024) == (5, 80)


def test_a_length_that_does_not_fit_is_refused_with_need_have_longest_and_flags() -> None:
    with pytest.raises(CacheMemoryError) as caught:
        size_cache(EngineConfig(), [rank(1000), rank(10, block_bytes=50_048)], 1024)
    message = str(caught.value)
    for word in (
        "1024 tokens",
        "3.2 MB",
        "rank 1",
        "0.6 MB",
        "160 tokens",
        "--max-model-len 160 (or auto)",
        "--kv-cache-memory-bytes 3203072",
    ):
        assert word in message
    assert "--gpu-memory-utilization" not in message
    assert "--kv-cache-dtype" not in message, "of half the size it would not fit"
    with pytest.raises(CacheMemoryError, match="or --kv-cache-dtype int8"):
        size_cache(EngineConfig(), [rank(35, block_bytes=50_048)], 1024)


def test_on_cuda_the_utilization_is_a_remedy_and_nothing_useless_is_suggested() -> None:
    config = EngineConfig(kv_cache_dtype="int8", gpu_memory_utilization=0.5)
    with pytest.raises(CacheMemoryError) as caught:
        size_cache(config, [rank(0, device="cuda:0")], 1024)
    message = str(caught.value)
    assert "--gpu-memory-utilization above 0.5" in message
    assert "--max-model-len" not in message
    assert "--kv-cache-dtype" not in message


def test_auto_cannot_make_room_that_is_not_there() -> None:
    with pytest.raises(CacheMemoryError, match="enough for 0 tokens"):
        size_cache(EngineConfig(max_model_len="auto"), [rank(0)], 1024)


def test_the_model_limits_the_length(model: ModelConfig) -> None:
    assert longest_request(EngineConfig(), model) == 1024
    assert longest_request(EngineConfig(max_model_len="auto"), model) == 1024
    assert longest_request(EngineConfig(max_model_len=1000), model) == 1000
    with pytest.raises(ConfigError, match="--max-model-len 1025"):
        longest_request(EngineConfig(max_model_len=1025), model)


def test_learned_positions_are_all_that_there_are(tmp_path: Path) -> None:
    model = load_model_config(BUILDERS["gpt2"](tmp_path))
    assert longest_request(EngineConfig(max_model_len=1024), model) == 1024
    with pytest.raises(ConfigError, match="max-model-len 1025: the model has 1024 pos"):
        longest_request(EngineConfig(max_model_len=1025), model)


@pytest.mark.parametrize(("name", "length"), [("llama_dynamic", 128), ("phi3_longrope", 256)])
def test_a_length_that_bends_all_positions_must_be_asked_for(
    tmp_path: Path, name: str, length: int
) -> None:
    """With default flags a model says what it was trained to say."""
    model = load_model_config(BUILDERS[name](tmp_path))
    assert longest_request(EngineConfig(), model) == length
    assert longest_request(EngineConfig(max_model_len="auto"), model) == length
    assert longest_request(EngineConfig(max_model_len=1024), model) == 1024
    with pytest.raises(ConfigError, match="use at most 1024"):
        longest_request(EngineConfig(max_model_len=1025), model)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {"num_gpu_blocks_override": 101},
            ["--num-gpu-blocks-override 101: ", "0.3 MB, and there are 0.3 MB", "at most 100, or"],
        ),
        (
            {"kv_cache_memory_bytes": 307_201},
            ["--kv-cache-memory-bytes 307201: there are 0.3 MB", "at most 307200, or"],
        ),
    ],
)
def test_more_than_the_memory_is_refused_with_what_would_fit(
    flags: dict[str, int], words: list[str]
) -> None:
    ranks = [rank(200), rank(100, block_bytes=3072, memory_bytes=307_200)]
    with pytest.raises(CacheMemoryError) as caught:
        size_cache(EngineConfig(**flags), ranks, 64)  # type: ignore[arg-type]
    for word in (*words, "on rank 1"):
        assert word in str(caught.value)
    size_cache(EngineConfig(**{name: n - 1 for name, n in flags.items()}), ranks, 64)  # type: ignore[arg-type]


def windowed(num_bytes: int) -> WorkerInfo:
    """A layer that keeps all tokens, and five with a window of 33, which takes 3 blocks."""
    groups = [LayerGroup(CacheKind(), 1, 1024), LayerGroup(CacheKind(window=33), 5, 5 * 1024)]
    return msgspec.structs.replace(rank(0), kv_groups=groups, available_kv_bytes=num_bytes)


def test_a_window_takes_what_its_tokens_see_and_a_step_and_no_more() -> None:
    """A slab has five blocks of the first group, or one of the other."""
    config = EngineConfig(max_num_seqs=1, max_num_batched_tokens=32)
    size = size_cache(config, [windowed(10**6)], 1600)
    # 100 blocks in 20 slabs; 2 that are seen, 2 of a step, and 1 as both may begin within a block.
    assert size.capacity.blocks_of(1600) == [100, 5]
    assert size.capacity.num_slabs == 25
    assert size.capacity.num_blocks == 25 * 6
    assert size.rank_bytes(windowed(0)) == 25 * 5 * 1024
    assert size.capacity.num_requests(1600) == 1


def test_what_does_not_fit_is_refused_with_what_each_group_takes() -> None:
    config = EngineConfig(max_num_batched_tokens=32)
    with pytest.raises(CacheMemoryError) as caught:
        size_cache(config, [windowed(12 * 5 * 1024)], 1600)
    words = "0.1 MB (100 blocks of full, 5 blocks of window(33)), and there are 0.1 MB for it, "
    assert words + "enough for 560 tokens" in str(caught.value)
    auto = EngineConfig(max_model_len="auto", max_num_batched_tokens=32)
    size = size_cache(auto, [windowed(12 * 5 * 1024)], 1600)
    assert (size.capacity.num_slabs, size.max_model_len) == (12, 560)
    assert size.capacity.slabs_of(560) == 12 < size.capacity.slabs_of(561)


def test_an_override_makes_room_for_so_many_blocks_of_every_group() -> None:
    """As whole retention needed: 20 blocks, 4 slabs for the full layers and 20 for the windows."""
    ranks = [windowed(10**6)]
    config = EngineConfig(num_gpu_blocks_override=20, max_model_len=320)
    size = size_cache(config, ranks, 320)
    assert (size.capacity.num_slabs, size.max_model_len) == (24, 320)
    few = {"max_model_len": 160, "max_num_batched_tokens": 32}
    with pytest.raises(ConfigError, match=r"hold 80 tokens, .*-len 160: raise the former to 6, or"):
        size_cache(EngineConfig(num_gpu_blocks_override=5, **few), ranks, 160)
    fits = size_cache(EngineConfig(num_gpu_blocks_override=6, **few), ranks, 160)
    assert fits.max_model_len == 160
    small = msgspec.structs.replace(windowed(0), memory_bytes=10**6)
    with pytest.raises(
        CacheMemoryError, match=r"need 1\.2 MB, and .* 1\.0 MB .*: use at most 162,"
    ):
        size_cache(EngineConfig(num_gpu_blocks_override=200), [small], 64)


@pytest.mark.parametrize("length", [1, 16, 100, 560, 561, 4000])
def test_the_longest_request_is_what_the_slabs_hold(length: int) -> None:
    for num_slabs in (1, 6, 7, 12, 40):
        capacity = Capacity(num_slabs, 16, [CacheGroup("full", 0, 5), CacheGroup("w", 33)], 32)
        assert (length <= capacity.most_tokens) == (capacity.slabs_of(length) <= num_slabs)
        alone = Capacity(num_slabs, 16, [CacheGroup("w", 33)], 32)
        assert (length <= alone.most_tokens) == (alone.slabs_of(length) <= num_slabs)
