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
"""penalty_of_all and penalty_of_output of a request: repetition and presence, by other names."""
MAX_TOKENS = 12


class NewParams(EngineSamplingParams, frozen=True, kw_only=True):
    penalty_of_all: float = 1.0
    penalty_of_output: float = 0.0


def seen(metadata: SamplingMetadata, first_R: Tensor, vocab_size: int) -> Tensor:
    """Which tokens a row holds from place first_R on, bool [R, V]."""
    token_ids_RL = metadata.known_tokens_RL.long()
    places_L = torch.arange(token_ids_RL.shape[1], device=token_ids_RL.device)
    counts_RL = (places_L >= first_R[:, None]) & (places_L < metadata.num_tokens_R[:, None])
    seen_RV = torch.zeros(len(first_R), vocab_size + 1, dtype=torch.bool)
    return seen_RV.scatter_(1, token_ids_RL.where(counts_RL, vocab_size), True)[:, :vocab_size]


def penalty_of_all(logits_RV: Tensor, metadata: SamplingMetadata) -> Tensor:
    penalty_R1 = metadata.column("penalty_of_all")[:, None]
    everything_R = torch.zeros_like(metadata.num_tokens_R)
    penalised_RV = (logits_RV * penalty_R1).where(logits_RV < 0, logits_RV / penalty_R1)
    seen_RV = seen(metadata, everything_R, logits_RV.shape[1])
    return penalised_RV.where(seen_RV, logits_RV)


def penalty_of_output(logits_RV: Tensor, metadata: SamplingMetadata) -> Tensor:
    seen_RV = seen(metadata, metadata.column("num_prompt_tokens"), logits_RV.shape[1])
    return logits_RV - seen_RV * metadata.column("penalty_of_output")[:, None]


def declare() -> None:
    columns.COLUMNS += (  # type: ignore[misc]
        Column("penalty_of_all", torch.float32, 1.0, "logits", costliest=1.1),
        Column("penalty_of_output", torch.float32, 0.0, "logits", costliest=1.0),
    )
    processors.PROCESSORS += [
        Processor(frozenset({"penalty_of_all"}), penalty_of_all),
        Processor(frozenset({"penalty_of_output"}), penalty_of_output),
    ]
    processors.COLUMNS = columns.COLUMNS  # type: ignore[misc]
    processors.assert_all_is_declared()


def main(folder: Path) -> None:
    declare()
    from tests.fake_device import FakeGraphRecorder
    from tests.worker.device_engine import Engine, Wish, load_model

    model = load_model(folder)
    wishes = [
        Wish(
            prompt,
            MAX_TOKENS,
            NewParams(temperature=0.0, penalty_of_all=repetition, penalty_of_output=presence),
        )
        for prompt, (repetition, presence) in zip(PROMPTS, PENALTIES, strict=True)
    ]
    wishes += [
        Wish(PROMPTS[0], MAX_TOKENS, NewParams(temperature=0.0)),
        Wish(PROMPTS[1], MAX_TOKENS, NewParams(temperature=0.9, top_k=40, penalty_of_all=1.3)),
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
