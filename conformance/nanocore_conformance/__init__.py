"""Conformance: the protocol's test vectors, and checks of engines and clients that are not ours.

Imports `nanocore.protocol` only. What it sends is built from plain maps, what it receives is judged
by the typed decoder; so it can be run against a peer in any language, and without torch or numpy.
"""

__version__ = "0.1.0"
