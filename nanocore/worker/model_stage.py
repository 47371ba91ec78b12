"""The part of a model that one rank computes: its layers, with the KV cache that they read.

The first stage embeds token ids; a later one receives hidden states. An earlier stage sends them
on; the last one makes logits of those that sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanocore.kernels.attention import AttentionMetadata, KVCache, Rotary
from nanocore.kernels.interface import Kernels
from nanocore.kernels.step import StepRows
from nanocore.worker.batch.batch_step import StepInputs
from nanocore.worker.communication.communicator import StageLinks
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.layers.linear import StepContext
from nanocore.worker.sampling.output_computer import OutputComputer, Sampled
from nanocore.worker.sampling.requested_outputs import RequestedOutputs
from nanocore.worker.sampling.sampler import TokenSampler


class ModelStage:
    """Computes steps' hidden states and logits, on the host or on the device's current stream.

    Args:
        model: its weights loaded. kernels: the backend. links: to neighbouring stages.

    sampler: None on a stage that does not sample. kv_caches: of the layers; none until there is KV
    memory. rotary: tables by kind of layer.
    """

    def __init__(self, model: DecoderModel, kernels: Kernels, links: StageLinks) -> None:
        self.model = model
        self.kernels = kernels
        self.links = links
        self.kv_caches: list[KVCache] = []
        self.rotary: dict[str, Rotary] = {}
        self.sampler: TokenSampler | None = None
        if model.head is not None:
            self.sampler = TokenSampler(
                model.head.first_token, model.config.vocab_size, model.placement.tp, kernels
            )

    def begin_step(self, rows: StepRows) -> tuple[Tensor, Tensor | None]:
        """See `Kernels.begin_step`; hidden states are None on a stage that receives them."""
        return self.model.begin_step(rows, self.kernels)

    def hidden(
        self, token_ids_T: Tensor, metadata: AttentionMetadata, sample_index_R: Tensor
    ) -> Tensor | None:
        """Embed tokens, if this is the first stage, and run its layers: see `forward`."""
        x_TE = None
        if self.links.receive is None:
            x_TE = self.model.embed(token_ids_T, self.kernels)
        return self.forward(x_TE, metadata, sample_index_R)

    def forward(
        self, x_TE: Tensor | None, metadata: AttentionMetadata, sample_index_R: Tensor
    ) -> Tensor | None:
        """Return hidden states [R, E] of the tokens that sample; None if none does, or not here.

        x_TE: the first stage's embeddings. Hidden states come from and go to other stages.
        """
        if self.links.receive is not None:
            shape = len(metadata.positions_T), self.model.config.hidden_size
            x_TE = self.links.receive.recv(shape, self.model.placement.dtype)
        assert x_TE is not None, "the first stage embeds tokens"
        hidden = self._run_layers(x_TE, metadata, sample_index_R)
        if self.links.send is not None:
            self.links.send.send(hidden)
        if not self.model.placement.is_last_stage or len(sample_index_R) == 0:
            return None
        return hidden

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Return this rank's logits, [R, V]; there may be no rows."""
        if len(hidden_RE) == 0:
            assert self.model.head is not None, "logits leave at the last stage"
            return hidden_RE.new_empty(0, self.model.head.num_tokens, dtype=torch.float32)
        return self.model.compute_logits(hidden_RE, self.kernels)

    def compute_logits(
        self, token_ids_T: Tensor, metadata: AttentionMetadata, sample_index_R: Tensor
    ) -> Tensor | None:
        """Compute a step's logits, kernel by kernel; None as in `forward`."""
        hidden = self.hidden(token_ids_T, metadata, sample_index_R)
        return None if hidden is None else self.logits(hidden)

    def compute_logits_and_hidden(
        self, inputs: StepInputs, requested: RequestedOutputs
    ) -> tuple[Tensor, Tensor]:
        """Compute a step's logits [R, V], and the hidden states [N, E] that outputs need."""
        num_samples = len(inputs.sample_index_R)
        index = requested.hidden_index(torch.from_numpy(requested.column))
        hidden = self.hidden(
            inputs.token_ids_T, inputs.attention, torch.cat((inputs.sample_index_R, index))
        )
        assert hidden is not None, "there are rows"
        return self.logits(hidden[:num_samples]), hidden[num_samples:]

    def compute_requested(
        self, requested: RequestedOutputs, column: Tensor, sampled: Sampled, token_table: Tensor
    ) -> dict[str, Tensor]:
        """Compute requested log probabilities and embeddings: see `RequestedOutputs`."""
        assert self.sampler is not None, "the last stage samples"
        computer = OutputComputer(self.sampler, self.logits, self.model.hidden_factor)
        return computer.compute(requested, column, sampled, token_table)

    def capturable_part(
        self, x_TE: Tensor | None, token_ids_T: Tensor, metadata: AttentionMetadata, index_R: Tensor
    ) -> Tensor:
        """Run what can be captured: between receiving hidden states and sending or sampling."""
        # Nothing but kernels: a capture sees nothing else.
        x_TE = self.model.embed(token_ids_T, self.kernels) if x_TE is None else x_TE
        hidden = self._run_layers(x_TE, metadata, index_R)
        return hidden if self.links.send else self.model.compute_logits(hidden, self.kernels)

    def _run_layers(
        self, x_TE: Tensor, metadata: AttentionMetadata, sample_index_R: Tensor
    ) -> Tensor:
        context = StepContext(self.kernels, metadata, self.rotary)
        return self.model.forward(x_TE, self.kv_caches, context, sample_index_R)
