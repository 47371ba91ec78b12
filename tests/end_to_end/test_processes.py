"""Lives and deaths of processes: starting, refusing to start, stopping, and being killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from nanocore.client import (
    LLM,
    AsyncEngineClient,
    EngineDeadError,
    EngineStartError,
    RequestOutput,
    SamplingParams,
)
from tests.campaign import in_campaign
from tests.end_to_end import forked
from tests.end_to_end.engine_process import EXIT_TIMEOUT_S, command, engine

pytestmark = pytest.mark.usefixtures("forked_launches")

LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True, detokenize=False)
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def model_copy(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


# -- refusing to start ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--no-such-flag", "1"], ["--no-such-flag"]),
        (["--max-num-seqs", "0"], ["--max-num-seqs 0"]),
        (["--max-num-seqs", "many"], ["--max-num-seqs"]),
        (
            ["--max-num-batched-tokens", "8", "--max-num-seqs", "9"],
            ["--max-num-batched-tokens 8", "--max-num-seqs (9)"],
        ),
        (["--block-size", "12"], ["--block-size 12", "power of two"]),
        (["--dtype", "float64"], ["float64"]),
        (["--listen", "tcp://127.0.0.1:5555"], ["tcp://127.0.0.1:5555", "ipc://"]),
        (["--max-model-len", "5000"], ["5000", "1024"]),
    ],
)
def test_a_bad_flag_exits_with_2_and_says_which(
    tiny_model: Path, tmp_path: Path, flags: list[str], words: list[str]
) -> None:
    listen = ["--listen", f"ipc://{tmp_path}/e/engine.sock"]
    result = forked.run_to_exit("--model", str(tiny_model), *listen, *flags)
    assert result.returncode == 2
    for word in words:
        assert word in result.stderr
    assert "Traceback" not in result.stderr


def test_an_engine_that_cannot_start_ends_although_nobody_reads_why(full_pipe: int) -> None:
    process = subprocess.Popen(command("--max-num-seqs", "-3"), stderr=full_pipe)
    assert process.wait(60) == 2


def test_a_launcher_is_told_why_although_nobody_reads_the_log(
    full_pipe: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's stderr is its launcher's."""

    async def launch() -> None:
        with pytest.raises(EngineStartError, match="nowhere"):
            await AsyncEngineClient.launch("/nowhere").__aenter__()

    saved = os.dup(2)
    os.dup2(full_pipe, 2)
    try:
        run(launch())
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def break_model(folder: Path, damage: str) -> list[str]:
    """Damage a model folder; returns words that the error must hold."""
    weights, config = folder / "model.safetensors", folder / "config.json"
    tensors = safetensors.torch.load_file(weights)
    norm = "model.norm.weight"
    match damage:
        case "no folder":
            shutil.rmtree(folder)
            return [str(folder), "no such file or folder"]
        case "no config":
            config.unlink()
            return [str(config), "missing"]
        case "no weights":
            weights.unlink()
            return [str(folder), "no *.safetensors"]
        case "truncated weights":
            weights.write_bytes(weights.read_bytes()[:-100])
            return [str(weights), "download"]
        case "git-lfs pointer":
            weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
            return [str(weights), "git-lfs"]
        case "missing tensor":
            del tensors[norm]
            safetensors.torch.save_file(tensors, weights)
            return [norm, "missing"]
        case "unexpected tensor":
            extra = {"extra.weight": tensors[norm].clone()}
            safetensors.torch.save_file(tensors | extra, weights)
            return [str(weights), "extra.weight"]
        case "wrong shape":
            tensors[norm] = tensors[norm][:-1].clone()
            safetensors.torch.save_file(tensors, weights)
            return [str(weights), norm, "[63]", "[64]"]
        case "unknown architecture":
            edit_config(folder, architectures=["GPT9ForCausalLM"])
            return [str(config), "GPT9ForCausalLM", "Qwen3ForCausalLM"]
        case "quantized weights":
            edit_config(folder, quantization_config={"quant_method": "awq"})
            return ["quantization_config"]
        case "unknown rope":
            edit_config(folder, rope_parameters={"rope_type": "spiral", "factor": 4.0})
            return ["rope_type", "spiral"]
        case "config of wrong types":
            edit_config(folder, hidden_size="wide")
            return [str(config), "hidden_size"]
        case "index outside the folder":
            index = {"weight_map": {norm: "../model.safetensors"}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
            return ["index.json", "../model.safetensors"]
    raise AssertionError(damage)


@pytest.mark.parametrize(
    "damage",
    [
        "no folder", "no config", "no weights", "truncated weights", "git-lfs pointer",
        "missing tensor", "unexpected tensor", "wrong shape", "unknown architecture",
        "quantized weights", "unknown rope", "config of wrong types", "index outside the folder",
    ],
)  # fmt: skip
def test_a_bad_model_exits_with_3_and_names_the_file(
    model_copy: Path, tmp_path: Path, damage: str
) -> None:
    words = break_model(model_copy, damage)
    listen = f"ipc://{tmp_path}/e/engine.sock"
    result = forked.run_to_exit("--model", str(model_copy), "--listen", listen)
    assert result.returncode == 3
    for word in words:
        assert word in result.stderr
    assert "Traceback" not in result.stderr


def test_too_little_kv_memory_exits_with_4_and_the_suggestion_works(
    tiny_model: Path, tmp_path: Path
) -> None:
    flags = ["--model", str(tiny_model), "--listen", f"ipc://{tmp_path}/e/engine.sock"]
    result = forked.run_to_exit(*flags, "--kv-cache-memory-bytes", "500000")
    assert result.returncode == 4
    words = result.stderr.split()
    suggestions = (
        {"max_model_len": int(words[words.index("--max-model-len") + 1].rstrip(","))},
        {
            "kv_cache_memory_bytes": int(
                words[words.index("--kv-cache-memory-bytes") + 1].rstrip(",")
            )
        },
    )
    for suggestion in suggestions:
        engine_args = {"kv_cache_memory_bytes": 500_000} | suggestion
        _, tokens = forked.ask(tiny_model, lambda _: [1, 2], **engine_args)
        assert len(tokens) == 4


@pytest.mark.parametrize("flag", ["--listen", "--kv-events-endpoint"])
def test_an_endpoint_at_a_files_place_exits_with_2_and_leaves_the_file(
    tiny_model: Path, short_path: Path, flag: str
) -> None:
    notes = short_path / "notes.txt"
    notes.write_text("mine")
    endpoints = {"--listen": f"ipc://{short_path}/engine.sock", flag: f"ipc://{notes}"}
    result = forked.run_to_exit(
        "--model", str(tiny_model), *(w for pair in endpoints.items() for w in pair)
    )
    assert result.returncode == 2
    assert f"{notes} exists and is not a socket" in result.stderr
    assert flag in result.stderr
    assert "Traceback" not in result.stderr
    assert notes.read_text() == "mine"


def test_a_second_engine_on_an_endpoint_exits_with_5_and_names_the_first(tiny_model: Path) -> None:
    async def first_still_serves(endpoint: str) -> None:
        async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
            await client.complete([1, 2], GREEDY)

    with forked.engine(tiny_model) as running:
        run(first_still_serves(running.endpoint))
        result = forked.run_to_exit("--model", str(tiny_model), "--listen", running.endpoint)
        assert result.returncode == 5
        assert f"process {running.pid}" in result.stderr
        run(first_still_serves(running.endpoint))


@pytest.mark.parametrize(
    ("engine_args", "code", "word"),
    [
        ({"max_num_seqs": 0}, 2, "--max-num-seqs 0"),
        ({"max_num_sequences": 8}, 2, "--max-num-sequences"),
        *in_campaign(({"kv_cache_memory_bytes": 1000}, 4, "--kv-cache-memory-bytes")),
    ],
)
def test_a_launching_client_hears_why_the_engine_did_not_start(
    tiny_model: Path, engine_args: dict, code: int, word: str
) -> None:
    with pytest.raises(EngineStartError, match=word) as caught:
        LLM(tiny_model, **engine_args)
    assert caught.value.exit_code == code


# -- stopping -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_every_request_and_then_the_engine(
    tiny_model: Path, number: signal.Signals, code: int
) -> None:
    async def main(endpoint: str, pid: int) -> None:
        async with AsyncEngineClient.connect(endpoint, timeout_s=60, resume=False) as client:
            stream = client.generate([1, 2, 3], LONG)
            await anext(stream)
            os.kill(pid, number)
            last = [output async for output in stream][-1]
            end = last.outputs[0]
            assert (end.finish_reason, end.stop_reason, end.message) == ("abort", None, number.name)
            with pytest.raises(EngineDeadError, match=number.name):
                await ask_until_it_fails(client)

    with engine(tiny_model, "--shutdown-timeout", "0") as running:  # else it finishes what runs
        run(main(running.endpoint, running.process.pid))
        assert running.process.wait(30) == code
        assert not Path(running.endpoint.removeprefix("ipc://")).exists()


async def ask_until_it_fails(client: AsyncEngineClient) -> None:
    while True:
        await client.stats()


def test_sigterm_before_an_engine_is_ready_ends_it_as_any_process(tiny_model: Path) -> None:
    starting = subprocess.Popen(command("--model", str(tiny_model)), stderr=subprocess.DEVNULL)
    starting.terminate()
    assert starting.wait(timeout=EXIT_TIMEOUT_S) == -signal.SIGTERM


def test_the_log_names_each_phase_once(tiny_model: Path) -> None:
    async def main(endpoint: str) -> None:
        async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
            await client.complete([1, 2, 3], GREEDY)

    with forked.engine(tiny_model) as running:
        run(main(running.endpoint))
        log = running.stderr.read_text()
    phases = ("nanocore 0.1.0 | model ", "load ", "kv cache ", "ready in ")
    for phase in phases:
        assert log.count(phase) == 1


# -- deaths ---------------------------------------------------------------------------------------


def test_killing_an_engine_without_restarts_fails_its_requests_at_once(
    tiny_model: Path,
) -> None:
    async def main() -> None:
        async with AsyncEngineClient.launch(tiny_model, max_restarts=0) as client:
            stream = client.generate([1, 2, 3], LONG)
            await anext(stream)
            assert client._supervisor is not None
            os.kill(client._supervisor.pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="exit"):
                async for _ in stream:
                    pass
            with pytest.raises(EngineDeadError):
                await client.complete([1], GREEDY)

    run(main())


def test_killing_an_engine_tells_the_clients_that_joined_it_and_the_next_one_serves_them(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "nanocore.client.connection.engine_connection.ENGINE_TIMEOUT_S", 1000.0
    )  # it is not that

    async def main(client: AsyncEngineClient, pid: int) -> None:
        async with client:
            stream = client.generate([1, 2, 3], LONG)
            await anext(stream)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="was closed; nothing listens at"):
                await read_to_the_end(stream)
            with pytest.raises(EngineDeadError, match=r"nothing listens at .*nanocore-engine"):
                await client.complete([1], GREEDY)
            with forked.engine(tiny_model, endpoint=client.endpoint):
                while True:
                    with contextlib.suppress(EngineDeadError):
                        assert (await client.complete([1, 2], GREEDY)).finished
                        return

    with forked.engine(tiny_model) as running:
        client = AsyncEngineClient.connect(running.endpoint, resume=False, timeout_s=60)
        run(main(client, running.pid))


async def read_to_the_end(stream: AsyncIterator[RequestOutput]) -> None:
    async for _ in stream:
        pass


def test_a_killed_clients_requests_are_aborted(tiny_model: Path) -> None:
    script = (
        "import asyncio, sys\n"
        "from nanocore.client import AsyncEngineClient, SamplingParams\n"
        "async def main():\n"
        "    async with AsyncEngineClient.connect(sys.argv[1], timeout_s=60) as client:\n"
        "        params = SamplingParams(max_tokens=900, ignore_eos=True, detokenize=False)\n"
        "        async for output in client.generate([1, 2, 3], params):\n"
        "            print('streaming', flush=True)\n"
        "asyncio.run(main())\n"
    )

    async def main(endpoint: str) -> None:
        async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
            await client.pause()  # the request cannot end by itself meanwhile
            child.kill()
            while (stats := await client.stats()).num_clients > 1 or stats.num_requests_running:
                pass
            assert stats.num_free_blocks == stats.num_blocks
            assert stats.num_aborts == 1

    with forked.engine(tiny_model) as running:
        child = subprocess.Popen(
            [sys.executable, "-c", script, running.endpoint], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        with child.stdout:
            assert child.stdout.readline() == b"streaming\n"
            run(main(running.endpoint))
            child.wait()
