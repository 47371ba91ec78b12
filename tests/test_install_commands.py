"""Install commands that are told work from a clone: what is not published is named by its path.

On package indexes our names are not ours: who installs one by name gets a stranger's package.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.test_markdown import FILES, ROOT, name_of, words_in_code

COMMAND = re.compile(
    r"\b(?:pip|pipx|uv pip|uv tool|uv|npm|npx|pnpm|yarn|cargo) (?:install|i|add|ci)\b([^`#;&)]*)"
)
OURS = re.compile(r"nanocore(?:[-_][\w-]+)?(?:\[[\w,]*\])?(?:(?:[=<>~!@]=?|\^).*)?")
TEXTS = {".md", ".py", ".ts", ".mjs", ".rs", ".toml", ".json", ".yml", ".h", ".hpp", ".cpp"}
PAGES = [
    path
    for path in FILES
    if (path.suffix in TEXTS and "tests/" not in name_of(path) and path.stat().st_size < 300_000)
    or path.name == "Makefile"
]
EXTRAS = set(
    tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
)


def arguments(text: str) -> list[list[str]]:
    """Of the install commands in this text: what would be installed."""
    found = COMMAND.findall(text)
    return [[word.strip("'\"").rstrip("'\".,:") for word in command.split()] for command in found]


def told(path: Path) -> list[list[str]]:
    """Those of a file, each on a line, or in a span of code that goes on in the next line."""
    text = path.read_text("utf-8")
    spans = words_in_code(text) if path.suffix == ".md" else []
    return [words for part in (*text.splitlines(), *spans) for words in arguments(part)]


def wrong(words: list[str]) -> list[str]:
    """Arguments that are ours by name, extras there are not, and paths that lead nowhere."""
    bad = [word for word in words if OURS.fullmatch(word)]
    for word in words:
        extras = re.fullmatch(r"\.\[([\w,]+)\]", word)
        if extras and not set(extras[1].split(",")) <= EXTRAS:
            bad.append(word)
        if re.match(r"\.{1,2}/\w", word) and not (ROOT / word).exists():
            bad.append(word)
    return bad


@pytest.mark.parametrize("path", [path for path in PAGES if told(path)], ids=name_of)
def test_install_commands_name_what_is_there(path: Path) -> None:
    assert [word for words in told(path) for word in wrong(words)] == []


def test_what_is_not_published_would_be_noticed() -> None:
    for text, bad in {
        "pip install nanocore": ["nanocore"],
        "pip install 'nanocore[engine,server]'": ["nanocore[engine,server]"],
        "uv pip install -U nanocore-engine-demo==0.1.0": ["nanocore-engine-demo==0.1.0"],
        "npm install nanocore-client, and": ["nanocore-client"],
        "npm i nanocore-client@^0.1": ["nanocore-client@^0.1"],
        "cargo add nanocore-client": ["nanocore-client"],
        "pip install '.[engines]'": [".[engines]"],
        "pip install ./demo": ["./demo"],
        "pip install -e '.[engine,server]' ./demo_model -c constraints-cpu.txt": [],
        "npm install ./clients/node": [],
    }.items():
        ((words),) = arguments(text)
        assert wrong(words) == bad, text


def test_pages_that_tell_how_to_install_are_looked_at() -> None:
    looked_at = {name_of(path) for path in PAGES if told(path)}
    assert {
        "docs/install.md",
        "docs/http.md",
        "clients/node/README.md",
        "nanocore/cli/serve/command.py",
        "nanocore/demo_model.py",
    } <= looked_at


def test_the_workflow_runs_the_whole_check_and_may_only_read() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["cancel-in-progress"] is True
    (job,) = workflow["jobs"].values()
    assert 0 < job["timeout-minutes"] <= 60
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    used = [step["uses"] for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", name) for name in used)
    (python,) = (step["with"]["python-version"] for step in job["steps"] if "python" in str(step))
    assert python == "3.11"


def test_the_name_on_the_index_page_is_not_told_as_a_command() -> None:
    assert not arguments((ROOT / "docs" / "index-page.md").read_text("utf-8"))
