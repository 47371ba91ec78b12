"""lm-evaluation-harness, the real package, scores a model on nanocore as it does on transformers.

Tasks of our own, from files: each kind of request that the harness knows. It runs by its own
command line, in an environment of its own, which has this one's packages and the harness's. It
talks to the engine by an adapter of ours, and by its own client for servers of OpenAI's API.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from nanocore.client import AsyncEngineClient
from nanocore.demo_model import demo_model_folder
from nanocore.http.app import App
from nanocore.http.server_settings import AppSettings
from tests.evaluation.harness import OFFLINE, run

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
ADAPTER = ROOT / "examples" / "lm_eval_nanocore.py"
TASKS = Path(__file__).parent / "tasks"
DEMO_MODEL = demo_model_folder()
MAX_LENGTH = 2047
"""Tokens of a window and the one that is made behind it, for all alike; the model's own is 2048, of
which the harness's client leaves one out."""
NUM_SUMS = 60
CONVERSATION_TURNS = (1, 3, 10, 150)
"""The last one is longer than the model's context."""
REMOTE_TOKENIZER = """
import json, sys
from lm_eval.utils import RemoteTokenizer, check_remote_tokenizer_support
url = sys.argv[1]
remote = RemoteTokenizer(url)
chat = remote.apply_chat_template([{"role": "user", "content": "What is 1 + 2?"}])
print(json.dumps({
    "is_supported": check_remote_tokenizer_support(url),
    "eos": [remote.eos_token, remote.eos_token_id],
    "bos": [remote.bos_token, remote.bos_token_id],
    "chat": chat,
    "decoded": remote.batch_decode([remote.encode(chat)]),
}))
"""


@dataclass(frozen=True)
class Evaluation:
    """What the harness wrote. results: by task and metric. responses: by task, of each document."""

    results: dict[str, dict[str, Any]]
    responses: dict[str, list[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tasks' documents are."""
    folder = tmp_path_factory.mktemp("documents")
    rng = random.Random(7)
    sums = [_sum(rng, num_digits=2 + i % 3) for i in range(NUM_SUMS)]
    texts = [{"text": "".join(_turn(rng) for _ in range(num))} for num in CONVERSATION_TURNS]
    for name, documents in (("sums", sums), ("conversations", texts)):
        lines = [json.dumps(document) for document in documents]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def _sum(rng: random.Random, num_digits: int) -> dict[str, Any]:
    """Of two numbers: the right answer, and three that differ in a digit or two."""
    a, b = (rng.randrange(10 ** (num_digits - 1), 10**num_digits) for _ in range(2))
    wrong = rng.sample([-100, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 100], 3)
    choices = [f"{a} + {b} = {a + b + error}" for error in (0, *wrong)]
    answer = choices[0]
    rng.shuffle(choices)
    return {"question": f"What is {a} + {b}?", "choices": choices, "answer": answer}


def _turn(rng: random.Random) -> str:
    a, b = rng.randrange(10, 1000), rng.randrange(10, 1000)
    return (
        f"<|im_start|>user\nWhat is {a} + {b}?<|im_end|>\n"
        f"<|im_start|>assistant\n{a} + {b} = {a + b}<|im_end|>\n"
    )


def evaluate(python: Path, folder: Path, name: str, *command: str) -> Evaluation:
    """Run the harness on our tasks, offline."""
    environment = os.environ | OFFLINE
    environment |= {"PYTHONPATH": str(ROOT), "HF_HOME": str(folder / "hf")}
    tasks = ("sums_choice", "sums_generate", "sums_greedy", "sums_perplexity")
    run(
        *(str(python), *command, "--tasks", ",".join(tasks), "--include_path", str(TASKS)),
        *("--apply_chat_template", "--log_samples", "--output_path", name),
        cwd=folder,
        env=environment,
    )
    (results,) = (folder / name).glob("*/results_*.json")
    responses = {}
    for task in tasks:
        (path,) = (folder / name).glob(f"*/samples_{task}_*.jsonl")
        samples = sorted(
            map(json.loads, path.read_text().splitlines()), key=lambda sample: sample["doc_id"]
        )
        responses[task] = [response for s in samples for (response,) in s["resps"]]
    return Evaluation(json.loads(results.read_text())["results"], responses)


@pytest.fixture(scope="module")
def reference(python: Path, folder: Path) -> Evaluation:
    """The harness's own model. Its windows have no token that is an output.

    Its cache of logits takes a text that is parted elsewhere into context and continuation for the
    same request, and answers with the other's tokens.
    """
    length = MAX_LENGTH - 1
    model = f"pretrained={DEMO_MODEL},dtype=float32,max_length={length},logits_cache=False"
    hf = ("-m", "lm_eval", "--model", "hf", "--device", "cpu", "--model_args", model)
    return evaluate(python, folder, "hf", *hf)


def on_nanocore(python: Path, folder: Path, dtype: str) -> Evaluation:
    """By the adapter, as a user would run it."""
    args = f"pretrained={DEMO_MODEL},dtype={dtype},max_model_len={MAX_LENGTH}"
    return evaluate(
        python, folder, dtype, str(ADAPTER), "--model", "nanocore", "--model_args", args
    )


@pytest.fixture(scope="module")
def in_float32(python: Path, folder: Path) -> Evaluation:
    """Ours, as exact as the reference."""
    return on_nanocore(python, folder, "float32")


@pytest.fixture(scope="module")
def over_http(python: Path, folder: Path) -> tuple[Evaluation, dict[str, Any]]:
    """Ours, as a server; and what the harness's tokenizer of such servers finds out there."""

    def ask(port: int) -> tuple[Evaluation, dict[str, Any]]:
        url = f"http://127.0.0.1:{port}/v1/completions"
        args = f"model=demo,base_url={url},tokenizer_backend=huggingface,tokenizer={DEMO_MODEL}"
        command = ("-m", "lm_eval", "--model", "local-completions", "--batch_size", "16")
        args += f",max_length={MAX_LENGTH + 1}"
        found = evaluate(python, folder, "http", *command, "--model_args", args)
        return found, json.loads(run(str(python), "-c", REMOTE_TOKENIZER, url).stdout)

    async def serve() -> tuple[Evaluation, dict[str, Any]]:
        app = App(AppSettings(served_model_names=("demo",)))
        config = uvicorn.Config(app, lifespan="off", ws="none", access_log=False)
        server = uvicorn.Server(config)
        async with AsyncEngineClient.launch(dtype="float32") as client:
            app.state.client = client
            with socket.create_server(("127.0.0.1", 0)) as listening:
                serving = asyncio.create_task(server.serve([listening]))
                try:
                    return await asyncio.to_thread(ask, listening.getsockname()[1])
                finally:
                    server.should_exit = True
                    await serving

    return asyncio.run(serve())


def _accuracies(evaluation: Evaluation) -> dict[str, float]:
    metrics = {
        "sums_choice": ["acc", "acc_norm"], "sums_generate": ["exact_match"], "sums_greedy": ["acc"]
    }  # fmt: skip
    results = evaluation.results
    return {f"{t} {m}": results[t][f"{m},none"] for t, names in metrics.items() for m in names}


def _perplexities(evaluation: Evaluation) -> list[float]:
    rolling, greedy = (evaluation.results[f"sums_{name}"] for name in ("perplexity", "greedy"))
    names = ("word_perplexity", "byte_perplexity")
    return [*(rolling[f"{name},none"] for name in names), greedy["perplexity,none"]]


def test_scores_are_equal_in_float32(reference: Evaluation, in_float32: Evaluation) -> None:
    expected = _accuracies(reference)
    assert all(0.3 < score < 0.97 for score in expected.values()), "neither too easy nor too hard"
    assert _accuracies(in_float32) == expected
    assert _perplexities(in_float32) == pytest.approx(_perplexities(reference), rel=1e-4)


def test_so_is_each_answer(reference: Evaluation, in_float32: Evaluation) -> None:
    ours, theirs = in_float32.responses, reference.responses
    assert ours["sums_generate"] == theirs["sums_generate"]
    for task, num_texts in (("sums_choice", 4 * NUM_SUMS), ("sums_greedy", NUM_SUMS)):
        pairs = list(zip(ours[task], theirs[task], strict=True))
        assert len(pairs) == num_texts
        for (logprob, is_greedy), (expected, expected_greedy) in pairs:
            assert float(logprob) == pytest.approx(float(expected), abs=1e-3)
            assert is_greedy == expected_greedy
    documents = [[float(text) for text in one["sums_perplexity"]] for one in (ours, theirs)]
    assert len(documents[0]) == len(CONVERSATION_TURNS)
    assert documents[0] == pytest.approx(documents[1], rel=1e-4)


def test_the_models_own_type_changes_little(
    python: Path, folder: Path, reference: Evaluation
) -> None:
    ours = on_nanocore(python, folder, "auto")
    assert _accuracies(ours) == pytest.approx(_accuracies(reference), abs=2.5 / NUM_SUMS)
    rolling = slice(2)  # the other is that of a few tokens, most of them of wrong answers
    assert _perplexities(ours)[rolling] == pytest.approx(
        _perplexities(reference)[rolling], rel=0.02
    )


def test_over_http_all_is_the_same_to_the_last_digit(
    in_float32: Evaluation, over_http: tuple[Evaluation, dict[str, Any]]
) -> None:
    evaluation, _ = over_http
    assert evaluation.responses == in_float32.responses
    assert _accuracies(evaluation) == _accuracies(in_float32)
    assert _perplexities(evaluation) == _perplexities(in_float32)


def test_a_servers_tokenizer_is_found_and_used(
    over_http: tuple[Evaluation, dict[str, Any]],
) -> None:
    _, remote = over_http
    chat = "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert remote == {
        "is_supported": True,
        "eos": ["<|im_end|>", 2],
        "bos": [None, None],
        "chat": chat,
        "decoded": [chat],
    }
