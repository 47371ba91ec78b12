"""A program: what two new sampling parameters take, and whether rows that ask for them get them.

Run with a model's folder. The parameters are declared before anything has used the declarations, as
they would be in `columns.py` and `processors.py`; nothing else is told of them. Prints the tokens
of each request as JSON: run on the host, on a fake device step by step, and there as graphs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.sampling import columns, processors
from nanocore.worker.sampling.columns import Column, SamplingMetadata
from nanocore.worker.sampling.processors import Processor

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [200, 201, 202], list(range(40, 75))]
PENALTIES = [(1.4, 0.0), (1.0, 4.0), (1.2, 2.5)]
"""repetition_penalty and presence_penalty of a request."""
MAX_TOKENS = 12


class NewParams(EngineSamplingParams, frozen=True, kw_only=True):
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0


def seen(metadata: SamplingMetadata, first_R: Tensor, vocab_size: int) -> Tensor:
    """Which tokens a row holds from place first_R on, bool [R, V]."""
    token_ids_RL = metadata.known_tokens_RL.long()
    places_L = torch.arange(token_ids_RL.shape[1], device=token_ids_RL.device)
    counts_RL = (places_L >= first_R[:, None]) & (places_L < metadata.num_tokens_R[:, None])
    seen_RV = torch.zeros(len(first_R), vocab_size + 1, dtype=torch.bool)
    return seen_RV.scatter_(1, token_ids_RL.where(counts_RL, vocab_size), True)[:, :vocab_size]


def repetition_penalty(logits_RV: Tensor, metadata: SamplingMetadata) -> Tensor:
    penalty_R1 = metadata.column("repetition_penalty")[:, None]
    everything_R = torch.zeros_like(metadata.num_tokens_R)
    penalised_RV = (logits_RV * penalty_R1).where(logits_RV < 0, logits_RV / penalty_R1)
    seen_RV = seen(metadata, everything_R, logits_RV.shape[1])
    return penalised_RV.where(seen_RV, logits_RV)


def presence_penalty(logits_RV: Tensor, metadata: SamplingMetadata) -> Tensor:
    seen_RV = seen(metadata, metadata.column("num_prompt_tokens"), logits_RV.shape[1])
    return logits_RV - seen_RV * metadata.column("presence_penalty")[:, None]


def declare() -> None:
    columns.COLUMNS += (  # type: ignore[misc]
        Column("repetition_penalty", torch.float32, 1.0, "logits"),
        Column("presence_penalty", torch.float32, 0.0, "logits"),
    )
    processors.PROCESSORS += [
        Processor(frozenset({"repetition_penalty"}), repetition_penalty),
        Processor(frozenset({"presence_penalty"}), presence_penalty),
    ]


def main(folder: Path) -> None:
    declare()
    from tests.fake_device import FakeGraphRecorder
    from tests.worker.device_engine import Engine, Wish, load_model

    model = load_model(folder)
    wishes = [
        Wish(
            prompt, MAX_TOKENS,
            NewParams(temperature=0.0, repetition_penalty=repetition, presence_penalty=presence),
        )
        for prompt, (repetition, presence) in zip(PROMPTS, PENALTIES, strict=True)
    ]  # fmt: skip
    wishes += [
        Wish(PROMPTS[0], MAX_TOKENS, NewParams(temperature=0.0)),
        Wish(PROMPTS[1], MAX_TOKENS, NewParams(temperature=0.9, top_k=40, repetition_penalty=1.3)),
        Wish(PROMPTS[2], MAX_TOKENS, NewParams(temperature=0.9, top_k=40)),
    ]
    runs = {
        "host": Engine(model, depth=0),
        "device": Engine(model, depth=2),
        "graphs": Engine(model, depth=2, recorder=FakeGraphRecorder()),
    }
    print(json.dumps({name: list(run.run(wishes).values()) for name, run in runs.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
