"""What was built, installed into fresh environments: it is small, serves, computes natively."""

from __future__ import annotations

import email
import re
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from nanocore.demo_model import demo_model_folder
from nanocore.kernels.cpu.build import INSTRUCTION_SETS, library_name
from tests.cli.served import answered, serving
from tests.end_to_end.forked import engine
from tests.packages.conftest import Packages
from tests.packages.environments import VERSIONS, Environment, make_environment

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1800)]
MAX_CLIENT_BYTES = 100_000_000  # with all it needs; nanocore is a tenth of it
QUESTION = [{"role": "user", "content": "What is 123 + 456?"}]
ANSWER = "123 + 456 = 579"
ASKS_CLIENT = f"""
import asyncio, sys
from nanocore.client import AsyncEngineClient, SamplingParams

async def main():
    async with AsyncEngineClient.connect(sys.argv[1]) as client:
        params = SamplingParams(temperature=0)
        async for event in client.chat({QUESTION!r}, params):
            print(getattr(event, "delta", ""), end="")

asyncio.run(main())
heavy = {{"torch", "numpy", "safetensors", "huggingface_hub"}} & sys.modules.keys()
assert not heavy, heavy
"""
ASKS_LLM = f"""
from nanocore.client import LLM, SamplingParams

with LLM() as llm:
    (output,) = llm.chat([{QUESTION!r}], SamplingParams(temperature=0), use_tqdm=False)
    print(output.outputs[0].text)
"""
FINDS_LIBRARY = """
import nanocore
from nanocore.kernels.cpu.library import find_library

library = find_library()
print(nanocore.__file__, None if library is None else library.instruction_set)
"""
NEEDS = r"needs? ([\w., ]+): in the repository, pip install '\.\[([\w,]+)\]'"
IS_NOT_INSTALLED = r"(\w+) is not installed.* `pip install '\.\[(\w+)\]'`"
COMMANDS = {
    "serve": ("nanocore", "serve", "--endpoint", "ipc:///nowhere/engine.sock"),
    "metrics": ("nanocore", "metrics"),
    "top": ("nanocore", "top", "--once"),
    "bench": ("nanocore", "bench", "serve"),
    "batch": ("nanocore", "batch", "in.jsonl", "out.jsonl"),
    "engine": ("nanocore-engine",),
    "check": ("nanocore-engine", "--check"),
    "launch": ("nanocore", "serve"),
}


@pytest.fixture(scope="module", params=VERSIONS)
def thin(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, packages: Packages
) -> Environment:
    """nanocore alone, for a client."""
    environment = make_environment(tmp_path_factory.mktemp("thin") / "venv", request.param)
    environment.install(packages.wheel)
    return environment


def size_bytes(environment: Environment) -> int:
    return sum(path.lstat().st_size for path in environment.site_packages.rglob("*"))


def requirements(environment: Environment, extra: str) -> set[str]:
    """The distributions that an extra of the installed nanocore brings."""
    (path,) = environment.site_packages.glob("nanocore_engine-*.dist-info/METADATA")
    told = email.message_from_string(path.read_text("utf-8"))
    wanted = [Requirement(text) for text in told.get_all("Requires-Dist", [])]
    return {
        requirement.name.replace("-", "_")
        for requirement in wanted
        if requirement.marker and requirement.marker.evaluate({"extra": extra})
    }


def test_a_client_is_small_and_answers_without_torch(thin: Environment) -> None:
    assert size_bytes(thin) < MAX_CLIENT_BYTES
    assert not {"torch", "numpy"} & {path.name for path in thin.site_packages.iterdir()}
    with engine(demo_model_folder()) as running:
        assert thin.run("python", "-c", ASKS_CLIENT, running.endpoint).stdout == ANSWER


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_command_says_is_missing_is_what_the_named_extra_brings(
    thin: Environment, command: str
) -> None:
    said = thin.run(*COMMANDS[command], check=False)
    assert said.returncode == 2, said.stderr
    found = re.search(NEEDS, said.stderr) or re.search(IS_NOT_INSTALLED, said.stderr)
    assert found, said.stderr
    brought = set().union(*(requirements(thin, extra) for extra in found[2].split(",")))
    assert {name.strip() for name in found[1].split(",")} <= brought


def test_the_server_alone_serves_by_joining_an_engine(
    thin: Environment, packages: Packages, tmp_path: Path
) -> None:
    thin.install(f"{packages.wheel}[server]")
    with (
        engine(demo_model_folder()) as running,
        serving(
            "--endpoint", running.endpoint, "--uds", str(tmp_path / "http.sock"),
            python=str(thin.python), cwd=tmp_path,
        ) as server,
    ):  # fmt: skip
        server.line("ready: ")
        status, answer = answered(
            server.ask(32, messages=QUESTION, temperature=0, ignore_eos=False)
        )
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"] == ANSWER
    assert not (thin.site_packages / "torch").exists()


def test_an_engine_of_the_wheels_computes_natively_and_answers(
    packages: Packages, tmp_path: Path
) -> None:
    """Beside this environment's torch: installing another one takes minutes."""
    fresh = make_environment(tmp_path / "venv")
    fresh.see_packages_of_this_one()
    fresh.install("--no-deps", packages.wheel)
    where, found = fresh.run("python", "-c", FINDS_LIBRARY).stdout.split()
    assert Path(where).is_relative_to(fresh.folder)
    assert found in INSTRUCTION_SETS
    without = fresh.run("nanocore-engine", "--check", check=False)
    assert (without.returncode, "pip install ./demo_model" in without.stderr) == (2, True)
    fresh.install("--no-deps", packages.demo_wheel)
    answered = fresh.run("python", "-c", ASKS_LLM)
    assert answered.stdout.strip() == ANSWER
    assert f"dtype bfloat16, kernels cpu ({found}" in answered.stderr


def test_sources_install_without_a_compiler_and_pack_no_library_of_an_earlier_build(
    packages: Packages, tmp_path: Path
) -> None:
    with tarfile.open(packages.source) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    kind = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    for root in (source, source / "build" / "lib", source / "build" / f"lib.{kind}"):
        folder = root / "nanocore" / "kernels" / "cpu"
        folder.mkdir(parents=True, exist_ok=True)
        for name in (library_name("plain"), "_plain.cpython-311-x86_64-linux-gnu.so"):
            (folder / name).write_bytes(b"stale")
    fresh = make_environment(tmp_path / "venv")
    fresh.see_packages_of_this_one()
    fresh.install("--no-deps", source)
    assert list((fresh.site_packages / "nanocore").rglob("*.so")) == []
    _, found = fresh.run("python", "-c", FINDS_LIBRARY).stdout.split()
    assert found == "None"
