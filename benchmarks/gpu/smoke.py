"""Whether anything of this machine's figures can be believed: the first minute of a day.

A graph of our kernels and cuBLAS's in turn, launched with programmatic dependent launch, must give
the bits of the same kernels called one by one, each of many times. So must attention of decodes in
parts, which programs merge that meet by a count in memory. The demo model must give the
tokens that a CPU gives in float32: step by step, by graphs, and with overlapped steps. The CPU's
tokens are in golden_tokens.json; `python -m benchmarks.gpu.smoke` makes it anew.

If one of these fails, day.py turns dependent launches off and runs this part again: names begin
with smoke/pdl or smoke/plain.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.attention_cases import Heads, make_step
from benchmarks.gpu.engine import LocalEngine
from benchmarks.gpu.kernels import MAX_ERROR, kernels_of
from benchmarks.gpu.results import Measurements, Results, Session, uses_pdl
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.worker.step.cuda_stream import CudaGraphCapture

ROOT: Final = Path(__file__).resolve().parents[2]
MODEL: Final = ROOT / "demo_model" / "nanocore_demo_model"
GOLDEN: Final = Path(__file__).with_name("golden_tokens.json")
QUESTIONS: Final = (
    "What is 123 + 456?",
    "Reverse these words: red apple green bird",
    "Sort these numbers: 512 37 8 240",
    'Reverse the word "nanocore".',
)
_MAX_TOKENS: Final = 48
_REPLAYS: Final = 200
_NUM_LAYERS: Final = 12
_ENGINES: Final[dict[str, dict[str, Any]]] = {
    "engine/eager": {"enforce_eager": True, "async_scheduling": False},
    "engine/graphs": {"enforce_eager": False, "async_scheduling": False},
    "engine/overlapped": {"enforce_eager": False, "async_scheduling": True},
}


def measure(results: Results, part: str) -> None:
    """The graph first, for it is what PDL may break."""
    results.run(measurements(results.session, part), hangs_s=30)


def measurements(session: Session, part: str) -> Measurements:
    """By name."""
    prefix = f"{part}/{'pdl' if uses_pdl() else 'plain'}"
    found: Measurements = {
        f"{prefix}/chain": partial(check_chain, session),
        f"{prefix}/decodes": partial(check_decodes, session),
    }
    for name, settings in _ENGINES.items():
        found[f"{prefix}/{name}"] = partial(check_engine, session, settings)
    return found


@torch.inference_mode()
def check_chain(session: Session) -> dict[str, Any]:
    """Replays of a graph beside the same kernels called one by one, with two inputs in turn.

    A kernel that reads before the one in front of it has written would see the other input's
    numbers, which the replay before has left.

    Raises:
        AssertionError: some bits differ.
    """
    size, num_rows = (64, 4) if session.small else (1024, 32)
    dtype = torch.bfloat16 if session.on_gpu else torch.float32
    kernels, generator = kernels_of(session), torch.Generator(session.device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=session.device).normal_(generator=generator)

    up_OI, down_IO = (kernels.pack_linear(draw(size, size) * size**-0.5) for _ in range(2))
    weight_E, inputs = draw(size), [draw(num_rows, size) for _ in range(2)]
    x_TE = torch.empty_like(inputs[0])

    def chain() -> dict[str, Tensor]:
        residual_TE, h_TE = x_TE.clone(), kernels.rms_norm(x_TE, weight_E, 1e-6)
        for _ in range(_NUM_LAYERS):
            h_TE = F.silu(kernels.linear(kernels.rms_norm(h_TE, weight_E, 1e-6), up_OI))
            h_TE = kernels.linear(h_TE, down_IO)
            h_TE, residual_TE = kernels.add_rms_norm(h_TE, residual_TE, weight_E, 1e-6)
        return {"out": h_TE.float()}

    expected = []
    for value in inputs:
        x_TE.copy_(value)
        expected.append(chain()["out"].clone())
    if not session.on_gpu:
        return {"num_replays": 0}
    graph_capture = CudaGraphCapture()
    graph_capture.begin_set()
    found: list[Tensor] = []
    _, replay = graph_capture.capture(lambda: found.append(chain()["out"]))
    num_wrong = 0
    for number in range(_REPLAYS):
        x_TE.copy_(inputs[number % 2])
        replay()
        num_wrong += int(not torch.equal(found[-1], expected[number % 2]))
    if num_wrong:
        raise AssertionError(f"{num_wrong} of {_REPLAYS} replays differ from eager kernels")
    return {"num_replays": _REPLAYS}


@torch.inference_mode()
def check_decodes(session: Session) -> dict[str, Any]:
    """Attention of one step again and again, as many layers; and beside the reference.

    Raises:
        AssertionError: some bits differ, or the result is wrong.
    """
    unit, heads = (16, Heads(4, 2, 32)) if session.small else (1024, Heads(16, 8, 128))
    lengths = [8 * unit, 3 * unit + 1, unit, unit // 2, 1, 0, 5, 2 * unit]
    figures = {}
    for name, decodes in {"few": lengths, "one": lengths[:1], "many": lengths * 12}.items():
        step = make_step(session, heads, [(max(1, length), 1) for length in decodes])
        operands, kernels = step.operands(), kernels_of(session)
        first = kernels.paged_attention(*operands)
        expected = TorchKernels().paged_attention(*operands)
        error = float((first.double() - expected.double()).norm() / expected.double().norm())
        num_wrong = 0
        for _ in range(_REPLAYS if session.on_gpu else 2):
            num_wrong += int(not torch.equal(kernels.paged_attention(*operands), first))
        if num_wrong or not error <= MAX_ERROR:
            raise AssertionError(f"{name}: {num_wrong} calls differ from the first; error {error}")
        figures[f"error_{name}"] = error
    return figures


def check_engine(session: Session, settings: dict[str, Any]) -> dict[str, Any]:
    """The demo model's answers beside those of a CPU.

    Raises:
        AssertionError: a token differs. StartError: as an engine's start does.
    """
    golden = json.loads(GOLDEN.read_text())
    found = answer([case["prompt"] for case in golden], session.device.type, **settings)
    pairs = zip(found["tokens"], golden, strict=True)
    num_equal = sum(own == case["tokens"] for own, case in pairs)
    if num_equal < len(golden):
        raise AssertionError(f"{num_equal} of {len(golden)} answers are the CPU's: {found}")
    return {"num_equal": num_equal, "kernels": found["kernels"], "phases_s": found["phases_s"]}


def answer(prompts: list[list[int]], device: str, **settings: Any) -> dict[str, Any]:
    """Greedy tokens of each prompt, up to EOS, in float32; and what the engine says of itself."""
    engine = LocalEngine(
        MODEL, device=device, dtype="float32", max_model_len=512, max_num_seqs=8,
        max_num_batched_tokens=512, kv_cache_memory_bytes=2**26, enable_prefix_caching=False,
        **settings,
    )  # fmt: skip
    handles = [engine.add(prompt, _MAX_TOKENS) for prompt in prompts]
    engine.run()
    eos_token_id = json.loads((MODEL / "config.json").read_text())["eos_token_id"]
    tokens = [_until(engine.tokens[handle], eos_token_id) for handle in handles]
    found = {"tokens": tokens, "kernels": engine.kernels, "phases_s": engine.phases_s}
    engine.close()
    return found


def _until(tokens: list[int], last: int) -> list[int]:
    return tokens[: tokens.index(last) + 1] if last in tokens else tokens


def make_golden() -> list[dict[str, Any]]:
    """Prompts, as the demo model's chat template writes them, and a CPU's tokens for them."""
    from nanocore.client import LLM, SamplingParams

    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=_MAX_TOKENS)
    with LLM(str(MODEL), device="cpu", dtype="float32", max_model_len=512) as llm:
        outputs = llm.chat(chats, params, use_tqdm=False)
    return [
        {"text": output.outputs[0].text, "prompt": list(output.prompt_token_ids),
         "tokens": list(output.outputs[0].token_ids)}
        for output in outputs
    ]  # fmt: skip


if __name__ == "__main__":
    GOLDEN.write_text("[\n" + ",\n".join(map(json.dumps, make_golden())) + "\n]\n")
