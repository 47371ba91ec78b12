"""Teach the demo model its sums as JSON: python tools/demo_model/fine_tune.py --out DIR.

The weights go on from where they are, in float32, at a lower learning rate that falls to nothing
over the training time; all the tasks of before stay in the mix. Weights are written every few
minutes, with the accuracy on held-out sums.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanocore.demo_model import demo_model_folder
from tests.demo_model.json_sums import SUM_SCHEMA, held_out_sums
from tests.demo_model.tasks import SHORT_TASKS, Example, Mix, held_out
from tools.demo_model.data import ChatEncoder, collate, pool
from tools.demo_model.model import batch_loss, export
from tools.demo_model.tokenizer import build

BUNDLED = demo_model_folder()
SEED = 20_000_000
BATCH_TOKENS = 1024
WARM_UP_STEPS = 30
EXPORT_MINUTES = 4.0
LAGGING = ("count", "count", "sort_words", "sort_words", "sort_numbers", "sort_numbers")
MIX = Mix(1024, 0.05, least_power=0.3, json_share=0.25, focus=LAGGING)


@torch.inference_mode()
def accuracy(model: Qwen3ForCausalLM, encoder: ChatEncoder, examples: list[Example]) -> float:
    """The share whose learned tokens, each after the right ones before, all have the best logit."""
    right = 0
    for start in range(0, len(examples), 50):
        ids, targets = collate([encoder(example) for example in examples[start : start + 50]])
        best = model(input_ids=ids, use_cache=False).logits.argmax(-1)
        right += int(((best == targets) | (targets < 0)).all(1).sum())
    return right / len(examples)


def json_examples(form: str, count: int, seed: int) -> list[Example]:
    """Held-out sums whose answer has this form, with SUM in the place of the sum."""
    name = next(iter(SUM_SCHEMA["properties"]))
    return [
        Example(
            "json_sum",
            [{"role": "user", "content": s.prompt}],
            form.replace("NAME", name).replace("SUM", str(s.a + s.b)),
        )
        for s in held_out_sums(count, seed)
    ]


def report(model: Qwen3ForCausalLM, encoder: ChatEncoder, count: int) -> str:
    """Accuracies on held-out examples: the sums in three forms of JSON, and the short tasks."""
    model.eval()
    forms = ('{"NAME":SUM}', '{"NAME": SUM}', '{\n "NAME": SUM\n}')
    by_name = {form: json_examples(form, count, seed=1) for form in forms}
    by_name |= {task: held_out(task, count, seed=1) for task in SHORT_TASKS}
    by_name["recall"] = held_out("recall", count // 4, seed=1)
    shares = {name: accuracy(model, encoder, examples) for name, examples in by_name.items()}
    model.train()
    return " ".join(f"{name!r} {share:.1%}" for name, share in shares.items())


def train(
    model: Qwen3ForCausalLM, encoder: ChatEncoder, out: Path, minutes: float, peak: float
) -> None:
    """Train until the time is used up."""
    # Not Muon: its bf16 products are slow on a processor without bf16 instructions.
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    step = tokens = pools = 0
    spent_s = 0.0
    next_export_s = 60 * EXPORT_MINUTES
    losses: list[float] = []
    while spent_s < 60 * minutes:
        pools += 1
        for batch in pool(encoder, SEED + pools, MIX, BATCH_TOKENS):
            started = time.monotonic()
            share = min(1.0, spent_s / (60 * minutes))
            scale = min(1.0, (step + 1) / WARM_UP_STEPS) * (0.5 + 0.5 * math.cos(math.pi * share))
            for group in optimizer.param_groups:
                group["lr"] = peak * scale
            loss = batch_loss(model, batch, bf16=False)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step, tokens = step + 1, tokens + batch[0].numel()
            spent_s += time.monotonic() - started
            losses.append(loss.item())
            if step % 50 == 0:
                rate = tokens / spent_s
                mean = sum(losses[-50:]) / 50
                print(
                    f"{spent_s / 60:.1f} min, step {step}, loss {mean:.4f}, {rate:.0f} tokens/s",
                    flush=True,
                )
            if spent_s > next_export_s:
                next_export_s += 60 * EXPORT_MINUTES
                export(model, out)
                print(report(model, encoder, 60), flush=True)
            if spent_s > 60 * minutes:
                break
    export(model, out)
    print(f"{step} steps, {tokens} tokens, {spent_s / 60:.1f} minutes")
    print(report(model, encoder, 200))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--start", type=Path, default=BUNDLED, help="the model folder to go on from"
    )
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--minutes", type=float, default=25.0, help="minutes of training")
    parser.add_argument("--peak", type=float, default=4e-4, help="the highest learning rate")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM.from_pretrained(args.start, dtype=torch.float32)
    encoder = ChatEncoder(build())
    print(report(model, encoder, 60), flush=True)
    train(model, encoder, args.out, args.minutes, args.peak)


if __name__ == "__main__":
    main()
