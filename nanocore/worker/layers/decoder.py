"""A decoder-only transformer: embedding, layers, norm and head, in the parts that one rank holds.

Families differ in how they read config.json (`DecoderModel.read`), in their layers
(`layer_class`), and in what their checkpoints call things. A pipeline stage holds a range of
layers; hidden states pass between stages with the residual added.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Protocol

from msgspec.structs import replace
from torch import Tensor

from nanocore.kernels.attention import Rotary
from nanocore.kernels.interface import Kernels
from nanocore.kernels.linear_weight import TokenEmbedding
from nanocore.kernels.states import LayerCache
from nanocore.kernels.step import BegunStep, StepRows
from nanocore.worker.config.config_json import ConfigReader
from nanocore.worker.config.json_settings import Settings
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.layers.attention import Attention
from nanocore.worker.layers.linear import StepContext, VocabParallelEmbedding
from nanocore.worker.layers.mlp import GatedMLP
from nanocore.worker.layers.moe import SparseMLP
from nanocore.worker.layers.norm import Norm, RMSNorm
from nanocore.worker.layers.packing import WeightPacker
from nanocore.worker.layers.rotary import rotary_table
from nanocore.worker.loading.weights import (
    EMBEDDING,
    HEAD,
    Entries,
    unbuffered_bytes,
    without_parts,
)
from nanocore.worker.memory.kv_memory import CacheSpec
from nanocore.worker.placement import Placement
from nanocore.worker.rank_messages import Quantization


class DecoderLayer:
    """Attention and MLP, each after a norm. The residual stream is apart, so that norms can add it.

    mixer: attention, or what a family has in its place.
    norm_class: of its norms, and of the one after the last layer. norms: their attributes, with
    checkpoints' names. sparse_mlp: the class of MLPs where the configuration has experts.
    """

    attention_class: ClassVar[type[Attention]] = Attention
    norm_class: ClassVar[type[Norm]] = RMSNorm
    norms: ClassVar[dict[str, str]] = {
        "input_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
    }
    sparse_mlp: ClassVar[type[SparseMLP]] = SparseMLP
    input_norm: Norm
    post_attention_norm: Norm
    mlp: GatedMLP | SparseMLP

    def __init__(self, placement: Placement, config: ModelConfig, layer: int) -> None:
        self.mixer = self.make_mixer(placement, config, layer)
        self.mlp = self.make_mlp(placement, config, layer)
        for attribute in self.norms:
            setattr(self, attribute, self.norm_class(placement, config, config.hidden_size))

    def make_mixer(self, placement: Placement, config: ModelConfig, layer: int) -> Any:
        """What mixes the layer's tokens: attention, or a class like it, with its attributes name
        (of its tensors), cache_spec (what it keeps) and pair_flops, and its public methods.
        """
        make_norm = partial(self.norm_class, placement, config)
        return self.attention_class(
            placement, config.attention, config.hidden_size, layer, make_norm
        )

    def make_mlp(
        self, placement: Placement, config: ModelConfig, layer: int
    ) -> GatedMLP | SparseMLP:
        if config.moe and layer in config.moe.sparse_layers:
            return self.sparse_mlp(placement, config.moe, config.mlp, config.hidden_size)
        return GatedMLP(placement, config.mlp, config.hidden_size)

    def entries(self, prefix: str) -> Entries:
        """Map the checkpoint's tensors with this prefix to this rank's parameters."""
        return {
            **self.mixer.entries(f"{prefix}{self.mixer.name}."),
            **self.mlp.entries(f"{prefix}mlp."),
            **self.norm_entries(prefix),
        }

    def pack(self, packer: WeightPacker) -> None:
        """Have the backend pack each weight as soon as it is filled; once."""
        self.mixer.pack(packer)
        self.mlp.pack(packer)

    def norm_entries(self, prefix: str) -> Entries:
        """Map the norms' tensors with this prefix."""
        entries = Entries()
        for attribute, name in self.norms.items():
            entries |= getattr(self, attribute).entries(f"{prefix}{name}")
        return entries

    def __call__(
        self, x_TE: Tensor, residual_TE: Tensor | None, cache: LayerCache, context: StepContext
    ) -> tuple[Tensor, Tensor]:
        """(what is to be added to the residual, the residual)."""
        x_TE, residual_TE = self.input_norm.add(x_TE, residual_TE, context.kernels)
        x_TE = self.mixer(x_TE, cache, context)
        x_TE, residual_TE = self.post_attention_norm.add(x_TE, residual_TE, context.kernels)
        return self.mlp(x_TE, context), residual_TE


class Predictor(Protocol):
    """A layer that guesses further tokens, see `MultiTokenPredictor`; its methods are there."""

    def normed_tokens(self, x_TE: Tensor, kernels: Kernels) -> Tensor: ...
    def follow(self, tokens_TE: Tensor, hidden_TE: Tensor, context: StepContext) -> None: ...


class DecoderModel:
    """One rank's part of the model, its parameters allocated and not yet filled.

    predictor: computes what it needs of each step; None: nobody guesses so. embedding_factor: of
    embeddings. logits_softcap: see `Kernels.logits`. hidden_factor: what the last norm's results
    are to be multiplied by, to be those of the checkpoint's model.

    Raises ConfigError: the model cannot be split as the placement asks.
    """

    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer
    embedding_factor = 1.0
    logits_softcap = 0.0
    hidden_factor = 1.0
    predictor: Predictor | None = None

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        self.config = config
        self.placement = placement
        self.layer_range = placement.stage_layers(config.num_layers)
        self.layers = [self.layer_class(placement, config, i) for i in self.layer_range]
        self.embedding = self._vocabulary(placement) if placement.is_first_stage else None
        self.head: VocabParallelEmbedding | None = None
        self.norm: Norm | None = None
        if placement.is_last_stage:
            tied = self.embedding if config.tie_word_embeddings else None
            self.head = tied or self._vocabulary(placement)
            self.norm = self._norm(placement)

    @classmethod
    def read(cls, reader: ConfigReader) -> ModelConfig:
        """Read the family's configuration.

        Raises ModelFileError: a setting that is missing, malformed or not implemented.
        """
        raise NotImplementedError

    @classmethod
    def translate(cls, settings: Settings) -> Settings:
        """Return config.json under the names that most families have; `common_name` of tensors."""
        return settings

    def entries(self) -> Entries:
        """Every tensor the checkpoint must hold; those of other stages have no parts here."""
        config, meta, entries = self.config, self.placement.on_meta(), Entries()

        def add(name: str, kept: Any, make: Callable[[Placement], Any]) -> None:
            # What other stages keep is made without memory, for the shapes of its tensors.
            found = (kept or make(meta)).entries(name)
            entries.update(found if kept else without_parts(found))

        ends = {EMBEDDING: self.embedding, HEAD: self.head}
        if config.tie_word_embeddings:  # one tensor, which the first and the last stage both keep
            ends = {EMBEDDING: self.embedding or self.head}
        for tensor, end in ends.items():
            add(tensor.removesuffix(".weight"), end, self._vocabulary)
        layers = dict(zip(self.layer_range, self.layers, strict=True))
        for i in range(config.num_layers):
            make_layer = partial(self.layer_class, config=config, layer=i)
            add(f"model.layers.{i}.", layers.get(i), make_layer)
        add("model.norm", self.norm, self._norm)
        return entries

    @property
    def cache_specs(self) -> list[CacheSpec]:
        return [layer.mixer.cache_spec for layer in self.layers]

    @classmethod
    def common_name(cls, stored: str) -> str | None:
        """Name that `entries` has for a checkpoint's tensor; None for one that no such model reads.

        Families whose checkpoints call things otherwise translate here. Models that were saved
        without a head leave "model." out, and old files hold the frequencies of the rotation.
        """
        if stored.startswith(("embed_tokens.", "layers.", "norm.")):
            stored = f"model.{stored}"
        return None if stored.endswith(".self_attn.rotary_emb.inv_freq") else stored

    def entry_name(self, stored: str) -> str | None:
        """Common name, or None for the head of a model whose head is the embedding."""
        name = self.common_name(stored)
        return None if name == HEAD and self.config.tie_word_embeddings else name

    def pack(self, packer: WeightPacker) -> None:
        """Have the backend pack each weight as soon as it is filled; once."""
        for layer in self.layers:
            layer.pack(packer)
        if self.head is not None:
            self.head.pack(packer)
        if self.embedding is not None and self.embedding is not self.head:
            # A tied matrix has the same values on the stage that only looks tokens up.
            if self.config.tie_word_embeddings:
                self.embedding.pack(packer)
            else:
                self.embedding.weight.pack(packer.embedding)

    def finish(self) -> None:
        """Called when all is filled and packed."""

    def rotary_tables(self, max_len: int) -> dict[str, Rotary]:
        """cos and sin for positions below max_len, by `AttentionConfig.rotation`."""
        config, dtype, device = self.config.attention, self.placement.dtype, self.placement.device
        return {
            name: rotary_table(
                None if name == "none" else config.rope[name], max_len, dtype, device
            )
            for name in dict.fromkeys(map(config.rotation, range(self.config.num_layers)))
        }

    def begin_step(self, rows: StepRows, kernels: Kernels) -> BegunStep:
        """Begin a step; only the first stage has hidden states then, embeddings times a factor."""
        shard, tokens = self.embedding, None
        if shard is not None:
            tokens = TokenEmbedding(
                shard.weight.packed, shard.first_token, self.embedding_factor, self.placement.dtype
            )
        begun, tp = kernels.begin_step(rows, tokens), self.placement.tp
        if begun.x_TE is None or tp.size == 1:
            return begun
        return replace(begun, x_TE=kernels.all_reduce(begun.x_TE, tp))

    def forward(
        self, x_TE: Tensor, caches: list[LayerCache], context: StepContext, sample_index_R: Tensor
    ) -> Tensor:
        """Hidden states after this stage's layers, [T, E]; writes K and V.

        On the last stage only those of the tokens that sample, normed, [R, E].
        """
        kernels, residual_TE = context.kernels, None
        tokens_TE = x_TE if self.predictor is None else self.predictor.normed_tokens(x_TE, kernels)
        for layer, cache in zip(self.layers, caches, strict=True):
            x_TE, residual_TE = layer(x_TE, residual_TE, cache, context)
        assert residual_TE is not None, "a stage has at least one layer"
        if self.norm is None:
            return kernels.add(x_TE, residual_TE)
        if self.predictor is None:
            return self.norm.select_add(x_TE, residual_TE, sample_index_R, kernels)
        hidden_TE, _ = self.norm.add(x_TE, residual_TE, kernels)
        self.predictor.follow(tokens_TE, hidden_TE, context)
        return kernels.select(hidden_TE, sample_index_R)

    def compute_logits(self, hidden_RE: Tensor, kernels: Kernels) -> Tensor:
        """Logits of this rank's tokens, float32 [R, V / tp], for rows that sample; last stage."""
        assert self.head is not None, "logits leave at the last stage"
        return kernels.logits(hidden_RE, self.head.weight.packed, self.logits_softcap)

    def _vocabulary(self, placement: Placement) -> VocabParallelEmbedding:
        return VocabParallelEmbedding(placement, self.config.vocab_size, self.config.hidden_size)

    def _norm(self, placement: Placement) -> Norm:
        return self.layer_class.norm_class(placement, self.config, self.config.hidden_size)


def fill_and_pack(
    model: DecoderModel,
    kernels: Kernels,
    fill: Callable[[Entries], object],
    quantization: Quantization | None = None,
) -> int:
    """Have all of a model's parameters filled and packed; returns the memory that they take.

    fill: fills all slices of these entries, and notifies their owners.
    """
    entries = model.entries()
    packer = WeightPacker(kernels, model.placement.dtype, quantization)
    model.pack(packer)
    fill(entries)
    model.finish()
    return packer.num_bytes + unbuffered_bytes(entries)
