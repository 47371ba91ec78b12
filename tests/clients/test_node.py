"""The Node client, built as its users build it, against a real engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from nanocore.client.tokenizer import Tokenizer
from nanocore.demo_model import demo_model_folder
from tests.clients.conftest import (
    MAX_TOKENS,
    NO_TYPE,
    QUESTION,
    ROOT,
    VECTORS,
    WANTED,
    Chat,
    assert_conforms,
    last_words,
    num_words,
    resumed,
    text_of,
)

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(func_only=True)]  # building has its own

PACKAGE = ROOT / "clients" / "node"
TIMEOUT_S = 100.0
BUILD_TIMEOUT_S = 600.0
UNREACHABLE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ENETUNREACH", "ETIMEDOUT")
TEXTS = [
    "What is 123 + 456?",
    "<|im_start|>user\nHallo<|im_end|>\n",
    "Gr\u00fc\u00dfe, \u043c\u0438\u0440! \u4f60\u597d e\u0301",
    "\U0001f30d\U0001f469\u200d\U0001f469\u200d\U0001f467",
    "  a\n\n\tb \u00a0\u2028\u00b2\u00bd\u0663\ufeff\u200b\x1c",
    "don't<|im_end|> <|im_start|>",
    "",
]


def run(
    *command: str, env: dict[str, str] | None = None, timeout_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run a command in the package's folder, to its end."""
    return subprocess.run(
        command,
        cwd=PACKAGE,
        env={**os.environ, **(env or {})},
        capture_output=True,
        encoding="utf-8",
        timeout=timeout_s,
        check=False,
    )


@pytest.fixture(scope="session", autouse=True)
def package() -> None:
    """The package with its dependencies, compiled."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    installed = run("npm", "ci", "--no-audit", "--no-fund", timeout_s=BUILD_TIMEOUT_S)
    if installed.returncode and any(code in installed.stderr for code in UNREACHABLE):
        pytest.skip("the npm registry cannot be reached")
    assert installed.returncode == 0, installed.stderr
    built = run("npm", "run", "build", timeout_s=BUILD_TIMEOUT_S)
    assert built.returncode == 0, built.stdout + built.stderr


def node(*arguments: str, env: dict[str, str] | None = None) -> str:
    """What a node program prints; it must succeed."""
    done = run("node", *arguments, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def script(chat: Chat, body: str) -> object:
    """What a script prints as JSON, with `engine` and `prompt` at hand."""
    program = f"""
        import {{ Engine, EngineError }} from "nanocore-client";
        const prompt = {json.dumps(chat.prompt_token_ids)};
        const engine = await Engine.connect({json.dumps(chat.endpoint)});
        {body}
        await engine.close();
    """
    return json.loads(node("--input-type=module", "--eval", program))


def test_the_stream_example_gets_what_the_sdk_gets(chat: Chat) -> None:
    prompt = ",".join(map(str, chat.prompt_token_ids))
    printed = node("examples/stream.mjs", chat.endpoint, prompt, str(MAX_TOKENS)).splitlines()
    assert list(map(int, printed[:-1])) == chat.answer_token_ids
    assert printed[-1] == "finish_reason: stop"


def test_the_conformance_vectors_pass() -> None:
    printed = node("examples/vectors.mjs", str(VECTORS)).split("\n")
    counts = {name: int(count) for name, count in (line.split(": ") for line in printed if line)}
    vectors = [json.loads(line) for line in VECTORS.read_text("utf-8").splitlines()]
    sent = [vector for vector in vectors if vector["sender"] == "engine"]
    strict = counts.pop("strict, refused") + counts.pop("strict, taken")
    assert strict == sum("strict" in vector for vector in sent)
    assert counts == {
        "decoded": sum("message" in vector for vector in sent),
        "encoded": sum("canonical" in vector for vector in vectors),
        "refused": sum("error" in vector and "strict" not in vector for vector in sent),
        "failed": 0,
    }


def test_a_chat_needs_only_the_endpoint_and_a_damaged_cache_is_noticed(
    chat: Chat, tmp_path: Path
) -> None:
    command = ("examples/chat.mjs", chat.endpoint, QUESTION, "--temperature", "0")
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    assert node(*command, "--max-tokens", str(MAX_TOKENS), env=env) == f"{chat.answer}\n"
    files = {path.name: path.read_bytes() for path in tmp_path.glob("nanocore/files/*")}
    assert len(files) == 2  # the demo model's template is in its tokenizer_config.json
    for name in files:
        (tmp_path / "nanocore" / "files" / name).write_bytes(b"{}")
    assert node(*command, "--max-tokens", str(MAX_TOKENS), env=env) == f"{chat.answer}\n"
    assert files == {path.name: path.read_bytes() for path in tmp_path.glob("nanocore/files/*")}


def test_a_chat_ends_before_a_stop_string(chat: Chat, tmp_path: Path) -> None:
    stop = chat.answer[-2:]
    printed = node(
        "examples/chat.mjs",
        chat.endpoint,
        QUESTION,
        "--temperature",
        "0",
        "--stop",
        stop,
        env={"XDG_CACHE_HOME": str(tmp_path)},
    )
    assert printed == f"{chat.answer[: chat.answer.index(stop)]}\n"


def test_texts_get_the_same_token_ids_as_in_python(chat: Chat, tmp_path: Path) -> None:
    program = f"""
        import {{ Engine }} from "nanocore-client";
        import {{ Tokenizer }} from "./examples/tokenizer.mjs";
        const engine = await Engine.connect({json.dumps(chat.endpoint)});
        const tokenizer = await Tokenizer.load(engine);
        const texts = {json.dumps(TEXTS)};
        const chats = texts.map((content) => tokenizer.encodeChat([{{ role: "user", content }}]));
        console.log(JSON.stringify([texts.map((text) => tokenizer.encode(text)), chats]));
        await engine.close();
    """
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    texts, chats = json.loads(node("--input-type=module", "--eval", program, env=env))
    tokenizer = Tokenizer.from_folder(demo_model_folder())
    assert texts == [tokenizer.encode(text) for text in TEXTS]
    # The example lets what spells a special token be one; Python's encode_chat would not.
    prompts = [tokenizer.render_chat([{"role": "user", "content": text}]) for text in TEXTS]
    assert chats == [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]


def test_requests_of_one_session_run_at_once_and_get_their_own_tokens(chat: Chat) -> None:
    answers = script(
        chat,
        """
        const answer = async (max_tokens) => {
          const all = [];
          const outputs = engine.generate(prompt, { temperature: 0, max_tokens });
          for await (const { token_ids } of outputs) all.push(...token_ids);
          return all;
        };
        console.log(JSON.stringify(await Promise.all([1, 2, 3, 4, 5, 6].map(answer))));
        """,
    )
    assert answers == [chat.answer_token_ids[:n] for n in range(1, 7)]


@pytest.mark.parametrize("how", ["break;", "controller.abort();"])
def test_leaving_early_aborts_the_request(chat: Chat, how: str) -> None:
    aborted = script(
        chat,
        """
        const before = await engine.stats();
        const controller = new AbortController();
        const sampling = { max_tokens: 1000, ignore_eos: true };
        const options = { signal: controller.signal };
        try {
          for await (const _ of engine.generate(prompt, sampling, options)) { LEAVE }
        } catch (error) {
          if (error.name !== "AbortError") throw error;
        }
        let stats;
        do stats = await engine.stats(); while (stats.num_requests_running);
        const numTokens = stats.generation_tokens - before.generation_tokens;
        console.log(JSON.stringify([stats.num_aborts - before.num_aborts, numTokens < 1000]));
        """.replace("LEAVE", how),
    )
    assert aborted == [1, True]


SAMPLES = """
    const params = { temperature: 1, seed: 7, max_tokens: 6, ignore_eos: true };
    const read = async (sampling) => {
      const samples = [];
      for await (const { index, token_ids, logprobs = [], prompt_logprobs = [] } of
                 engine.generate(prompt, { ...params, ...sampling })) {
        samples[index] ??= { token_ids: [], logprobs: [], prompt_logprobs: [] };
        samples[index].token_ids.push(...token_ids);
        samples[index].logprobs.push(...logprobs);
        samples[index].prompt_logprobs.push(...prompt_logprobs);
      }
      return samples;
    };
    const several = await read({ n: 3, logprobs: 2, prompt_logprobs: 0 });
    const alone = [];
    for (const seed of [7, 8, 9]) alone.push((await read({ seed }))[0]);
    console.log(JSON.stringify({ several, alone }));
"""


def test_samples_have_seeds_of_their_own_and_log_probabilities(told_chat: Chat) -> None:
    told = script(told_chat, SAMPLES)
    assert isinstance(told, dict)
    assert [one["token_ids"] for one in told["several"]] == [
        one["token_ids"] for one in told["alone"]
    ]
    for sample in told["several"]:
        first = [entry["candidates"][0]["token_id"] for entry in sample["logprobs"]]
        assert first == sample["token_ids"]
        assert all(len(entry["candidates"]) == 3 for entry in sample["logprobs"])
    prompt = [entry["candidates"][0]["token_id"] for entry in told["several"][0]["prompt_logprobs"]]
    assert prompt == told_chat.prompt_token_ids[1:]


def test_outputs_are_what_was_wanted_and_a_bad_schema_is_refused_alone(told_chat: Chat) -> None:
    wanted = json.dumps([{kind: what} for kind, what, _ in WANTED])
    told = script(
        told_chat,
        """
        const read = async (structured_outputs) => {
          const all = [];
          try {
            for await (const { token_ids } of engine.generate(prompt, { structured_outputs }))
              all.push(...token_ids);
          } catch (error) {
            return error.message;
          }
          return all;
        };
        console.log(JSON.stringify(await Promise.all(WANTED.map(read))));
        """.replace("WANTED", wanted),
    )
    assert isinstance(told, list)
    for one, (_, _, texts) in zip(told, WANTED, strict=True):
        assert text_of(one) in texts if texts else one == NO_TYPE


def test_the_example_streams_a_structured_output(told_chat: Chat) -> None:
    wanted = json.dumps({"json": json.dumps({"enum": ["red", 5]})})
    printed = node("examples/stream.mjs", told_chat.endpoint, "1,2,3", "64", wanted)
    *token_ids, last = printed.splitlines()
    assert last == "finish_reason: stop"
    assert text_of(map(int, token_ids)) in ('"red"', "5")


def test_the_death_of_an_engine_is_noticed_by_its_connection() -> None:
    """Not by its silence, which would take 10 s."""
    assert "closed" in last_words(["node", str(PACKAGE / "examples" / "stream.mjs")])


def test_a_stream_outlives_its_engine() -> None:
    whole, disturbed = resumed(["node", str(PACKAGE / "examples" / "resume.mjs")])
    assert whole[-1] == "1 finish_reason: length"
    assert disturbed == whole


def test_an_error_is_typed(chat: Chat) -> None:
    error = script(
        chat,
        """
        try {
          await engine.generate(Array(100_000).fill(1)).next();
        } catch (error) {
          const { name, code } = error;
          console.log(JSON.stringify([error instanceof EngineError, name, code]));
        }
        """,
    )
    assert error == [True, "EngineError", "context_length_exceeded"]


def test_the_package_passes_its_own_tests() -> None:
    done = run("npm", "test", "--ignore-scripts")  # it is built already
    assert done.returncode == 0, done.stdout


def test_the_package_holds_what_was_compiled_and_names_no_registry() -> None:
    [packed] = json.loads(run("npm", "pack", "--dry-run", "--json", "--ignore-scripts").stdout)
    names = {file["path"] for file in packed["files"]}
    compiled = {f"dist/{name}.{kind}" for name in ("engine", "wire") for kind in ("js", "d.ts")}
    assert names == {"LICENSE", "README.md", "package.json", *compiled}
    assert '"resolved"' not in (PACKAGE / "package-lock.json").read_text("utf-8")


def test_the_library_is_small() -> None:
    assert 0 < num_words(PACKAGE.glob("src/*")) <= 2200


@pytest.mark.timeout(300)
def test_it_conforms() -> None:
    assert_conforms("node", str(PACKAGE / "examples" / "stream.mjs"))
