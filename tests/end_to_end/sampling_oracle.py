"""What a request must give, from its parameters alone: transformers' logits and plain numpy.

The engine's own tokens are fed to the model at once (teacher forcing), so one pass judges a whole
answer: token i must be the one that the parameters ask for after the tokens before it. Where two
tokens are so near that rounding decides between them, either will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.client.tokenizer import Tokenizer
from nanocore.kernels.gumbel_noise import gumbel_noise
from nanocore.protocol.sampling import EngineSamplingParams
from tests.sampling_reference import filter_logits

NEAR = 2e-3
"""Logits of float32 differ by less, from one implementation to the other."""

LETTERS = "[a-z ]+"
"""The structured output that it knows: what may follow is plain to see."""


class Oracle:
    """Of one model, run by transformers in float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._tokenizer = Tokenizer.from_folder(folder)
        self.eos_token_ids = {0, 2}
        self.special_token_ids = {0, 1, 2}

    @torch.inference_mode()
    def judge(
        self, prompt: Sequence[int], output: Sequence[int], sampling: EngineSamplingParams
    ) -> Judgement:
        """Of an output of this prompt; the request's seed is that of the sample."""
        logits = self._model(torch.tensor([[*prompt, *output]])).logits[0].float()
        return Judgement(self, list(prompt), list(output), sampling, logits)

    @cached_property
    def letters(self) -> list[int]:
        """Tokens of nothing but what LETTERS has."""
        texts = {t: self._tokenizer.token_text(t).bytes for t in range(self._model.vocab_size)}
        some = set(b"abcdefghijklmnopqrstuvwxyz ")
        special = self.special_token_ids
        return [t for t, text in texts.items() if text and {*text} <= some and t not in special]


@dataclass
class Judgement:
    """logits: [len(prompt) + len(output), V], raw."""

    oracle: Oracle
    prompt: list[int]
    output: list[int]
    sampling: EngineSamplingParams
    logits: Tensor

    @cached_property
    def stop_token_ids(self) -> set[int]:
        eos = set() if self.sampling.ignore_eos else self.oracle.eos_token_ids
        return eos | {*self.sampling.stop_token_ids}

    def check_tokens(self) -> None:
        """Each output token is the one that is asked for."""
        for i, token_id in enumerate(self.output):
            scores = self._scores(i)
            best = int(scores.argmax())
            if token_id == best:
                continue
            assert scores[best] - scores[token_id] < NEAR, (
                f"output token {i} is {token_id} ({scores[token_id]}), not {best} "
                f"({scores[best]}), of {self.sampling}"
            )

    def finish_reason(self) -> str | None:
        """How the request ends with these tokens, if it does: text apart."""
        stops = [i for i, t in enumerate(self.output) if t in self.stop_token_ids]
        assert all(i == len(self.output) - 1 for i in stops), f"it goes on after {self.output}"
        if stops:
            assert len(self.output) > self.sampling.min_tokens
            return "stop"
        return "length" if len(self.output) == self.sampling.max_tokens else None

    def logprobs(self, position: int) -> NDArray[np.float64]:
        """Of all tokens after the first `position` ones."""
        raw = self.logits[position - 1].double()
        return (raw - raw.logsumexp(0)).numpy()

    def _scores(self, index: int) -> Tensor:
        """Of all tokens for output token `index`: the greatest is taken."""
        position = len(self.prompt) + index
        logits = self._edited(position - 1, self.output[:index])
        if self.sampling.greedy:
            return logits
        scaled = (logits / self.sampling.temperature).float()[None]
        top_k = self.sampling.top_k if self.sampling.top_k > 0 else len(logits)
        kept = filter_logits(
            scaled,
            torch.tensor([top_k]),
            torch.tensor([self.sampling.top_p]),
            torch.tensor([self.sampling.min_p]),
        )
        assert self.sampling.seed is not None
        noise = gumbel_noise(
            torch.tensor([self.sampling.seed]),
            torch.tensor([position]),
            torch.arange(len(logits)),
        )
        return (kept + noise)[0]

    def _edited(self, row: int, output: list[int]) -> Tensor:
        params, logits = self.sampling, self.logits[row].clone()
        if params.structured_outputs is not None:
            assert params.structured_outputs.regex == LETTERS
            ends = sorted(self.oracle.eos_token_ids)
            allowed = torch.zeros(len(logits), dtype=torch.bool)
            allowed[[*self.oracle.letters, *ends] if output else self.oracle.letters] = True
            if self.oracle.eos_token_ids.intersection(output):  # with ignore_eos it goes on so
                allowed[:] = False
                allowed[ends] = True
            logits[~allowed] = -torch.inf
        if params.allowed_token_ids is not None:
            allowed = torch.zeros(len(logits), dtype=torch.bool)
            allowed[params.allowed_token_ids] = True
            logits[~allowed] = -torch.inf
        for token_id, bias in params.logit_bias:
            logits[token_id] += bias
        if len(output) < params.min_tokens:
            logits[sorted(self.stop_token_ids)] = -torch.inf
        for *before, last in params.bad_words_token_ids:
            if not before or output[-len(before) :] == before:
                logits[last] = -torch.inf
        counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=len(logits))
        seen = sorted({*self.prompt, *output})
        penalty = params.repetition_penalty
        positive = logits[seen] > 0
        logits[seen] = torch.where(positive, logits[seen] / penalty, logits[seen] * penalty)
        logits -= params.frequency_penalty * counts
        return logits - params.presence_penalty * (counts > 0)
