"""The part of a model that one rank computes: its layers, with the KV cache that they read.

The first stage embeds token ids; a later one receives hidden states. An earlier stage sends them
on; the last one makes logits of those that sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanocore.kernels.attention import Rotary
from nanocore.kernels.interface import Kernels
from nanocore.kernels.states import LayerCache
from nanocore.kernels.step import Replay, StepInputs
from nanocore.worker.communication.communicator import StageLinks
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.layers.linear import StepContext
from nanocore.worker.sampling.sampler import TokenSampler
from nanocore.worker.step.lanes import lane_memory


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
        self.kv_caches: list[LayerCache] = []
        self.rotary: dict[str, Rotary] = {}
        self.sampler: TokenSampler | None = None
        if model.head is not None:
            self.sampler = TokenSampler(
                model.head.first_token, model.config.vocab_size, model.placement.tp, kernels
            )
        self._received_TE: Tensor | None = None
        self._captured_TE: Tensor | None = None

    def capture(self, max_tokens: int, max_samples: int) -> Replay | None:
        """Capture `compute` where the backend can: see `Kernels.capture`."""
        if self.links.receive is not None:
            size, dtype = (max_tokens, self.model.config.hidden_size), self.model.placement.dtype
            self._received_TE = self._captured_TE = torch.empty(size, dtype=dtype)
        lanes = lane_memory(max_tokens)
        replay = self.kernels.capture(
            lambda inputs: self._logits(self._hidden(inputs, lanes)), max_tokens, max_samples
        )
        if replay is None or not lanes:
            return replay

        def replay_with_lanes(inputs: StepInputs) -> Tensor:
            for name, lane_T in inputs.lanes.items():
                lanes[name][: len(lane_T)] = lane_T
            return replay(inputs)

        return replay_with_lanes

    def receive(self, num_tokens: int) -> None:
        """Take a step's hidden states from the stage before, if there is one."""
        if self.links.receive is None:
            return
        size, dtype = (num_tokens, self.model.config.hidden_size), self.model.placement.dtype
        self._received_TE = self.links.receive.recv(size, dtype)
        if self._captured_TE is not None:
            self._received_TE = self._captured_TE[:num_tokens].copy_(self._received_TE)

    def send(self, hidden_TE: Tensor) -> None:
        """Hand a step's hidden states to the stage behind, if there is one."""
        if self.links.send is not None:
            self.links.send.send(hidden_TE)

    def compute(self, inputs: StepInputs) -> Tensor:
        """Compute a step's logits [R, V], or hidden states [T, E] on a stage before the last."""
        return self._logits(self.hidden(inputs))

    def hidden(self, inputs: StepInputs) -> Tensor:
        """Run the layers: hidden states, on the last stage of the tokens that sample, [R, E]."""
        return self._hidden(inputs, inputs.lanes)

    # From here on nothing but kernels: a capture sees nothing else.

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden) if self.model.placement.is_last_stage else hidden

    def _hidden(self, inputs: StepInputs, lanes: dict[str, Tensor]) -> Tensor:
        begun = self.model.begin_step(inputs.rows, self.kernels)
        x_TE = self._received_TE if begun.x_TE is None else begun.x_TE
        assert x_TE is not None, "hidden states are received before"
        context = StepContext(self.kernels, inputs.attention(begun), self.rotary, lanes)
        return self.model.forward(x_TE, self.kv_caches, context, inputs.sample_index_R)

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Return this rank's logits, [R, V]; there may be no rows."""
        if len(hidden_RE) == 0:
            assert self.model.head is not None, "logits leave at the last stage"
            return hidden_RE.new_empty(0, self.model.head.num_tokens, dtype=torch.float32)
        return self.model.compute_logits(hidden_RE, self.kernels)
