"""Log probabilities of whole texts by several implementations of one model, and their divergence.

Texts are chunks [N, C] of tokens, each a prompt of its own. What is compared are predictions from
the second half of every chunk, as llama.cpp's perplexity tool does it: S = C - 1 - C // 2 of them,
each of the whole vocabulary V.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from nanocore.engine_core.config import EngineConfig
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.loading.gguf.model_files import gguf_model_files
from nanocore.worker.models import load_model_config
from nanocore.worker.plan import NewRow, SchedulerOutput
from nanocore.worker.worker import LocalExecutor

BLOCK_SIZE: Final = 16
_MAGIC: Final = b"_logits_"


class Engine:
    """A worker with our model, as an engine of one rank has it. parameters: of `EngineConfig`.

    Raises:
        StartError: see `Worker`.
    """

    def __init__(self, model: Path, chunk_tokens: int, **parameters: Any) -> None:
        config = EngineConfig(
            device="cpu", block_size=BLOCK_SIZE, max_num_seqs=1, max_logprobs=-1,
            max_num_batched_tokens=chunk_tokens, **parameters,
        )  # fmt: skip
        self._executor = LocalExecutor(config.worker_config(str(model), chunk_tokens + 1))
        self._executor.load_model()
        self.weight_bytes = self._executor.profile()[0].weight_bytes
        self._num_blocks = -(-(chunk_tokens + 1) // BLOCK_SIZE)
        self._executor.allocate_kv_cache(self._num_blocks + 1, chunk_tokens + 1)
        self._vocab_size = load_model_config(model).vocab_size
        self._steps = itertools.count(1)

    def logprobs(self, token_ids: list[int]) -> Tensor:
        """float32 [S, V] of one chunk."""
        num_tokens, vocab_size = len(token_ids), self._vocab_size
        sampling = EngineSamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=vocab_size
        )  # fmt: skip
        row = NewRow(
            row=0,
            token_ids=_column(token_ids),
            num_prompt_tokens=num_tokens,
            num_computed_tokens=0,
            block_ids=_column(range(self._num_blocks)),
            sampling=sampling,
            seed=0,
            num_prompt_logprobs=num_tokens // 2,
        )
        self._executor.submit(_plan(next(self._steps), added=[row], num_tokens=num_tokens))
        said = self._executor.collect().prompt_logprobs
        self._executor.submit(_plan(next(self._steps), removed_rows=_column([0])))
        self._executor.collect()
        assert said is not None
        ids = torch.from_numpy(np.frombuffer(said.token_ids, "<i4").astype(np.int64))
        values = torch.from_numpy(np.frombuffer(said.logprobs, "<f4").copy())
        logprobs_SV = torch.empty(num_tokens - 1 - num_tokens // 2, vocab_size)
        return logprobs_SV.scatter_(
            1, ids.view(len(logprobs_SV), -1), values.view(len(logprobs_SV), -1)
        )

    def close(self) -> None:
        self._executor.close()


def engine_logprobs(model: Path, chunks_NC: Tensor, **parameters: Any) -> tuple[Tensor, int]:
    """(float32 [N, S, V] of our engine with these parameters, bytes of its weights).

    Raises:
        StartError: see `Worker`.
    """
    engine = Engine(model, chunks_NC.shape[1], **parameters)
    try:
        logprobs = torch.stack([engine.logprobs(chunk) for chunk in chunks_NC.tolist()])
    finally:
        engine.close()
    return logprobs, engine.weight_bytes


def tokenized(model: Path, text: str, num_chunks: int, chunk_tokens: int) -> Tensor:
    """int64 [N, C] of a text by a GGUF file's tokenizer.

    Raises:
        ValueError: the text is shorter.
    """
    tokenizer = Tokenizer.from_buffer(gguf_model_files(model)["tokenizer.json"])
    token_ids = torch.tensor(tokenizer.encode(text).ids)
    wanted = num_chunks * chunk_tokens
    if len(token_ids) < wanted:
        raise ValueError(f"{len(token_ids)} tokens are too few for {num_chunks} chunks")
    return token_ids[:wanted].view(num_chunks, chunk_tokens)


def begun(model: Path, chunks_NC: Tensor) -> Tensor:
    """The same chunks, begun with BOS if a GGUF file's model wants it, as llama-perplexity does."""
    tokenizer = Tokenizer.from_buffer(gguf_model_files(model)["tokenizer.json"])
    first = torch.tensor(tokenizer.encode("").ids[:1], dtype=torch.int64)
    num_first = len(first)
    return torch.cat([first.expand(len(chunks_NC), -1), chunks_NC[:, num_first:]], dim=1)


def read_peer_logprobs(path: Path, chunks_NC: Tensor) -> Tensor:
    """float32 [N, S, V] from a file of `llama-perplexity --save-all-logits`.

    Raises:
        ValueError: it is of other tokens.
    """
    num_chunks, chunk_tokens = chunks_NC.shape
    data = path.read_bytes()
    found = np.frombuffer(data, "<i4", 3, len(_MAGIC)).tolist()
    if not data.startswith(_MAGIC) or (found[0], found[2]) != (chunk_tokens, num_chunks):
        raise ValueError(f"{path.name}: not {num_chunks} chunks of {chunk_tokens} tokens")
    start = len(_MAGIC) + 12
    tokens = np.frombuffer(data, "<i4", num_chunks * chunk_tokens, start)
    if tokens.tolist() != chunks_NC.flatten().tolist():
        raise ValueError(f"{path.name}: the tokens are others than ours")
    vocab_size = found[1]
    width = (vocab_size + 1) // 2 * 2 + 4
    count = num_chunks * (chunk_tokens - 1 - chunk_tokens // 2)
    rows = np.frombuffer(data, "<u2", count * width, start + tokens.nbytes).reshape(count, width)
    scale, least = rows[:, :4].copy().view("<f4").T[..., None]
    logprobs = rows[:, 4 : 4 + vocab_size].astype(np.float32) * scale + least
    return torch.from_numpy(logprobs).view(num_chunks, -1, vocab_size)


def divergence(of: Tensor, to: Tensor) -> float:
    """KL(of || to) of log probabilities [..., V]: the mean over tokens, in nats."""
    total = sum(
        float((p.double().exp() * (p.double() - q.double())).sum())
        for p, q in zip(of.flatten(0, -2).split(64), to.flatten(0, -2).split(64), strict=True)
    )
    return total / of.flatten(0, -2).shape[0]


def top1_agreement(of: Tensor, to: Tensor) -> float:
    """Share of tokens whose most likely prediction is the same."""
    return float((of.argmax(-1) == to.argmax(-1)).float().mean())


def _plan(step: int, **given: Any) -> SchedulerOutput:
    nothing = {"removed_rows": b"", "added": [], "block_rows": b"", "block_ids": b"",
               "chunk_rows": b"", "chunk_counts": b"", "num_tokens": 0}  # fmt: skip
    num_tokens = given.get("num_tokens", 0)
    if num_tokens:
        nothing |= {"chunk_rows": _column([0]), "chunk_counts": _column([num_tokens])}
    return SchedulerOutput(step=step, **nothing | given)


def _column(values: Any) -> bytes:
    return np.array(list(values), "<i4").tobytes()
