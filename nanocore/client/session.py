"""Session: a connection, and what is read over it."""

from __future__ import annotations

from dataclasses import dataclass

from nanocore.client.connection import EngineConnection
from nanocore.client.model_files import ModelFiles
from nanocore.client.stream import Leave
from nanocore.client.tokenizer_loader import TokenizerLoader


@dataclass(frozen=True, slots=True)
class Session:
    """Another engine may serve another model. leave: for who gives up a request, wherever it is."""

    endpoint: str
    connection: EngineConnection
    files: ModelFiles
    tokenizer: TokenizerLoader
    leave: Leave
