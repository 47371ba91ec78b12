"""The layers that decoder models are built from, each holding one rank's share of its weights.

Layers are plain objects with tensors that are called; what changes from step to step (the kernels'
metadata and the KV cache) is passed in. `entries` says where a checkpoint's tensors go. Shape
suffixes: see `nanocore.kernels.interface`.
"""
