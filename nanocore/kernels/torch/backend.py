"""The reference as a backend; its parts are those of the interface."""

from __future__ import annotations

from nanocore.kernels.torch.attention import TorchAttention
from nanocore.kernels.torch.linear import TorchLinear
from nanocore.kernels.torch.sampling import TorchSampling
from nanocore.kernels.torch.states import TorchStates
from nanocore.kernels.torch.step import TorchStep


class TorchKernels(TorchLinear, TorchAttention, TorchStates, TorchSampling, TorchStep):
    """Implements `interface.Kernels`."""

    name: str = "torch"
    variant: str = ""
