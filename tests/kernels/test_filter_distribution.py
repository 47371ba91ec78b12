"""How often each token is drawn, for every set of filters, against their definition in float64.

Draws of all settings are rows of one call, of many seeds and positions, and always the same. A
token that a filter excludes is never drawn; how often the others are is a chi-square test. What a
wrong filter would give is refused by the same test, or it would say nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanocore.kernels.cpu.build import INSTRUCTION_SETS
from nanocore.kernels.gumbel_noise import gumbel_noise
from nanocore.kernels.sampling import Filters, Noise
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.kernels.torch.sampling import filtered
from nanocore.protocol.fields import MAX_INT32
from nanocore.worker.communication.communicator import SingleRank
from nanocore.worker.sampling.sampler import TokenSampler
from tests.kernels.cpu_case import reference_or_backend
from tests.sampling_reference import make_metadata, make_rows

VOCAB_SIZE = 60
NUM_DRAWS = 4000  # of each setting
MIN_EXPECTED = 8.0  # draws of a cell; rarer tokens share one
LEAST_P_VALUE = 1e-5  # a false alarm in a thousand runs, if draws were not always the same
LEAST_DISTANCE = 0.045  # what must be found: half the sum of differences
BACKENDS = ("torch", *INSTRUCTION_SETS)


@dataclass(frozen=True, slots=True)
class Setting:
    """One row's sampling; 0 is off for top_k. logits: their standard deviation."""

    logits: float
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def settings() -> Iterator[Setting]:
    filters = {"min_p": 0.08, "top_k": 12, "top_p": 0.7}
    for logits, temperature in ((2.0, 1.0), (2.0, 0.6), (1.0, 1.0), (1.0, 1.5)):
        for size in range(len(filters) + 1):
            for chosen in combinations(filters.items(), size):
                yield replace(Setting(logits, temperature), **dict(chosen))


SETTINGS = tuple(settings())


@cache
def logits_of(deviation: float) -> Tensor:
    drawn = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(11))
    return drawn * deviation


def weights_of(setting: Setting, temperature: float) -> list[float]:
    logits = logits_of(setting.logits).double().div(temperature)
    return logits.sub(logits.max()).exp().tolist()


def kept_by(weights: list[float], setting: Setting) -> list[int]:
    """Token ids that stay, the most likely first, as `interface.Filters` defines it."""
    order = sorted(range(VOCAB_SIZE), key=lambda token: -weights[token])
    kept = [token for token in order if weights[token] >= setting.min_p * weights[order[0]]]
    kept = kept[: setting.top_k or None]
    return most_likely(kept, weights, setting.top_p * sum(weights[token] for token in kept))


def most_likely(tokens: list[int], weights: list[float], limit: float) -> list[int]:
    """The first ones: each that has less than the limit before it, and the first."""
    kept, before = tokens[:1], weights[tokens[0]]
    for token in tokens[1:]:
        if before >= limit:
            break
        kept.append(token)
        before += weights[token]
    return kept


def normalized(weights: list[float], kept: list[int]) -> list[float]:
    total = sum(weights[token] for token in kept)
    return [weights[t] / total if t in set(kept) else 0.0 for t in range(VOCAB_SIZE)]


def probabilities(setting: Setting) -> list[float]:
    weights = weights_of(setting, setting.temperature)
    return normalized(weights, kept_by(weights, setting))


def is_refused(counts: list[int], expected: list[float]) -> bool:
    """Whether tokens drawn so often are not of this distribution."""
    total = sum(counts)
    if any(count and not p for count, p in zip(counts, expected, strict=True)):
        return True
    cells = [[float(count), p * total] for count, p in zip(counts, expected, strict=True) if p]
    cells.sort(key=lambda cell: cell[1])
    while len(cells) > 1 and cells[0][1] < MIN_EXPECTED:
        (count, draws), rest = cells[0], cells[1:]
        cells = [[rest[0][0] + count, rest[0][1] + draws], *rest[1:]]
    if len(cells) == 1:
        return False
    statistic = sum((count - draws) ** 2 / draws for count, draws in cells)
    half_degrees = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    p_value = torch.special.gammaincc(half_degrees, torch.tensor(statistic / 2).double())
    return p_value.item() < LEAST_P_VALUE


def all_rows() -> tuple[list[Setting], Tensor, Tensor, Tensor]:
    """(each row's setting, logits, seeds, positions): rows of all settings alternate."""
    rows = list(SETTINGS) * NUM_DRAWS
    logits_RV = torch.stack([logits_of(setting.logits) for setting in SETTINGS])
    number_R = torch.arange(len(rows))
    return rows, logits_RV.repeat(NUM_DRAWS, 1), number_R // 640, 100 + number_R % 640


@cache
def counts_of(name: str) -> dict[Setting, list[int]]:
    rows, logits_RV, seed_R, position_R = all_rows()
    noise = Noise(torch.tensor([row.temperature for row in rows]), seed_R, position_R)
    filters = Filters(
        torch.tensor([row.top_k or MAX_INT32 for row in rows], dtype=torch.int32),
        torch.tensor([row.top_p for row in rows]),
        torch.tensor([row.min_p for row in rows]),
    )
    return counted(reference_or_backend(name).best_filtered_token(logits_RV, noise, filters)[1])


def counted(token_ids_R: Tensor) -> dict[Setting, list[int]]:
    by_setting = token_ids_R.view(NUM_DRAWS, len(SETTINGS)).T
    return {
        setting: torch.bincount(drawn, minlength=VOCAB_SIZE).tolist()
        for setting, drawn in zip(SETTINGS, by_setting, strict=True)
    }


@pytest.mark.parametrize("name", BACKENDS)
def test_tokens_are_drawn_as_often_as_the_filters_say(name: str) -> None:
    counts = counts_of(name)
    refused = [s for s in SETTINGS if is_refused(counts[s], probabilities(s))]
    assert refused == []


def test_rows_that_share_a_step_are_drawn_as_often_as_the_filters_say() -> None:
    rows, logits_RV, seed_R, position_R = all_rows()
    sampled = make_rows(
        [(row.temperature, row.top_k, row.top_p, row.min_p) for row in rows],
        VOCAB_SIZE,
        seed_R.tolist(),
    )
    sampler = TokenSampler(0, VOCAB_SIZE, SingleRank(), TorchKernels())
    counts = counted(sampler.sample(logits_RV, make_metadata(sampled, position_R)))
    assert counts == counts_of("torch")


def one_more(setting: Setting) -> list[int]:
    weights = weights_of(setting, setting.temperature)
    return kept_by(weights, replace(setting, top_k=setting.top_k and setting.top_k + 1))


def unscaled(setting: Setting) -> list[int]:
    return kept_by(weights_of(setting, 1.0), setting)


def top_p_first(setting: Setting) -> list[int]:
    weights = weights_of(setting, setting.temperature)
    kept = set(kept_by(weights, replace(setting, top_k=0, min_p=0.0)))
    return [t for t in kept_by(weights, replace(setting, top_p=1.0)) if t in kept]


def top_p_of_the_last(setting: Setting) -> list[int]:
    kept = kept_by(weights_of(setting, setting.temperature), setting)
    return kept[: max(1, len(kept) - (setting.top_p < 1.0))]


def without(name: str) -> Callable[[Setting], list[int]]:
    off = getattr(Setting(0.0), name)

    def kept(setting: Setting) -> list[int]:
        weights = weights_of(setting, setting.temperature)
        return kept_by(weights, replace(setting, **{name: off}))

    return kept


WRONG: dict[str, Callable[[Setting], list[int]]] = {
    "no min_p": without("min_p"),
    "no top_k": without("top_k"),
    "no top_p": without("top_p"),
    "one token more than top_k": one_more,
    "one token less than top_p": top_p_of_the_last,
    "top_p of all tokens": top_p_first,
    "filters before the temperature": unscaled,
}


def is_found(wrong: list[float], setting: Setting) -> bool:
    """Whether draws refuse what differs by enough; False of what does not."""
    pairs = zip(wrong, probabilities(setting), strict=True)
    if sum(abs(a - b) for a, b in pairs) / 2 < LEAST_DISTANCE:
        return False
    assert is_refused(counts_of("torch")[setting], wrong), setting
    return True


@pytest.mark.parametrize("wrong", WRONG)
def test_a_filter_that_does_something_else_would_be_found(wrong: str) -> None:
    found = 0
    for setting in SETTINGS:
        weights = weights_of(setting, setting.temperature)
        found += is_found(normalized(weights, WRONG[wrong](setting)), setting)
    assert found >= 4


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_another_temperature_would_be_found(factor: float) -> None:
    found = 0
    for setting in SETTINGS:
        kept = kept_by(weights_of(setting, setting.temperature), setting)
        weights = weights_of(setting, setting.temperature * factor)
        found += is_found(normalized(weights, kept), setting)
    assert found >= 4


def transformers_warpers(setting: Setting) -> LogitsProcessorList:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(setting.temperature)])
    if setting.min_p:
        warpers.append(MinPLogitsWarper(setting.min_p))
    if setting.top_k:
        warpers.append(TopKLogitsWarper(setting.top_k))
    if setting.top_p < 1.0:
        warpers.append(TopPLogitsWarper(setting.top_p))
    return warpers


@pytest.mark.parametrize("name", BACKENDS)
def test_transformers_keep_the_same_tokens(name: str) -> None:
    kernels, num_rows = reference_or_backend(name), 50
    generator = torch.Generator().manual_seed(3)
    for number, setting in enumerate(SETTINGS):
        logits_RV = torch.randn(num_rows, 300, generator=generator) * setting.logits
        noise = Noise(
            torch.full((num_rows,), setting.temperature),
            torch.arange(num_rows),
            torch.full((num_rows,), number),
        )
        filters = Filters(
            torch.full((num_rows,), setting.top_k or MAX_INT32, dtype=torch.int32),
            torch.full((num_rows,), setting.top_p),
            torch.full((num_rows,), setting.min_p),
        )
        scores_RV = transformers_warpers(setting)(None, logits_RV.double())
        kept_RV = filtered(logits_RV, noise, filters) > -math.inf
        assert torch.equal(kept_RV, scores_RV > -math.inf), setting
        noise_RV = gumbel_noise(noise.seed_R, noise.position_R, torch.arange(300))
        chosen_R = kernels.best_filtered_token(logits_RV, noise, filters)[1]
        assert torch.equal(chosen_R, (scores_RV + noise_RV).argmax(dim=1)), setting
