"""ClientSession: a connection, the model's files, and its tokenizer, loaded on first use."""

from __future__ import annotations

from dataclasses import dataclass

from nanocore.client.connection.engine_connection import EngineConnection
from nanocore.client.connection.remote_files import RemoteFiles
from nanocore.client.connection.tokenizer_loader import TokenizerLoader
from nanocore.client.requests.request_stream import Leave


@dataclass(frozen=True, slots=True)
class ClientSession:
    """One session; the next engine may serve another model. leave: aborts a request in any
    session."""

    endpoint: str
    connection: EngineConnection
    files: RemoteFiles
    tokenizer: TokenizerLoader
    leave: Leave
