"""The examples of Ray, run by Ray itself, in an environment of its own.

It has this one's packages and Ray's. Ray listens at every address that it finds, so it runs in a
network namespace with loopback alone, and in one of processes, with which all of it ends.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from nanocore.client import LLM, SamplingParams

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(900)]

ROOT: Final = Path(__file__).parents[2]
HERE: Final = Path(__file__).parent
PACKAGES: Final = ("ray[serve,data]==2.60.0",)
UNREACHABLE: Final = (
    "NewConnectionError", "NameResolutionError", "ConnectTimeoutError", "ProxyError",
)  # fmt: skip
TIMEOUT_S: Final = 400.0
NAMESPACES: Final = (
    "unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child",
    "sh", "-c", 'ip link set lo up && "$@"', "sh",
)  # fmt: skip
NUM_ROWS: Final = 300
MAX_TOKENS: Final = 24
RAY_DATA: Final = """
import json, runpy, sys, ray
ray.init(include_dashboard=False, object_store_memory=80 * 2**20, num_cpus=4)
_, program, source, *flags = sys.argv
ray.data.read_json(source).write_parquet("questions")
for rows, target in ((source, "answers"), ("questions", "answers-parquet")):
    sys.argv[:] = [program, rows, target, *flags]
    runpy.run_path(program, run_name="__main__")
print(json.dumps(ray.data.read_parquet("answers-parquet").take_all()))
ray.shutdown()
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with Ray."""
    if shutil.which("ip") is None:
        pytest.skip("ip (iproute2) is not installed")
    probe = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"namespaces cannot be made: {probe.stderr.strip()}")
    folder = tmp_path_factory.mktemp("ray") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "outer.pth").write_text(sysconfig.get_path("purelib"))
    pip = [str(python), "-m", "pip", "install", "--quiet", *PACKAGES]
    installed = subprocess.run(pip, capture_output=True, text=True, check=False)
    if installed.returncode and any(name in installed.stderr for name in UNREACHABLE):
        pytest.skip("the package index cannot be reached")
    assert installed.returncode == 0, installed.stderr
    return python


@pytest.fixture
def folder() -> Iterator[Path]:
    """For all that Ray writes: with a short name, for its sockets."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        yield Path(folder)


def run(python: Path, folder: Path, *arguments: str | Path) -> str:
    """Run a program where only loopback is; what it prints."""
    environment = os.environ | {
        "HOME": str(folder),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "demo_model")]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "TMPDIR": str(folder),
    }
    done = subprocess.run(
        [*NAMESPACES, python, *arguments],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment,
        cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-9999:] + done.stderr[-9999:]
    return done.stdout


def test_replicas_answer_stream_abort_come_back_and_drain(python: Path, folder: Path) -> None:
    printed = run(python, folder, HERE / "serve_on_ray.py")
    seen: dict[str, Any] = json.loads(printed.splitlines()[-1])
    right = [[200, f"{10 + i} + 1 = {11 + i}"] for i in range(12)]
    assert seen["answers"] == right
    assert seen["both_served"]
    dropped = seen["dropped"]
    assert all(line.startswith("data: {") for line in dropped["first_lines"])
    assert dropped["open"] > 0
    assert dropped["aborts"] == dropped["open"], "whoever left is computed for no longer"
    assert dropped["idle_while_paused"]
    assert seen["killed_engine"] == {"answers": right, "came_back": True}
    assert seen["killed_replica"] == {"came_back": True}
    assert seen["drained"] == {"ends": ["data: [DONE]"] * 6, "one_is_left": True}
    assert seen["left"] == []


def questions() -> list[str]:
    rng = random.Random(3)
    return [f"What is {rng.randrange(1000)} + {rng.randrange(1000)}?" for _ in range(NUM_ROWS)]


def test_two_actors_answer_a_data_set_as_one_engine_does(python: Path, folder: Path) -> None:
    prompts = questions()
    prompts[7] = "word " * 3000  # more than the model takes
    rows = [{"id": f"row-{i}", "prompt": prompt} for i, prompt in enumerate(prompts)]
    source = folder / "questions.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--concurrency", "2", "--batch-size", "20", "--max-tokens", str(MAX_TOKENS))
    more = ("--engine", "max_num_seqs=16")
    example = ROOT / "examples" / "ray_data.py"
    from_parquet = run(python, folder, "-c", RAY_DATA, example, source, *flags, *more)
    paths = sorted((folder / "answers").iterdir())
    lines = [line for path in paths for line in path.read_text().splitlines()]
    answered = [json.loads(line) for line in lines]
    assert [row["id"] for row in answered] == [row["id"] for row in rows]
    answers = {row["id"]: row for row in json.loads(from_parquet.splitlines()[-1])}
    assert answers == {row["id"]: row for row in answered}

    refused = answered.pop(7)
    assert refused["answer"] == ""
    assert "2048" in refused["error"]
    chats = [[{"role": "user", "content": row["prompt"]}] for row in answered]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    with LLM(max_num_seqs=16) as llm:
        expected = [output.outputs[0].text for output in llm.chat(chats, params, use_tqdm=False)]
    assert [row["answer"] for row in answered] == expected
    assert {row["error"] for row in answered} == {""}
