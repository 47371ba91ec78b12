"""docs/recipes/lm-eval.md, its commands run as they stand, on stand-ins for the data sets."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nanocore.client import LLM, SamplingParams
from nanocore.demo_model import demo_model_folder
from tests.cli.served import serving
from tests.evaluation.harness import OFFLINE, PACKAGES, run
from tests.evaluation.stand_in_data import write_benchmarks

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "recipes" / "lm-eval.md"
DEMO_MODEL = demo_model_folder()
SUBJECTS = """
import re
from pathlib import Path
import lm_eval.tasks
for path in (Path(lm_eval.tasks.__file__).parent / "mmlu" / "default").glob("mmlu_*.yaml"):
    print(re.search(r'"dataset_name": "(\\w+)"', path.read_text())[1])
"""
NUM_SUBJECTS = 57


@dataclass(frozen=True)
class Run:
    """What a command wrote. results: by task and metric; samples: of each task, its documents."""

    results: dict[str, dict[str, Any]]
    samples: dict[str, list[dict[str, Any]]]


def commands() -> tuple[str, str, list[str]]:
    """(installing, serving, the others)."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    return blocks[0], blocks[1], blocks[2:]


def read(folder: Path) -> Run:
    (results,) = folder.glob("**/results_*.json")
    samples: dict[str, list[dict[str, Any]]] = {}
    for path in folder.glob("**/samples_*.jsonl"):
        name = re.match(r"samples_(\w+)_\d{4}-", path.name)
        assert name is not None
        lines = map(json.loads, path.read_text().splitlines())
        by_document = {line["doc_id"]: line for line in lines}  # a line for each filter
        samples[name[1]] = [by_document[key] for key in sorted(by_document)]
    return Run(json.loads(results.read_text())["results"], samples)


@pytest.fixture(scope="module")
def runs(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """What the page's commands wrote, by the folder that they name."""
    folder = tmp_path_factory.mktemp("recipe")
    write_benchmarks(folder, run(str(python), "-c", SUBJECTS).stdout.split())
    environment = os.environ | OFFLINE | {"HF_HOME": str(folder / "hf"), "PYTHONPATH": str(ROOT)}
    environment["PATH"] = f"{python.parent}:{environment['PATH']}"
    _, serve, others = commands()
    words = serve.replace("path/to/folder", str(DEMO_MODEL)).split()
    assert words[:2] == ["nanocore", "serve"]
    with serving(*words[2:]) as served:
        served.line("ready: ")
        for command in others:
            command = command.replace("127.0.0.1:8000", f"{served.host}:{served.port}")
            command = command.replace("path/to/folder", str(DEMO_MODEL))
            command = command.replace("path/to/repository", str(ROOT))
            run("bash", "-euo", "pipefail", "-c", command, cwd=folder, env=environment)
    names = [re.search(r"--output_path (\S+)", command) for command in others]
    return {name[1]: read(folder / name[1]) for name in names if name is not None}


def test_the_commands_of_the_recipe_run_as_they_stand(runs: dict[str, Run]) -> None:
    install, _, others = commands()
    assert install == f"pip install '{PACKAGES[0]}'\n"
    assert len(runs) == len(others) == 5
    mmlu = runs["results-mmlu"]
    assert len(mmlu.samples) == NUM_SUBJECTS
    assert all(len(documents) == 4 for documents in mmlu.samples.values())
    humaneval = runs["results-humaneval"].results["humaneval"]
    assert humaneval["pass@1,create_test"] == 0.5, "one of its two programs is right"


def test_scores_are_those_of_the_log_probabilities_that_came_back(runs: dict[str, Run]) -> None:
    """The right one of MMLU's letters is another in each of the four questions."""
    mmlu = runs["results-mmlu"]
    for subject, documents in mmlu.samples.items():
        picked = [
            max(range(4), key=lambda i: float(document["filtered_resps"][i][0]))
            for document in documents
        ]
        targets = [int(document["target"]) for document in documents]
        assert sorted(targets) == [0, 1, 2, 3]
        right = sum(a == b for a, b in zip(picked, targets, strict=True))
        assert mmlu.results[subject]["acc,none"] == right / 4
    same = [json.dumps([d["resps"] for d in documents]) for documents in mmlu.samples.values()]
    assert max(Counter(same).values()) < NUM_SUBJECTS, "each subject has a description of its own"


def test_with_a_server_and_without_mmlus_letters_are_equally_likely(runs: dict[str, Run]) -> None:
    served, offline = (runs[f"results-{name}"] for name in ("mmlu", "offline"))
    assert offline.samples.keys() == served.samples.keys()
    for subject, documents in served.samples.items():
        for document, other in zip(documents, offline.samples[subject], strict=True):
            ours, theirs = (
                [float(letter[0]) for letter in one["filtered_resps"]] for one in (document, other)
            )
            assert ours == pytest.approx(theirs, abs=1e-3)


def test_chats_are_answered_as_by_the_sdk(runs: dict[str, Run]) -> None:
    documents = runs["results-gsm8k"].samples["gsm8k"]
    assert len(documents) == 6
    asked = [json.loads(document["arguments"]["gen_args_0"]["arg_0"][0]) for document in documents]
    assert all(len(messages) == 11 for messages in asked), "five examples, as earlier turns"
    with LLM() as llm:
        params = SamplingParams(temperature=0, max_tokens=256, stop=["Question:"])
        answers = llm.chat(asked, params, use_tqdm=False)
    said = [document["resps"][0][0] for document in documents]
    assert said == [answer.outputs[0].text for answer in answers]
