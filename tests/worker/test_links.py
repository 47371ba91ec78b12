"""Who is connected to whom: tensor parallel groups within stages, and stages with the next ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from nanocore.worker.communication import process_group
from nanocore.worker.communication.links import CHANNEL_DEPTH, channel_buffer_bytes, connect
from nanocore.worker.communication.shared_memory import create_channel
from nanocore.worker.rank_messages import RankStart
from tests.worker.configs import make_worker_config


def start_message(rank: int, tp_size: int, pp_size: int, **fds: int) -> RankStart:
    config = make_worker_config(tensor_parallel_size=tp_size, pipeline_parallel_size=pp_size)
    return RankStart(
        config=config,
        rank=rank,
        cores=[0],
        board_fd=-1,
        rendezvous="/run/meet",
        **{"reduce_fd": -1, "receive_fd": -1, "send_fd": -1} | fds,
    )


@dataclass
class FakeGroup:
    """Takes the place of `ProcessGroupCommunicator`."""

    path: Path
    world_rank: int
    world_size: int
    groups: list[list[int]]
    device: torch.device


@pytest.mark.parametrize(
    ("rank", "receive", "send"),
    [(1, None, "channel to 4"), (5, "channel to 2", "channel to 8"), (6, "channel to 3", None)],
)
def test_on_cuda_a_rank_is_joined_to_its_stage_and_its_neighbours(
    monkeypatch: pytest.MonkeyPatch, rank: int, receive: str | None, send: str | None
) -> None:
    monkeypatch.setattr(process_group, "ProcessGroupCommunicator", FakeGroup)
    monkeypatch.setattr(
        process_group, "ProcessGroupChannel", lambda peer, _device: f"channel to {peer}"
    )
    joined = connect(start_message(rank, tp_size=3, pp_size=3), torch.device("cuda", rank), 8)
    assert isinstance(joined.tp, FakeGroup)
    assert (joined.tp.path, joined.tp.world_rank, joined.tp.world_size) == (
        Path("/run/meet"),
        rank,
        9,
    )
    assert joined.tp.groups == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert (joined.receive, joined.send) == (receive, send)


def test_on_a_cpu_the_largest_steps_hidden_states_pass_to_the_next_stage() -> None:
    config, hidden_size = start_message(0, 1, 2).config, 7
    fd = create_channel(channel_buffer_bytes(config, hidden_size), CHANNEL_DEPTH)
    cpu = torch.device("cpu")
    first = connect(start_message(0, 1, 2, send_fd=fd), cpu, hidden_size)
    second = connect(start_message(1, 1, 2, receive_fd=fd), cpu, hidden_size)
    assert first.receive is None
    assert second.send is None
    assert (first.tp.size, second.tp.size) == (1, 1)
    assert first.send is not None
    assert second.receive is not None
    steps = [torch.randn(config.max_num_batched_tokens, hidden_size) for _ in range(3)]
    for sent in steps[:CHANNEL_DEPTH]:  # without anybody receiving yet
        first.send.send(sent)
    received = [second.receive.recv((5, 7), torch.float32) for _ in range(CHANNEL_DEPTH)]
    assert all(torch.equal(a, b) for a, b in zip(received, steps, strict=False))
