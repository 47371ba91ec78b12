"""A step's tensors become the columns that cross a process boundary."""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from nanocore.worker.pending_output import NOTHING_SAMPLED, make_output
from nanocore.worker.plan import ModelRunnerOutput

ROWS = np.array([4, 0, 7])


def test_one_token_of_each_row_needs_no_counts() -> None:
    output = make_output(ROWS, {"token_ids": torch.tensor([5, -1, 2**31 - 1])})
    assert np.frombuffer(output.rows, "<i4").tolist() == [4, 0, 7]
    assert np.frombuffer(output.token_ids, "<i4").tolist() == [5, -1, 2**31 - 1]
    assert output.counts == b""
    assert output.logprobs is output.prompt_logprobs is None


def test_several_tokens_of_a_row_come_with_counts() -> None:
    sampled = {
        "token_ids": torch.tensor([1, 2, 3, 4]),
        "counts": torch.tensor([3, 0, 1]),
    }
    output = make_output(ROWS, sampled)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=ModelRunnerOutput)
    assert received == output
    assert np.frombuffer(received.counts, "<i4").tolist() == [3, 0, 1]


def test_a_stage_that_does_not_sample_has_no_rows() -> None:
    assert make_output(ROWS, {}) == NOTHING_SAMPLED.wait()
    assert NOTHING_SAMPLED.wait().rows == b""
