"""Makes a site of documents that are written to be read in the repository as they are.

What is listed in docs/README.md is in the site, in that order. Documents outside docs/ are brought
in, links between documents become links between pages, and a link to any other file of the
repository, which has no published address, becomes its name. MkDocs calls the `on_` functions.
"""

from __future__ import annotations

import posixpath
import re
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
INDEX = "docs/README.md"
OWN = Path(__file__).parent
"""Of the style and the script that mkdocs.yml names."""
BROUGHT = "repository/"
"""Where documents from outside docs/ are in the site."""
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_PICTURE = re.compile(r"!\[[^\]]*\]\(([^():\s]+)\)")
_CODE = re.compile(r"^( *)(`{3,}).*?^\1\2 *$|(`+)(?!`).+?(?<!`)\3(?!`)", re.MULTILINE | re.DOTALL)
_MARKERS = re.compile(r"^ *<!-- [^\n]* -->\n", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation, out of the lists of docs/README.md and of the indexes it leads to."""
    documents.cache_clear()  # of a server that builds again and again
    nav: list[Any] = [page_of(INDEX)]
    text = (ROOT / INDEX).read_text("utf-8")
    for title, items in re.findall(r"^([^\n]+):\n\n((?:- .*\n|  .*\n)+)", text, re.MULTILINE):
        nav.append({title: [_entry(document) for document in linked(items, INDEX)]})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Bring in what docs/README.md names from outside docs/, the pictures in it, and our own."""
    for name in (*config.extra_css, *map(str, config.extra_javascript)):
        files.append(File.generated(config, name, abs_src_path=str(OWN / Path(name).name)))
    for document in documents():
        if not document.startswith("docs/"):
            content = (ROOT / document).read_text("utf-8")
            files.append(File.generated(config, page_of(document), content=content))
            for picture in (_target(link, document) for link in _PICTURE.findall(content)):
                path = str(ROOT / picture)
                files.append(File.generated(config, BROUGHT + picture, abs_src_path=path))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Markers of blocks are for tests, and links are those of the site."""
    text = with_wide_lists(_MARKERS.sub("", markdown))
    return rewritten(text, document_of(page.file.src_uri))


@cache
def documents() -> tuple[str, ...]:
    """All that is in the site, as paths from the root."""
    found = [INDEX]
    for document in found:
        if document == INDEX or document.endswith("/README.md"):
            found += [one for one in linked((ROOT / document).read_text("utf-8"), document)
                      if one not in found]  # fmt: skip
    return tuple(found)


def linked(text: str, document: str) -> list[str]:
    """The documents that the items of a text begin with links to, once each."""
    found = re.findall(r"^- \[[^\]]*\]\(([^)#]+\.md)\)", text, re.MULTILINE)
    return list(dict.fromkeys(_target(link, document) for link in found))


def page_of(document: str) -> str:
    """A document's place in the site."""
    if document.startswith("docs/"):
        return document.removeprefix("docs/")
    return BROUGHT + document


def document_of(page: str) -> str:
    """The document of a place in the site."""
    if page.startswith(BROUGHT):
        return page.removeprefix(BROUGHT)
    return f"docs/{page}"


def with_wide_lists(text: str) -> str:
    """The text with what belongs to items of lists indented by four, as Python-Markdown has it."""
    lines: list[str] = []
    is_in_list = has_blocks = is_after_blank = False
    for line in text.split("\n"):
        if re.match(r"(?:-|\d+\.) ", line):
            if (has_blocks or not is_in_list) and not is_after_blank and line[0] == "-":
                lines.append("")
            is_in_list, has_blocks = True, False
        elif line and not line.startswith(" ") and is_after_blank:
            is_in_list = has_blocks = False
        elif line and is_in_list and is_after_blank:
            has_blocks = True
        is_after_blank = not line
        lines.append(f"  {line}" if is_in_list and line.startswith("  ") else line)
    return "\n".join(lines)


def rewritten(text: str, document: str) -> str:
    """The text with links as the site has them; code is left alone."""
    parts, end = [], 0
    for code in _CODE.finditer(text):
        if _is_in_link(text, code):
            continue
        parts += [_with_links(text[end : code.start()], document), code[0]]
        end = code.end()
    return "".join([*parts, _with_links(text[end:], document)])


def _is_in_link(text: str, code: re.Match[str]) -> bool:
    """Whether a span of code is the text of a link, as in [`name`](file)."""
    return text[code.start() - 1] == "[" and text[code.end() : code.end() + 2] == "]("


def _with_links(text: str, document: str) -> str:
    pages = set(documents())

    def link(match: re.Match[str]) -> str:
        words, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        file, _, anchor = target.partition("#")
        leads_to = _target(file, document)
        if leads_to in pages:
            here = posixpath.dirname(page_of(document)) or "."
            place = posixpath.relpath(page_of(leads_to), here)
            return f"[{words}]({place}{'#' if anchor else ''}{anchor})"
        if not (ROOT / leads_to).exists():
            raise FileNotFoundError(f"{document}: there is no {target}")
        shown = words.strip("`")
        return f"`{leads_to}`" if shown in leads_to else f"{words} (`{leads_to}`)"

    return _LINK.sub(link, text)


def _target(link: str, document: str) -> str:
    """Of a document, from the root; a folder's is its README."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(document), link))
    index = posixpath.join(path, "README.md")
    return index if (ROOT / path).is_dir() and (ROOT / index).exists() else path


def _entry(document: str) -> Any:
    """Of the navigation: a page, or an index with the pages that it lists."""
    below = []
    if document.startswith("docs/") and document.endswith("/README.md"):
        text = (ROOT / document).read_text("utf-8")
        inside = posixpath.dirname(document) + "/"
        below = [one for one in linked(text, document) if one.startswith(inside)]
    if not below:
        return page_of(document)
    title = (ROOT / document).read_text("utf-8").partition("\n")[0].lstrip("# ")
    return {title: [page_of(document), *map(page_of, below)]}
