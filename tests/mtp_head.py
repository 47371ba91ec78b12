"""Tiny checkpoints with an MTP head, and what such a head guesses by transformers' layers.

transformers does not have the head itself. The layer is put in place of one of the model's own, so
that it is loaded as those are; the rest is written here.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

PREFIX = "mtp."
LAYER = f"{PREFIX}layers.0."


def attention_layer(tensors: dict[str, Tensor]) -> str:
    """Prefix of the last layer that has attention."""
    named = [name for name in tensors if ".self_attn.q_proj." in name and name[:4] != PREFIX]
    return named[-1].split("self_attn.")[0]


def add_mtp_head(folder: Path, noise: float = 0.3) -> Path:
    """Write a head to a model's folder: a layer like its last one with attention, with noise."""
    path, generator = folder / "model.safetensors", torch.Generator().manual_seed(3)
    tensors = load_file(path)

    def draw(*shape: int, scale: float) -> Tensor:
        return scale * torch.randn(shape, generator=generator)

    layer = attention_layer(tensors)
    for name in [name for name in tensors if name.startswith(layer)]:
        own = tensors[name]
        scale = float(own.std().nan_to_num()) * noise
        tensors[LAYER + name.removeprefix(layer)] = own + draw(*own.shape, scale=scale).to(own)
    size = tensors[f"{layer}input_layernorm.weight"].shape[0]
    fc = torch.cat((torch.eye(size) / 2, torch.eye(size)), 1)
    tensors[f"{PREFIX}fc.weight"] = fc + draw(size, 2 * size, scale=0.1 * noise)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"{PREFIX}{name}.weight"] = draw(size, scale=0.2)
    save_file(tensors, path, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings.get("text_config", settings)["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


class Oracle:
    """A head beside transformers' model of a folder, in float32; scratch: an empty folder."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        self._own = {name: x for name, x in tensors.items() if name.startswith(PREFIX)}
        layer = attention_layer(tensors)
        shutil.copytree(folder, scratch, dirs_exist_ok=True)
        others = {name: x for name, x in tensors.items() if not name.startswith((PREFIX, layer))}
        moved = {
            layer + name.removeprefix(LAYER): x
            for name, x in self._own.items()
            if name.startswith(LAYER)
        }
        save_file(others | moved, scratch / "model.safetensors", {"format": "pt"})
        self._model = _load(folder)
        self._layer = _load(scratch).model.layers[int(layer.split(".")[-2])]

    @torch.inference_mode()
    def drafts(self, known: list[int], count: int, starts: tuple[int, ...] = ()) -> list[list[int]]:
        """Drafts behind these tokens, and of each the tokens that are about as good.

        starts: tokens that had no hidden state of the one before, besides the first.
        """
        model, eps = self._model.model, self._model.config.rms_norm_eps

        def norm(x: Tensor, name: str) -> Tensor:
            weight = 1 + self._own[f"{PREFIX}{name}.weight"].float()
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

        def join(tokens: Tensor, before: Tensor) -> Tensor:
            tokens = norm(model.embed_tokens(tokens), "pre_fc_norm_embedding")
            both = torch.cat((tokens, norm(before, "pre_fc_norm_hidden")), -1)
            return linear(both, self._own[f"{PREFIX}fc.weight"].float())

        token_ids = torch.tensor(known)
        hidden = model(token_ids[None]).last_hidden_state[0]
        rows = join(token_ids, hidden.roll(1, 0))
        rows[[0, *starts]] = 0
        chosen = []
        for _ in range(count):
            positions = torch.arange(len(rows))[None]
            has_axes = hasattr(model.rotary_emb, "mrope_section")  # those of images
            axes = positions.expand(3, 1, -1) if has_axes else positions
            turned = model.rotary_emb(rows[None], axes)
            out = self._layer(rows[None], position_embeddings=turned, position_ids=positions)
            last = norm(out[0, -1], "norm")
            logits = self._model.lm_head(last)
            good = (logits > logits.max() - 1e-3).nonzero()[:, 0]
            chosen.append(good.tolist())
            rows = torch.cat((rows, join(logits.argmax()[None], last[None])))
        return chosen


def _load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
