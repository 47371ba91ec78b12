"""--speculative-config: vLLM's keys and defaults, and what is refused with which words."""

from __future__ import annotations

from typing import Any

import pytest

from nanocore.engine_core.config import EngineConfig
from nanocore.protocol.errors import ConfigError
from nanocore.worker.config.speculative_config import MAX_STEP_DRAFTS, SpeculativeConfig


def of(given: dict[str, Any]) -> SpeculativeConfig:
    config = SpeculativeConfig.of(given)
    assert config is not None
    return config


def test_nothing_is_drafted_unless_it_is_asked_for() -> None:
    config = EngineConfig()
    assert config.speculative is None
    assert config.scheduler_config(64).num_speculative_tokens == 0
    worker = config.worker_config("", 64)
    assert (worker.max_drafts, worker.max_samples) == (0, worker.max_num_seqs)


def test_scheduler_and_workers_get_the_same_number_of_drafts() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 3}
    config = EngineConfig(speculative_config=given, max_num_seqs=10)
    limits, worker = config.scheduler_config(64), config.worker_config("", 64)
    assert limits.num_speculative_tokens == worker.max_drafts == 3
    assert limits.max_samples == worker.max_samples == 40


def test_drafts_of_all_rows_are_limited_in_a_step() -> None:
    limits = EngineConfig(speculative_config={"method": "suffix"}).scheduler_config(64)
    assert limits.max_samples == limits.max_num_seqs + MAX_STEP_DRAFTS


@pytest.mark.parametrize(
    ("given", "method"),
    [
        ({"method": "suffix"}, "suffix"),
        ({"method": "ngram"}, "ngram"),
        ({"model": "[ngram]"}, "ngram"),
        ({"model": "suffix"}, "suffix"),
        ({"model": "org/small"}, "draft_model"),
        ({"method": "draft_model", "model": "org/small"}, "draft_model"),
        ({"method": "suffix", "model": None}, "suffix"),
    ],
)
def test_the_method_is_given_or_follows_from_the_model(given: dict[str, Any], method: str) -> None:
    assert of(given).method == method


def test_one_length_of_n_grams_is_also_the_other() -> None:
    lengths = {
        (
            of({"method": "ngram", **given}).prompt_lookup_min,
            of({"method": "ngram", **given}).prompt_lookup_max,
        )
        for given in ({"prompt_lookup_min": 2}, {"prompt_lookup_max": 2})
    }
    assert lengths == {(2, 2)}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"method": "eagle3"}, r"'eagle3': served are ngram, suffix, draft_model"),
        ({"num_speculative_tokens": 3}, r"served are ngram, suffix, draft_model"),
        ({"method": 7}, r"7: served are ngram"),
        ({"method": "ngram", "model": "org/small"}, r"'model' is for the method draft_model, not"),
        ({"method": "ngram", "suffix_decoding_max_tree_depth": 3}, r"for the method suffix, not"),
        ({"method": "suffix", "prompt_lookup_min": 3}, r"is for the method ngram, not for suffix"),
        ({"method": "draft_model"}, r'needs a "model"'),
        ({"method": "ngram", "num_speculative_token": 3}, r"mean 'num_speculative_tokens'\?"),
        ({"method": "ngram", "zzz": 3}, r"'zzz' is no key here; keys: method, "),
        ({"method": "ngram", "num_speculative_tokens": 0}, r"tokens' 0: .*>= 1"),
        ({"method": "ngram", "num_speculative_tokens": 65}, r"tokens' 65: .*<= 64"),
        ({"method": "ngram", "num_speculative_tokens": "3"}, r"'num_speculative_tokens' '3': "),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}, r"4 is above .* 2"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, r"prob' 1.5: .*<= 1"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_with_what_is(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--speculative-config: .*{words}"):
        EngineConfig(speculative_config=given)


def test_pipeline_stages_draft_nothing() -> None:
    with pytest.raises(ConfigError, match=r"--pipeline-parallel-size 2: .*--tensor-parallel-size"):
        EngineConfig(speculative_config={"method": "suffix"}, pipeline_parallel_size=2)
