"""What an MTP head gains where each of its drafts is right with a given probability.

    nice -n -15 python benchmarks/mtp.py [--model qwen3.5-0.8b] [--acceptance 0.7] [--drafts 3]

Weights are random, so of itself the head is never right. The engine that drafts runs it, and then
takes other tokens in place of its guesses: those that an engine without drafts gave, or wrong ones,
drawn for each place. (vLLM calls this synthetic acceptance.) A draft behind a wrong one is lost.
Both engines answer the same requests in turns, 1 and 16 at once, and must give the same tokens.
Prompts are short, so what is timed is decoding. Writes benchmarks/results/mtp.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from models import model_folder
from report import describe_run, positive, spread, table, with_range, write_report
from torch import Tensor

from nanocore.client import AsyncEngineClient, SamplingParams
from nanocore.engine_core.cli import main as engine_main
from nanocore.kernels.sampling import TokenPlaces
from nanocore.worker.drafting import mtp
from nanocore.worker.step.batch_step import BatchStep
from nanocore.worker.step.drafts import Proposal

RESULTS: Final = Path(__file__).parent / "results" / "mtp.json"
STREAMS: Final = (1, 16)
PROMPT_TOKENS: Final = 16
NEW_TOKENS: Final = 96


class Forging(mtp.MtpProposer):
    """A head whose guesses are replaced. The first two tokens of a prompt say which one it is.

    truth: by these, all tokens of a request, which are looked up in the file when it changes.
    """

    file: Path
    acceptance: float

    def propose(self, step: BatchStep) -> Proposal:
        proposal = super().propose(step)

        def guess(fields: Mapping[str, Tensor], places: TokenPlaces, is_certain: bool) -> Tensor:
            drafts_D = proposal.guess(fields, places, is_certain)
            truth = json.loads(self.file.read_text()) if self.file.exists() else {}
            rows, positions = places.rows_R.tolist(), places.positions_R.tolist()
            for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
                one, other = places.token_table[row, :2].tolist()
                tokens = truth.get(f"{one} {other}", [])
                is_right = random.Random(f"{one} {other} {position}").random() < self.acceptance
                if position < len(tokens):
                    drafts_D[i] = tokens[position] if is_right else tokens[position] ^ 1
            return drafts_D

        return Proposal(proposal.columns, guess)


def run_forging_engine(file: Path, acceptance: float, flags: list[str]) -> None:
    Forging.file, Forging.acceptance = file, acceptance
    mtp.MtpProposer = Forging  # type: ignore[misc]
    sys.exit(engine_main(flags))


async def answer(client: AsyncEngineClient, prompts: list[list[int]]) -> tuple[float, list[Any]]:
    """(tokens per second from the first tokens on, the tokens)."""
    params = SamplingParams(
        temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False
    )
    starts: list[float] = []

    async def one(prompt: list[int]) -> list[int]:
        is_first, tokens = True, []
        async for output in client.generate(prompt, params):
            if is_first:
                starts.append(time.perf_counter())
            is_first, tokens = False, list(output.outputs[0].token_ids)
        return tokens

    outputs = await asyncio.gather(*map(one, prompts))
    seconds = time.perf_counter() - max(starts)
    return len(prompts) * (NEW_TOKENS - 1) / seconds, outputs


async def measure(arguments: argparse.Namespace, folder: Path, place: Path) -> dict[str, Any]:
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    flags = ["--model", str(folder), "--load-format", "dummy", "--max-num-seqs", str(max(STREAMS))]
    flags += ["--max-model-len", "512", "--no-enable-prefix-caching"]
    drafts = {"method": "mtp", "num_speculative_tokens": arguments.drafts}
    truth, ends = place / "truth.json", [f"ipc://{place}/{name}.sock" for name in ("plain", "mtp")]
    own = [sys.executable, __file__, "--engine", str(truth), "--acceptance"]
    own += [str(arguments.acceptance), "--", "--speculative-config", json.dumps(drafts)]
    commands = [[sys.executable, "-m", "nanocore.engine_core"], own]
    processes = [
        subprocess.Popen([*command, *flags, "--listen", end])
        for command, end in zip(commands, ends, strict=True)
    ]
    figures: dict[str, Any] = {}
    try:
        for num_streams in STREAMS:
            rates: list[list[float]] = [[], []]
            before = None
            for repetition in range(arguments.reps + 1):
                rng = random.Random(f"{num_streams}/{repetition}")
                prompts = [
                    rng.choices(range(vocab_size), k=PROMPT_TOKENS) for _ in range(num_streams)
                ]
                answers = []
                for number, end in enumerate(ends):
                    async with AsyncEngineClient.connect(end, timeout_s=600) as client:
                        rate, outputs = await answer(client, prompts)
                        stats = await client.stats()
                    rates[number] += [rate] if repetition else []
                    answers.append(outputs)
                    known = zip(prompts, outputs, strict=True)
                    named = {f"{one[0]} {one[1]}": one + tokens for one, tokens in known}
                    truth.write_text(json.dumps(named))
                    print(f"{num_streams}: {rate:.1f} tokens/s", file=sys.stderr, flush=True)
                assert answers[0] == answers[1], "drafts change no token"
                before = before or stats
            assert before is not None
            drafted, accepted = (
                getattr(stats, name) - getattr(before, name)
                for name in ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
            )
            figures[str(num_streams)] = {
                "plain_tokens_per_s": spread(rates[0], 2),
                "mtp_tokens_per_s": spread(rates[1], 2),
                "times_plain": spread([b / a for a, b in zip(*rates, strict=True)], 3),
                "drafts_per_request": drafted / (num_streams * arguments.reps),
                "accepted_of_drafts": round(accepted / drafted, 3) if drafted else None,
            }
    finally:
        for process in processes:
            process.terminate()
            process.wait()
    return figures


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="qwen3.5-0.8b")
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--drafts", type=positive, default=3)
    parser.add_argument("--reps", type=positive, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine is not None:
        run_forging_engine(arguments.engine, arguments.acceptance, arguments.flags)
    torch.set_num_threads(1)
    report = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    with tempfile.TemporaryDirectory(prefix="nanocore-mtp-") as place:
        folder = Path(place) / "model"
        folder.mkdir()
        config = json.loads((model_folder(arguments.model) / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
        figures = asyncio.run(measure(arguments, folder, Path(place)))
    report[arguments.model] = {
        **describe_run(("nanocore", "torch")),
        "acceptance": arguments.acceptance,
        "drafts": arguments.drafts,
        "reps": arguments.reps,
        "figures": figures,
    }
    write_report(arguments.out, report)
    keys = "plain_tokens_per_s", "mtp_tokens_per_s", "times_plain"
    rows = [["streams", "plain tok/s", "mtp tok/s", "times"]]
    rows += [[name, *(with_range(own[key]) for key in keys)] for name, own in figures.items()]
    print(table(rows))


if __name__ == "__main__":
    main()
