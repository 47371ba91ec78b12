"""Every Markdown file can be read as text, and the files and names in it exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_CHARS = 120
MAX_CELL_CHARS = 180
"""Of a table's cell: what is longer is a paragraph, and belongs into the text."""
MAX_READING_LINES = 2640
MAX_README_LINES = 150
NOT_OURS = {"node_modules", "target", "build", "site", "__pycache__"}
SOURCES = {".py", ".h", ".hpp", ".cpp", ".ts", ".mjs", ".rs"}
FILE = re.compile(r"(?:[\w.-]+/)*[\w.-]+\.(?:py|md|h|hpp|cpp|ts|mjs|rs)|(?:[\w-]+/)+")
OURS = "benchmarks|examples|nanocore|tests|tools"
NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


def walk(folder: Path) -> list[Path]:
    """All files that are part of the project."""
    found: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in NOT_OURS or path.name.endswith(".egg-info"):
            continue
        found += walk(path) if path.is_dir() else [path]
    return found


FILES = walk(ROOT)
MARKDOWN = [path for path in FILES if path.suffix == ".md"]
NAMING_OURS = (
    "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/concepts.md", "docs/kernels.md", "docs/reading.md",
)  # fmt: skip
HISTORY = ROOT / "CHANGELOG.md"
"""It may name what is gone."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(text: str) -> list[tuple[int, str]]:
    """(number, line) of what is neither fenced nor indented code."""
    lines, in_fence, in_code, was_blank = [], False, False, True
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_fence = not in_fence
            continue
        in_code = line.startswith("    ") and (in_code or was_blank)
        was_blank = not line.strip()
        if not in_fence and not in_code:
            lines.append((number, line))
    return lines


def words_in_code(text: str) -> list[str]:
    """What stands between backticks in prose, spans that go on in the next line included."""
    joined = "\n".join(line for _, line in prose(text))
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", joined)]


@cache
def places() -> frozenset[str]:
    """Every file and folder, by all ends of its path: core.py, engine_core/core.py, and so on."""
    paths = {name_of(path) for path in FILES}
    paths |= {f"{parent}/" for path in list(paths) for parent in map(str, Path(path).parents)}
    ends = [path.split("/", i)[-1] for path in paths for i in range(path.count("/") + 1)]
    return frozenset(end for end in ends if end)


@cache
def source_words() -> frozenset[str]:
    """Every identifier in the code."""
    texts = (path.read_text("utf-8") for path in FILES if path.suffix in SOURCES)
    return frozenset(word for text in texts for word in re.findall(r"\w+", text))


def anchors(path: Path) -> set[str]:
    """The headings' names in links, as GitHub makes them."""
    titles = [line.lstrip("#") for _, line in prose(path.read_text("utf-8")) if line[:1] == "#"]
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", MARKDOWN, ids=name_of)
def test_no_line_of_prose_is_too_long_to_read(document: Path) -> None:
    """But for tables, code, and what cannot be broken, such as a long link."""
    long = [
        f"{document.name}:{number}: {len(line)} characters"
        for number, line in prose(document.read_text("utf-8"))
        if len(line) > MAX_CHARS
        and not line.startswith("|")
        and " " in re.sub(r"^\s*(?:[-*]|\d+\.)?\s*|!?\[[^]]*\]\([^)]*\)", "", line).strip()
    ]
    assert long == []


@pytest.mark.parametrize("document", MARKDOWN, ids=name_of)
def test_no_cell_of_a_table_is_a_paragraph(document: Path) -> None:
    long = [
        f"{document.name}:{number}: {cell.strip()[:60]}..."
        for number, line in prose(document.read_text("utf-8"))
        if line.startswith("|")
        for cell in line.split("|")
        if len(cell.strip()) > MAX_CELL_CHARS
    ]
    assert long == []


@pytest.mark.parametrize("document", MARKDOWN, ids=name_of)
def test_every_link_within_the_repository_leads_somewhere(document: Path) -> None:
    joined = "\n".join(line for _, line in prose(document.read_text("utf-8")))
    wrong = []
    for link in re.findall(r"\[[^]]*\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", joined)):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (document.parent / file).resolve() if file else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


@pytest.mark.parametrize("document", [d for d in MARKDOWN if d != HISTORY], ids=name_of)
def test_every_file_that_is_named_exists(document: Path) -> None:
    """In prose by any end of its path; in commands, from the root or the document's folder."""
    text = document.read_text("utf-8")
    folder = document.parent.relative_to(ROOT).as_posix()
    named = {
        word.removeprefix("./").removeprefix("../../").removeprefix("../")
        for span in words_in_code(text)
        for word in re.split(r"[\s:,]+", span)
        if FILE.fullmatch(word)
    }
    named |= set(re.findall(rf"\b(?:{OURS})/[\w/]+\.(?:py|json)\b", text))
    modules = re.findall(rf"python3? -m ((?:{OURS})[\w.]*)", text)
    for module in modules:
        path = module.rstrip(".").replace(".", "/")
        named.add(f"{path}.py" if f"{path}.py" in places() else f"{path}/")
    missing = {name for name in named if not {name, f"{folder}/{name}"} & places()}
    assert {name for name in missing if name.rpartition("/")[2] != "llama.cpp"} == set()


@pytest.mark.parametrize("name", NAMING_OURS)
def test_every_class_and_function_that_is_named_exists(name: str) -> None:
    """What looks like a name of ours, `InputBatch` or `find_prefix`, is one in the code."""
    parts = {
        part
        for span in words_in_code((ROOT / name).read_text("utf-8"))
        if NAME.fullmatch(span.removesuffix("()"))
        for part in span.removesuffix("()").split(".")
        if "_" in part.strip("_") or re.match(r"[A-Z]\w*[a-z]", part)
    }
    assert parts
    assert parts - source_words() == set()


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= MAX_README_LINES


def test_the_reading_path_is_ten_files_that_can_be_read_in_an_evening() -> None:
    text = (ROOT / "docs" / "reading.md").read_text("utf-8")
    steps = re.findall(r"^(\d+)\. \[([\w/.]+)\]\(\.\./nanocore/([\w/.]+)\):", text, re.MULTILINE)
    assert [int(number) for number, _, _ in steps] == list(range(1, 11))
    assert all(shown == path for _, shown, path in steps)
    sources = {path: (ROOT / "nanocore" / path).read_text("utf-8") for _, _, path in steps}
    assert len(sources) == 10
    assert sum(len(source.splitlines()) for source in sources.values()) <= MAX_READING_LINES


def test_the_reading_path_names_what_is_in_its_files() -> None:
    """A method that moves to another file would send the reader to the wrong one."""
    text = (ROOT / "docs" / "reading.md").read_text("utf-8")
    for item in re.split(r"^\d+\. ", text, flags=re.MULTILINE)[1:]:
        path = re.search(r"\(\.\./(nanocore/[\w/.]+)\)", item)
        assert path is not None
        words = set(re.findall(r"\w+", (ROOT / path[1]).read_text("utf-8")))
        item = item.partition("\n\n")[0]
        names = {p for span in words_in_code(item) if NAME.fullmatch(span) for p in span.split(".")}
        assert names - words == set(), path[1]


@pytest.mark.parametrize("document", MARKDOWN, ids=name_of)
def test_every_python_program_of_a_document_compiles(document: Path) -> None:
    """Those that users read are also run: tests/docs."""
    blocks = re.findall(r"```python\n(.*?)```", document.read_text("utf-8"), flags=re.DOTALL)
    for block in blocks:
        compile(block, str(document), "exec")
