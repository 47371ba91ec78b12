"""A step's tensors become the columns that cross a process boundary."""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from nanocore.worker.plan import ModelRunnerOutput
from nanocore.worker.step.pending_output import make_output

ROWS = np.array([4, 0, 7])
ONE_EACH = np.ones(3, np.int64)


def test_one_token_of_each_row_needs_no_counts() -> None:
    output = make_output(ROWS, ONE_EACH, {"token_ids": torch.tensor([5, -1, 2**31 - 1])})
    assert np.frombuffer(output.rows, "<i4").tolist() == [4, 0, 7]
    assert np.frombuffer(output.token_ids, "<i4").tolist() == [5, -1, 2**31 - 1]
    assert output.counts == b""
    assert output.logprobs is output.prompt_logprobs is None


def test_of_several_sample_slots_a_row_gets_as_many_tokens_as_are_counted() -> None:
    sampled = {
        "token_ids": torch.tensor([1, 2, 3, 7, 8, 4]),
        "counts": torch.tensor([3, 1, 1]),
    }
    output = make_output(ROWS, np.array([3, 2, 1]), sampled)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=ModelRunnerOutput)
    assert received == output
    assert np.frombuffer(received.counts, "<i4").tolist() == [3, 1, 1]
    assert np.frombuffer(received.token_ids, "<i4").tolist() == [1, 2, 3, 7, 4]


def test_a_stage_that_does_not_sample_has_no_rows() -> None:
    assert make_output(ROWS, ONE_EACH, {}) == ModelRunnerOutput(rows=b"", token_ids=b"")
