"""Drafts change no answer: the real program with drafts and without, the same requests.

Every feature's request is asked of both, all at once, on engines with so few blocks that requests
are preempted; and runs are cut at every position and resumed, as after a kill.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nanocore.client import AsyncEngineClient
from nanocore.client.tokenizer import Tokenizer
from nanocore.demo_model import demo_model_folder
from nanocore.protocol.metrics import Stats
from tests.campaign import in_campaign
from tests.end_to_end.forked import Engine, engine, run_to_exit
from tests.end_to_end.raw_requests import Answer, ask
from tests.end_to_end.test_resumed_outputs import CASES, QUESTION, check_rest, submit_of
from tests.model_families import BUILDERS
from tests.mtp_head import add_mtp_head

DEMO_MODEL = demo_model_folder()
FEW_BLOCKS = [
    "--dtype", "float32", "--max-num-seqs", "12", "--num-gpu-blocks-override", "40",
    "--block-size", "16", "--max-num-batched-tokens", "48",
]  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "suffix": {"method": "suffix", "suffix_decoding_min_token_prob": 0.0},
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1},
    "draft_model": {"model": str(DEMO_MODEL), "num_speculative_tokens": 3},
}
COPIED = " apple fig plum pear" * 3


@contextmanager
def drafting(config: dict[str, Any], *flags: str, model: Path = DEMO_MODEL) -> Iterator[Engine]:
    given = json.dumps({"adaptive": False, **config})  # no step's time decides what is tested
    with engine(model, "--speculative-config", given, *flags) as running:
        yield running


def stats_of(endpoint: str) -> Stats:
    async def read() -> Stats:
        async with AsyncEngineClient.connect(endpoint) as client:
            return await client.stats()

    return asyncio.run(read())


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    tokenizer = Tokenizer.from_folder(DEMO_MODEL)
    return tokenizer.encode_chat([{"role": "user", "content": QUESTION + COPIED}])


def answers(endpoint: str, prompt: list[int], rounds: int = 1) -> dict[str, Answer]:
    """Of all cases together, with three samples of each that may have some."""
    found: dict[str, Answer] = {}
    for number in range(rounds):
        submits = [
            submit_of(f"{name} {number}", prompt, [], {**given, "n": n, "max_tokens": 40})
            for name, given in CASES.items()
            if (n := 1 if given.get("prompt_logprobs") else 3)
        ]
        samples = iter(asyncio.run(ask(endpoint, submits)))
        for submit in submits:
            for i in range(submit.sampling.n):
                found[f"{submit.request_id}, sample {i}"] = next(samples)
    return found


@pytest.fixture(scope="module", params=["", *in_campaign("--tp 2", "--enforce-eager")])
def flags(request: pytest.FixtureRequest) -> str:
    given: str = request.param
    return given


@pytest.fixture(scope="module")
def plain(prompt: list[int], flags: str) -> dict[str, Answer]:
    with engine(DEMO_MODEL, *FEW_BLOCKS, *flags.split()) as running:
        return answers(running.endpoint, prompt, rounds=2)


@pytest.mark.parametrize("method", METHODS)
def test_every_answer_is_that_of_an_engine_without_drafts(
    plain: dict[str, Answer], prompt: list[int], method: str, flags: str
) -> None:
    with drafting(METHODS[method], *FEW_BLOCKS, *flags.split()) as running:
        drafted = answers(running.endpoint, prompt, rounds=2)
        stats = stats_of(running.endpoint)
    assert drafted.keys() == plain.keys()
    for name, own in drafted.items():
        assert own.refused is None
        assert (own.tokens, own.logprobs, own.why) == (
            plain[name].tokens, plain[name].logprobs, plain[name].why
        ), name  # fmt: skip
    assert 0 < stats.spec_decode_num_accepted_tokens <= stats.spec_decode_num_draft_tokens
    by_place = stats.spec_decode_num_accepted_tokens_per_pos
    assert sum(by_place) == stats.spec_decode_num_accepted_tokens
    assert by_place == sorted(by_place, reverse=True)


@pytest.mark.parametrize(
    ("family", "method", "num_bytes"),
    [
        ("qwen35", "suffix", 2_500_000),
        ("qwen35", "mtp", 2_500_000),
        *in_campaign(
            ("lfm2", "suffix", 300_000),
            ("qwen3_next", "suffix", 2_500_000),
            ("qwen3_next", "mtp", 2_500_000),
            ("qwen35_image_text", "mtp", 2_500_000),
        ),
    ],
)
def test_with_states_every_answer_is_that_of_an_engine_without_drafts(
    family: str, method: str, num_bytes: int, tmp_path: Path
) -> None:
    model, prompt = BUILDERS[family](tmp_path), [i * i % 250 for i in range(70)]
    if method == "mtp":
        add_mtp_head(model)
    flags = ["--dtype", "float32", "--max-num-seqs", "12", "--max-num-batched-tokens", "48"]
    with engine(model, *flags) as running:
        plain = answers(running.endpoint, prompt, rounds=2)
    # A few states and blocks: requests are preempted, and begin again from a state that was kept.
    few = "--kv-cache-memory-bytes", f"{num_bytes}", "--max-model-len", "200"
    given = {"method": "mtp"} if method == "mtp" else METHODS[method]
    with drafting(given, *flags, *few, model=model) as running:
        drafted, stats = answers(running.endpoint, prompt, rounds=2), stats_of(running.endpoint)
    served = {name for name, one in plain.items() if one.refused is None}
    assert len(served) > 40  # others are of another vocabulary
    for name in served:
        own, expected = drafted[name], plain[name]
        assert own.refused is None
        assert (own.tokens, own.logprobs, own.why) == (
            expected.tokens, expected.logprobs, expected.why
        ), name  # fmt: skip
    assert stats.num_preemptions > 0
    assert 0 < stats.spec_decode_num_accepted_tokens < stats.spec_decode_num_draft_tokens


@pytest.mark.parametrize("name", ["all at once", "greedy, no end", "letters, no end"])
def test_a_run_is_resumed_with_drafts_from_any_cut(prompt: list[int], name: str) -> None:
    given = CASES[name]
    with drafting(METHODS["suffix"], *FEW_BLOCKS) as running:
        (whole,) = asyncio.run(ask(running.endpoint, [submit_of("whole", prompt, [], given)]))
        cuts = [
            submit_of(f"cut {k}", prompt, whole.tokens[:k], given)
            for k in range(1, len(whole.tokens) + 1)
        ]
        for k, rest in enumerate(asyncio.run(ask(running.endpoint, cuts)), 1):
            check_rest(whole, k, rest, len(prompt))


def test_the_log_says_what_drafts_promise() -> None:
    with drafting(METHODS["ngram"]) as running:
        stats_of(running.endpoint)
        log = running.stderr.read_text()
    assert "drafts: ngram, up to 5 of a request in a step; outputs are the same, token for" in log


@pytest.mark.parametrize(
    ("config", "flags", "words"),
    [
        ('{"method": "eagle3"}', "", "served are ngram, suffix, draft_model"),
        ("7", "", "--speculative-config 7: must be a JSON object such as"),
        ('{"method": "suffix"}', "--pp 2", "drafts are not served with pipeline stages"),
    ],
)
def test_a_start_refuses_what_is_not_served(config: str, flags: str, words: str) -> None:
    ended = run_to_exit("--model", str(DEMO_MODEL), "--speculative-config", config, *flags.split())
    assert ended.returncode == 2
    assert words in ended.stderr
