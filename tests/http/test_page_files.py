"""The page as it is served: to whom, its files, their types, and what it may load."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nanocore.http.app import App
from nanocore.http.endpoints.page import FOLDER, NAMES, POLICY
from nanocore.http.server_settings import AppSettings
from tests.client.running import run
from tests.http.asgi import Connection, scope
from tools.page_libraries import differences, read_table

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"
SOURCES = {name: (FOLDER / name).read_text("utf-8") for name in NAMES}
OURS = {name: text for name, text in SOURCES.items() if not name.startswith("libraries/")}
MAX_LINES = 300


def ask(path: str, method: str = "GET", app: App | None = None, **headers: str) -> Connection:
    connection = Connection()
    app = app or App(AppSettings())
    run(app(scope(method, path, **headers), connection.receive, connection.send))
    return connection


def test_every_file_of_the_folder_is_served_as_it_is() -> None:
    files = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file()}
    unserved = {"libraries/libraries.json"} | {name for name in files if name.endswith(".LICENSE")}
    assert files - unserved == set(NAMES)
    for name in NAMES:
        answer = ask(f"/page/{name}")
        assert (answer.status, answer.body) == (200, SOURCES[name].encode())
        assert answer.headers[b"x-content-type-options"] == b"nosniff"
        assert answer.headers[b"content-security-policy"] == POLICY


def test_files_have_the_type_of_their_names() -> None:
    types = {
        Path(name).suffix: ask(f"/page/{name}").headers[b"content-type"].decode() for name in NAMES
    }
    assert types == {
        ".html": "text/html; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".mjs": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
    }


@pytest.mark.parametrize(
    "path",
    [
        "/page/",
        "/page/app.py",
        "/page/../app.py",
        "/page/../page/app.js",
        "/page//app.js",
        "/page/./app.js",
        "/page//etc/passwd",
        "/page/app.js\0",
        "/page/APP.JS",
        "/page/libraries/",
        "/page/libraries/libraries.json",
    ],
)
def test_nothing_else_is_served_below_the_page(path: str) -> None:
    assert ask(path).status == 404


@pytest.mark.parametrize("path", ["/", "/page/app.js"])
def test_a_file_that_the_browser_has_is_not_sent_again(path: str) -> None:
    first = ask(path, accept=BROWSER)
    assert first.headers[b"cache-control"] == b"no-cache"
    tag = first.headers[b"etag"].decode()
    for known in (tag, f'"other", W/{tag}'):
        again = ask(path, accept=BROWSER, if_none_match=known)
        assert (again.status, again.body, again.headers[b"etag"].decode()) == (304, b"", tag)
    assert ask(path, accept=BROWSER, if_none_match='"other"').status == 200


@pytest.mark.parametrize(
    ("accept", "is_page"),
    [
        (BROWSER, True),
        ("text/html", True),
        ("TEXT/HTML;q=0.5", True),
        ("application/json, text/html;q=0.9", True),
        ("application/json", False),
        ("*/*", False),
        ("text/*", False),
        ("", False),
        (None, False),
    ],
)
def test_browsers_get_the_page_and_programs_the_name(accept: str | None, is_page: bool) -> None:
    for method in ("GET", "HEAD"):
        answer = ask("/", method, **({} if accept is None else {"accept": accept}))
        assert answer.status == 200
        assert answer.headers[b"vary"] == b"accept"
        if is_page:
            assert answer.body == SOURCES["index.html"].encode()
        else:
            assert answer.json["name"] == "nanocore"


def test_the_page_is_open_and_what_it_asks_for_is_not() -> None:
    app = App(AppSettings(api_keys=("k",), allowed_origins=("https://a.example",)))
    answer = ask("/", app=app, accept=BROWSER, origin="https://a.example")
    assert answer.status == 200
    assert answer.headers[b"vary"] == b"accept, origin"
    assert ask("/page/app.js", app=app).status == 200
    assert ask("/v1/models", app=app).status == 401


def test_the_policy_allows_the_pages_own_origin_alone() -> None:
    policy = dict(part.split(maxsplit=1) for part in POLICY.decode().split("; "))
    assert {name for name, sources in policy.items() if sources == "'self'"} == {
        "script-src", "style-src", "img-src", "connect-src",
    }  # fmt: skip
    assert {name for name, sources in policy.items() if sources == "'none'"} == {
        "default-src", "base-uri", "form-action", "frame-ancestors",
    }  # fmt: skip
    assert len(policy) == 8


def test_what_the_files_refer_to_is_among_them() -> None:
    index = SOURCES["index.html"]
    named = set(re.findall(r'(?:src|href)="([^"#]+)"', index))
    assert named <= {f"page/{name}" for name in NAMES}
    imported = {name for text in OURS.values() for name in re.findall(r'"\./([\w./-]+)"', text)}
    used = {name.removeprefix("page/") for name in named} | imported | {"index.html"}
    assert used == set(NAMES), "and none is left over"
    ids = set(re.findall(r'\bid="([^"]+)"', index))
    wanted = {i for text in OURS.values() for i in re.findall(r'byId\("([^"]+)"\)', text)}
    assert wanted - {"set-tools", "set-system"} <= ids
    assert len(ids) == len(re.findall(r'\bid="', index)), "an id is there once"


def test_no_markup_is_made_of_text_and_nothing_comes_from_elsewhere() -> None:
    index = SOURCES["index.html"]
    assert not re.search(r"<style|<script(?![^>]* src=)|\sstyle=|\son\w+=", index)
    for name, text in OURS.items():
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b"
            r"|new Function|createContextualFragment|srcdoc|@import|setHTML",
            text,
        ), name
        addresses = set(re.findall(r"""(?:https?:)?//[\w.-]+\.\w+[^\s"')]*""", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name
        assert len(text.splitlines()) <= MAX_LINES, name


def test_libraries_are_what_their_packages_had_with_their_licences() -> None:
    known = set()
    for entry in read_table():
        files = {name: (FOLDER / "libraries" / name).read_bytes() for name in entry["files"]}
        assert differences(entry, files) == []
        assert any(name.endswith(".LICENSE") for name in files)
        known |= files.keys()
    there = {path.name for path in (FOLDER / "libraries").iterdir()}
    assert there == known | {"libraries.json"}


def test_a_file_that_differs_is_refused() -> None:
    entry = read_table()[0]
    assert len(differences(entry, dict.fromkeys(entry["files"], b"other"))) == len(entry["files"])
