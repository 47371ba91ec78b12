"""nanocore: an LLM inference engine with vLLM V1's architecture, at a size one can read.

This file stays empty of imports so that `import nanocore.client` never pulls in torch:
users start at `nanocore.client`, operators at the `nanocore-engine` command.
"""

__version__ = "0.1.0"
