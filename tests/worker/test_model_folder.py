"""From --model to a folder: paths, ids in the hub's cache, and downloads from a hub of our own.

The hub's library reads its environment when it is imported, so each case is a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from nanocore.protocol.errors import ConfigError, ModelFileError
from nanocore.worker.loading.hub import choose_gguf, quantization_of
from nanocore.worker.loading.model_folder import display_name, model_name, resolve_model
from tests.campaign import in_campaign

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NOWHERE = "http://127.0.0.1:9"  # the discard port: nobody listens
SCRIPT = """
import sys, time
time.sleep = lambda seconds: None  # the hub's library waits before it tries again
from nanocore.protocol.errors import ModelFileError
from nanocore.worker.loading.model_folder import resolve_model
try:
    print(resolve_model(*sys.argv[1:]))
except ModelFileError as error:
    print("ModelFileError", error)
"""


def resolve_apart(home: Path, *arguments: str, hub: str = NOWHERE, **variables: str) -> str:
    result = run_apart(home, ["-c", SCRIPT, *arguments], HF_ENDPOINT=hub, **variables)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def run_apart(
    home: Path, arguments: list[str], **variables: str
) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    for name in [name for name in kept if name.startswith(("HF_", "HUGGING", "XDG_"))]:
        del kept[name]
    return subprocess.run(
        [sys.executable, *arguments],
        env=kept | {"HF_HOME": str(home), "HF_ENDPOINT": NOWHERE} | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def cached_snapshot(home: Path, files: dict[str, str]) -> Path:
    repository = home / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (snapshot, repository / "refs", repository / "blobs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for name, text in files.items():
        (repository / "blobs" / name).write_text(text)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    return snapshot


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name") == Path("org/name")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/org") == tmp_path / "org"


def test_a_folder_has_no_revisions(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--revision v1: .* is a folder"):
        resolve_model(str(tmp_path), "v1")


@pytest.mark.parametrize("name", ["/no/such", "./no", "../no/such", "~/no-such", "no/such.gguf"])
def test_a_path_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ModelFileError, match=r"there is no such file or folder$"):
        resolve_model(name)


@pytest.mark.parametrize(
    ("name", "why"),
    [("x" * 5000, "File name too long"), ("/" + "x/" * 5000, "File name too long"),
     ("~nobody_of_this_name/model", "home directory"), ("bad\udcff.gguf", "surrogates")],
    ids=["name", "path", "home", "no UTF-8"],
)  # fmt: skip
def test_a_path_that_cannot_be_looked_at_is_refused(name: str, why: str) -> None:
    with pytest.raises(ModelFileError, match=why) as error:
        resolve_model(name)
    assert len(str(error.value)) < 1000


def test_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ModelFileError, match=r"give a folder, or a file named \*\.gguf"):
        resolve_model(str(path))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "gpt2",
        "a/b/c",
        "org/",
        "org/na me",
        "org/na..me",
        "org/a--b",
        "org/name\n",
        "-o/n",
        "org/name:",
        "org/name:a:b",
        "org/name:../x",
    ],
)
def test_what_is_neither_path_nor_id_is_refused(name: str) -> None:
    with pytest.raises(ModelFileError, match=r"no Hugging Face id \(org/name\)"):
        resolve_model(name)


def test_without_the_hubs_library_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelFileError, match=r"pip install '\.\[engine\]'"):
        resolve_model("org/name")


def test_a_folder_in_the_hubs_cache_is_called_by_its_id(tmp_path: Path) -> None:
    snapshot = cached_snapshot(tmp_path, {})
    assert display_name(snapshot) == display_name(snapshot / "BF16" / "a.gguf") == "org/name"
    assert display_name(tmp_path) == tmp_path.name


def test_clients_call_a_model_by_its_id_or_its_path(tmp_path: Path) -> None:
    snapshot = cached_snapshot(tmp_path, {})
    assert model_name("org/name:Q8_0", snapshot / "a.gguf") == "org/name:Q8_0"
    assert model_name(str(snapshot), snapshot) == model_name(None, snapshot) == str(snapshot)


@pytest.mark.parametrize("variables", [{"HF_HUB_OFFLINE": "1"}, {}], ids=["offline", "unreachable"])
def test_a_cached_snapshot_needs_no_hub(tmp_path: Path, variables: dict[str, str]) -> None:
    snapshot = cached_snapshot(tmp_path, {"config.json": "{}"})
    assert resolve_apart(tmp_path, "org/name", **variables) == str(snapshot)


def test_what_is_not_cached_cannot_be_had_offline(tmp_path: Path) -> None:
    message = resolve_apart(tmp_path, "org/name", HF_HUB_OFFLINE="1")
    assert message.startswith("ModelFileError --model org/name is not, or not completely, in")
    assert "HF_HUB_OFFLINE forbids downloading: unset it" in message


def test_an_unreachable_hub_is_named(tmp_path: Path) -> None:
    message = resolve_apart(tmp_path, "org/name")
    assert message.startswith("ModelFileError ")
    assert f"{NOWHERE} cannot be reached" in message


@dataclass
class FakeHub:
    """The part of the hub's HTTP interface that a download needs, for one repository.

    files: contents by path. cut_after: bytes of a file's first answer before the connection ends.
    broken: a file whose content cannot be had. refusal: HTTP status and error code that the hub
    answers instead. requests: all GETs of files, with their Range. tokens: what was sent to
    authorize requests.
    """

    files: dict[str, bytes]
    cut_after: dict[str, int] = field(default_factory=dict)
    broken: str | None = None
    refusal: tuple[int, str] | None = None
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    endpoint: str = ""


def handler_for(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if hub.refusal:
                status, code = hub.refusal
                self.answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})
            elif path.startswith("/api/models/org/name/revision/"):
                self.answer_json({"id": "org/name", "sha": COMMIT, "siblings": []})
            elif path.startswith("/api/models/org/name/tree/"):
                self.answer_json(
                    [
                        {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                        for name, content in hub.files.items()
                    ]
                )
            elif (name := path.removeprefix(f"/org/name/resolve/{COMMIT}/")) in hub.files:
                self.answer_file(name)
            else:
                self.answer(404, b"", {})

        def answer_file(self, name: str) -> None:
            content = hub.files[name]
            asked = self.headers.get("Range")
            headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
            if self.command == "HEAD":
                return self.answer(200, content, headers)
            if name == hub.broken:
                return self.answer(403, b"", {})
            hub.requests.append((name, asked))
            hub.tokens.add(self.headers.get("Authorization"))
            if asked is None:
                return self.answer(200, content, headers, hub.cut_after.pop(name, None))
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            return self.answer(206, content[start:], headers)

        def answer_json(self, value: object) -> None:
            self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def answer(
            self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[:cut])
            if cut is not None:
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    files = {
        "config.json": b'{"a": 1}',
        "model.safetensors": bytes(range(256)) * 40,
        "tokenizer.json": b"{}",
        "vocab.json": b'{"a": 0}',
        "README.md": b"text",
        "pytorch_model.bin": b"code",
        "modeling.py": b"code",
        "onnx/model.safetensors": b"other",
        "onnx/config.json": b"other",
        "additional_chat_templates/tool_use.jinja": b"tools",
        "consolidated.safetensors": b"again",
    }
    fake = FakeHub(files)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler_for(fake)) as server:
        fake.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield fake
        server.shutdown()
        thread.join()


TOOL_USE = "additional_chat_templates/tool_use.jinja"
WANTED = {"config.json", "model.safetensors", "tokenizer.json", "vocab.json", TOOL_USE}


def test_a_download_fetches_what_is_needed_and_nothing_that_runs(
    tmp_path: Path, hub: FakeHub
) -> None:
    folder = Path(resolve_apart(tmp_path, "org/name", hub=hub.endpoint))
    assert folder == tmp_path / "hub" / "models--org--name" / "snapshots" / COMMIT
    files = {path for path in folder.rglob("*") if path.is_file()}
    assert {str(path.relative_to(folder)): path.read_bytes() for path in files} == {
        name: hub.files[name] for name in WANTED
    }
    assert sorted(hub.requests) == sorted((name, None) for name in WANTED)
    assert resolve_apart(tmp_path, "org/name", HF_HUB_OFFLINE="1") == str(folder)
    assert resolve_apart(tmp_path, "org/name", hub=hub.endpoint) == str(folder)
    assert len(hub.requests) == len(WANTED)  # nothing is fetched twice


def test_an_interrupted_download_is_resumed(tmp_path: Path, hub: FakeHub) -> None:
    hub.files["model.safetensors"] = bytes(range(256)) * 50_000  # more than the library's buffer
    hub.cut_after["model.safetensors"] = 12_000_000
    folder = Path(resolve_apart(tmp_path, "org/name", hub=hub.endpoint))
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    asked = [where for name, where in hub.requests if name == "model.safetensors"]
    assert len(asked) == 2
    assert asked[0] is None
    assert re.fullmatch(r"bytes=[1-9]\d*-", asked[1] or "")


def test_a_file_that_was_complete_is_kept_when_a_download_fails(
    tmp_path: Path, hub: FakeHub
) -> None:
    hub.broken = "tokenizer.json"
    message = resolve_apart(tmp_path, "org/name", hub=hub.endpoint)
    assert message.startswith("ModelFileError --model org/name could not be downloaded: ")
    hub.broken = None
    folder = Path(resolve_apart(tmp_path, "org/name", hub=hub.endpoint))
    files = {path for path in folder.rglob("*") if path.is_file()}
    assert {str(path.relative_to(folder)) for path in files} == WANTED
    assert sorted(name for name, _ in hub.requests) == sorted(WANTED)  # nothing twice


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (401, "GatedRepo", "--model org/name is gated: accept its terms at http"),
        *in_campaign((403, "GatedRepo", "--model org/name is gated: accept its terms at http")),
        (404, "RepoNotFound", "--model org/name does not exist on the hub, or is private"),
        (404, "RevisionNotFound", "--model org/name at revision v1 does not exist"),
        (500, "", "cannot be reached"),
    ],
)
def test_refusals_of_the_hub_say_the_remedy(
    tmp_path: Path, hub: FakeHub, status: int, code: str, expected: str
) -> None:
    hub.refusal = (status, code)
    revision = ["v1"] if code == "RevisionNotFound" else []
    message = resolve_apart(tmp_path, "org/name", *revision, hub=hub.endpoint)
    assert message.startswith("ModelFileError ")
    assert expected in message


GGUF = {
    "README.md": b"text",
    "tokenizer.json": b"{}",
    "mmproj-model-Q8_0.gguf": b"vision",
    "model-imatrix.gguf": b"measured",
    "q5_0/model.gguf": b"five",
    "model-Q8_0.gguf": b"eight",
    "model-Q4_K_M.gguf": b"four",
    "BF16/model-BF16-00001-of-00002.gguf": b"first",
    "BF16/model-BF16-00002-of-00002.gguf": b"second",
}


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("org/name", ["model-Q4_K_M.gguf"]),
        *in_campaign(
            ("org/name:q8_0", ["model-Q8_0.gguf"]),
            ("org/name:model-Q8_0.gguf", ["model-Q8_0.gguf"]),
            ("org/name:q5_0/model.gguf", ["q5_0/model.gguf"]),
        ),
        ("org/name:BF16", [f"BF16/model-BF16-0000{i}-of-00002.gguf" for i in (1, 2)]),
    ],
)
def test_of_a_gguf_repository_only_the_chosen_model_is_downloaded(
    tmp_path: Path, hub: FakeHub, name: str, files: list[str]
) -> None:
    hub.files = GGUF
    path = Path(resolve_apart(tmp_path, name, hub=hub.endpoint, HF_TOKEN="hf_secret"))
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / COMMIT
    assert path == snapshot / files[0]
    assert sorted(hub.requests) == [(file, None) for file in files]
    assert hub.tokens == {"Bearer hf_secret"}
    assert [(snapshot / file).read_bytes() for file in files] == [GGUF[file] for file in files]


def test_a_gguf_model_that_is_cached_needs_no_hub(tmp_path: Path, hub: FakeHub) -> None:
    hub.files = GGUF
    path = resolve_apart(tmp_path, "org/name:BF16", hub=hub.endpoint)
    for name in ("org/name:bf16", "org/name"):  # without a quantization: of what there is
        assert resolve_apart(tmp_path, name, HF_HUB_OFFLINE="1") == path
    message = resolve_apart(tmp_path, "org/name:Q4_K_M")
    assert message.startswith(
        f"ModelFileError --model org/name:Q4_K_M: there is no such file in the cache at {tmp_path}"
    )
    assert message.endswith("and the hub was not reached; choose from BF16")


def test_pull_downloads_and_list_shows_what_can_be_served(tmp_path: Path, hub: FakeHub) -> None:
    """Models of two files' sizes; an unknown architecture, other files and projectors are not."""
    hub.files = GGUF | {"model.safetensors": bytes(500), "config.json": b"{}"}
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / COMMIT

    def nanocore(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_apart(tmp_path, ["-m", "nanocore", *arguments], HF_ENDPOINT=hub.endpoint)

    assert nanocore("list").stdout.split() == ["MODEL", "SIZE", "LAST", "USED"]
    for quantization in ("Q4_K_M", "BF16"):
        pulled = nanocore("pull", f"org/name:{quantization}")
        assert Path(pulled.stdout.strip()).parent in (snapshot, snapshot / "BF16")
    assert nanocore("pull", "org/name").stdout == f"{snapshot}\n"
    assert sizes(nanocore("list", "--json").stdout) == {"org/name:Q4_K_M": 4, "org/name:BF16": 11}
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert sizes(nanocore("list", "--json").stdout).keys() == {
        "org/name", "org/name:Q4_K_M", "org/name:BF16",
    }  # fmt: skip
    refused = nanocore("pull", "org/name:Q2_K")
    assert refused.returncode == 3
    assert refused.stderr.endswith(
        "org/name:Q2_K: there is no such file; choose from BF16, Q4_K_M, Q8_0, Q5_0\n"
    )
    assert "nothing is to be downloaded" in nanocore("pull", str(tmp_path)).stderr


def sizes(text: str) -> dict[str, int]:
    return {model["name"]: model["num_bytes"] for model in json.loads(text)}


def test_a_gguf_model_beside_safetensors_is_taken_where_it_is_named() -> None:
    names = ["model.safetensors", "model-Q8_0.gguf", "config.json"]
    assert choose_gguf("org/name", names, "Q8_0") == ["model-Q8_0.gguf"]


@pytest.mark.parametrize(
    ("names", "wanted", "why"),
    [
        (["config.json"], "Q8_0", "leave it out: the model has no GGUF files"),
        (["config.json"], None, "it has neither safetensors nor GGUF files"),
        (["a-Q8_0.gguf", "a-f16.gguf"], "Q4_0", "org/name:Q4_0: .* choose from Q8_0, F16"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], None, r"\(a-Q8_0.gguf, b-Q8_0.gguf\): name the file"),
        (["a.gguf", "b.gguf"], None, "name the file, as in org/name:a.gguf"),
        (["a-Q2_K.gguf", "a-IQ3_XS.gguf"], None, "IQ3_XS is not served, .* it has IQ3_XS, Q2_K"),
        (["a-Q2_K.gguf", "a-Q8_0.gguf"], "Q2_K", "Q2_K is not served"),
    ],
)
def test_a_gguf_model_that_is_not_found_or_not_unique_is_refused(
    names: list[str], wanted: str | None, why: str
) -> None:
    with pytest.raises(ModelFileError, match=why):
        choose_gguf("org/name", names, wanted)


@pytest.mark.parametrize(
    ("quantizations", "taken"),
    [
        (["Q2_K", "Q8_0", "Q6_K"], "Q6_K"),
        (["BF16", "Q4_K_M", "Q4_0"], "Q4_K_M"),
        (["Q2_K", "IQ4_XS"], "IQ4_XS"),
    ],
)
def test_without_a_quantization_the_one_nearest_to_four_bits_is_taken(
    quantizations: list[str], taken: str
) -> None:
    names = [f"model.{each}.gguf" for each in quantizations]
    assert choose_gguf("org/name", names, None) == [f"model.{taken}.gguf"]
    assert choose_gguf("org/name", names, "latest") == [f"model.{taken}.gguf"]


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("SmolLM2-135M-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("smollm2-135m-instruct-q8_0.gguf", "Q8_0"),
        ("gemma-3-270m.Q5_0.gguf", "Q5_0"),
        ("Qwen3-0.6B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("Qwen3-0.6B-IQ4_XS.gguf", "IQ4_XS"),
        ("model-fp16.gguf", "F16"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("q/Qwen3-8B-BF16-00001-of-00002.gguf", "BF16"),
        ("q4_1/model.gguf", "Q4_1"),
        ("Qwen3-8B.gguf", ""),
    ],
)
def test_a_files_name_says_its_quantization(name: str, quantization: str) -> None:
    assert quantization_of(name) == quantization
