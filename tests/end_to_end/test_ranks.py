"""Ranks as processes: what they compute together, and that none survives or is left in the dark."""

from __future__ import annotations

import asyncio
import os
import resource
import select
import signal
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from nanocore.client import LLM, AsyncEngineClient, EngineDeadError, SamplingParams
from nanocore.engine_core.config import EngineConfig
from nanocore.worker.executors.process_executor import RankProcess
from nanocore.worker.executors.status_board import StatusBoard
from nanocore.worker.rank_messages import RankStart
from tests.end_to_end.engine_process import engine
from tests.end_to_end.forked import run_to_exit
from tests.end_to_end.rank_processes import (
    doomed_engine,
    listening_sockets,
    rank_pids,
    wait_for_ends,
    write_wide_model,
)

pytestmark = pytest.mark.campaign

LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True, detokenize=False)
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 100))


async def fail_while_streaming(endpoint: str, strike: Any, prompt: list[int]) -> EngineDeadError:
    """Strike while a request streams; the error that its client gets."""
    async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
        stream = client.generate([1, 2, 3], LONG)
        await anext(stream)
        strike()
        with pytest.raises(EngineDeadError) as caught:
            await asyncio.gather(drain(stream), client.complete(prompt, SHORT))
        return caught.value


async def ask_until_it_fails(client: AsyncEngineClient) -> None:
    while True:
        await client.stats()


async def drain(stream: Any) -> None:
    async for _ in stream:
        pass


# -- what they compute ----------------------------------------------------------------------------


@pytest.mark.usefixtures("forked_launches")
def test_sampled_tokens_are_the_same_at_any_number_of_ranks(tiny_model: Path) -> None:
    params = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=24, detokenize=False, **filters)
        for i, filters in enumerate(
            [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 300, "top_p": 0.99}]
        )
    ]
    prompts = [[7, i, 9] * (3 + 20 * i) for i in range(len(params))]
    results = []
    for ranks in ({}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        with LLM(tiny_model, max_num_batched_tokens=64, max_num_seqs=4, **ranks) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            results.append([output.outputs[0].token_ids for output in outputs])
    assert results[1] == results[0]
    assert results[2] == results[0]


# -- what the outside sees ------------------------------------------------------------------------


def test_nothing_listens_on_tcp_and_an_orderly_end_leaves_no_process(tiny_model: Path) -> None:
    async def ask(endpoint: str) -> None:
        async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
            await client.complete([1, 2], SHORT)

    flags = ("--tp", "2", "--pp", "2")
    with doomed_engine(tiny_model, *flags, num_ranks=4, exit_code=130) as (running, pids):
        run(ask(running.endpoint))
        for pid in (running.process.pid, *pids):
            assert listening_sockets(pid) == []
        for pid in (running.process.pid, *pids):  # as Ctrl-C in a terminal does
            os.kill(pid, signal.SIGINT)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tp", "3"], ["--tensor-parallel-size 3", "num_attention_heads"]),
        (["--pp", "4"], ["--pipeline-parallel-size 4", "3 layers"]),
        (["--tp", "0"], ["--tensor-parallel-size 0"]),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(
    tiny_model: Path, short_path: Path, flags: list[str], words: list[str]
) -> None:
    result = run_to_exit(
        "--model", str(tiny_model), "--listen", f"ipc://{short_path}/e/engine.sock", *flags
    )
    assert result.returncode == 2
    for word in words:
        assert word in result.stderr
    assert result.stderr.count("Traceback") == 0


# -- deaths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_and_takes_everything_with_it(tiny_model: Path, rank: int) -> None:
    async def main(endpoint: str) -> None:
        error = await fail_while_streaming(
            endpoint, lambda: os.kill(pids[rank], signal.SIGKILL), [5] * 50
        )
        assert f"rank {rank} of 2 (pid {pids[rank]}) was killed by SIGKILL" in str(error)

    with doomed_engine(tiny_model, "--tp", "2", num_ranks=2, exit_code=70) as (running, pids):
        run(main(running.endpoint))


def test_a_rank_that_dies_while_nothing_runs_is_noticed(tiny_model: Path) -> None:
    async def main(endpoint: str) -> None:
        async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
            await client.complete([1, 2], SHORT)
            os.kill(pids[1], signal.SIGKILL)
            with pytest.raises(EngineDeadError, match=r"rank 1 of 2 .* was killed by SIGKILL"):
                await ask_until_it_fails(client)

    with doomed_engine(tiny_model, "--pp", "2", num_ranks=2, exit_code=70) as (running, pids):
        run(main(running.endpoint))


def test_ranks_end_with_a_killed_engine_even_in_the_middle_of_a_step(tiny_model: Path) -> None:
    async def main(endpoint: str) -> None:
        async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
            stream = client.generate([1, 2, 3], LONG)
            await anext(stream)
            pids = rank_pids(running.process.pid, 2)
            pidfds = [os.pidfd_open(pid) for pid in pids]
            os.kill(pids[0], signal.SIGSTOP)  # so that rank 1 waits for it
            running.process.kill()
            wait_for_ends(pidfds)

    with engine(tiny_model, "--tp", "2") as running:
        run(main(running.endpoint))


@pytest.mark.parametrize("split", ["--tp", "--pp"])
def test_a_rank_that_hangs_is_named(tiny_model: Path, split: str) -> None:
    async def main(endpoint: str) -> None:
        error = await fail_while_streaming(
            endpoint, lambda: os.kill(pids[1], signal.SIGSTOP), [5] * 50
        )
        assert f"it waits for rank 1 of 2 (pid {pids[1]})" in str(error)
        assert "rank 0" not in str(error)

    flags = (split, "2", "--step-timeout-s", "1.5")
    with doomed_engine(tiny_model, *flags, num_ranks=2, exit_code=70) as (running, pids):
        run(main(running.endpoint))


def test_a_rank_that_fails_when_nobody_listens_any_more_ends_without_a_word(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As when two ranks fail at once and the engine leaves with the first one's reason."""
    board_fd = StatusBoard.create(1)
    start = RankStart(
        config=EngineConfig(device="cpu").worker_config(str(tmp_path), max_model_len=64),
        rank=0,
        cores=[*os.sched_getaffinity(0)],
        board_fd=board_fd,
        reduce_fd=-1,
        receive_fd=-1,
        send_fd=-1,
        rendezvous="",
    )
    rank = RankProcess(start)
    with socket.fromfd(rank.pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.shutdown(socket.SHUT_RD)  # what it sends fails; that the engine is gone it cannot see
    assert select.select([rank.pidfd], [], [], 60)[0]
    assert "exited with code 70" in str(rank.death())
    rank.pipe.close()
    rank.end()
    os.close(board_fd)
    assert capfd.readouterr().err == ""


def test_a_rank_out_of_memory_ends_all_with_one_message(tmp_path: Path) -> None:
    model = write_wide_model(tmp_path / "wide")

    async def main(endpoint: str) -> None:
        def strike() -> None:  # room for all that a short step needs, not for a long prompt
            status = Path(f"/proc/{pids[1]}/statm").read_text().split()
            limit = int(status[0]) * resource.getpagesize() + 64 * 2**20
            resource.prlimit(pids[1], resource.RLIMIT_AS, (limit, limit))

        error = await fail_while_streaming(endpoint, strike, [5] * 1000)
        assert f"rank 1 of 2 (pid {pids[1]}): " in str(error)
        assert "can't allocate memory" in str(error)
        assert "Traceback" in str(error)
        assert "mlp.py" in str(error), "not where it happened"

    # A replay has all its memory from the start.
    flags = ["--load-format", "dummy", "--tp", "2", "--kv-cache-memory-bytes", "50000000",
             "--enforce-eager"]  # fmt: skip
    with doomed_engine(model, *flags, num_ranks=2, exit_code=4) as (running, pids):
        run(main(running.endpoint))
        running.process.wait(30)
        log = running.stderr.read_text()
        assert log.count("rank 1 of 2 (pid") == log.count("Traceback") == 1
        assert "rank 0 of 2" not in log
