"""The operations a model is made of: one interface, several backends, tested against each other.

Import `nanocore.kernels.backend` to choose one. Backends are chosen by what the machine can do and
named in the engine's log; `torch` is the reference that the others are compared with.
"""
