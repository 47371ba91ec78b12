"""All names of `nanocore.client`, which imports this module when one of them is first used."""

from nanocore.client.async_client import AsyncEngineClient
from nanocore.client.chat.events import ChatAnswer, ToolCall, collect
from nanocore.client.chat.renderer import RenderProcessError
from nanocore.client.connection.control_calls import EngineHealth
from nanocore.client.llm import LLM
from nanocore.client.requests.request_outputs import (
    CompletionOutput,
    EmbeddingOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    Resume,
)
from nanocore.client.requests.scoring import ScoreOutput
from nanocore.protocol.errors import (
    ClientStateError,
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    EngineDrainingError,
    EngineOverloadedError,
    EngineStartError,
    InvalidRequestError,
    KeyFileError,
    NanocoreError,
    ProtocolError,
)
from nanocore.protocol.messages import ModelCard
from nanocore.protocol.metrics import (
    Metric,
    MetricSample,
    RecentSteps,
    RequestPhases,
    Stats,
    StepColumns,
)
from nanocore.protocol.sampling import RepetitionDetectionParams, SamplingParams
from nanocore.protocol.structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncEngineClient",
    "ChatAnswer",
    "ClientStateError",
    "CompletionOutput",
    "ConfigError",
    "ContextLengthError",
    "EmbeddingOutput",
    "EngineDeadError",
    "EngineDrainingError",
    "EngineHealth",
    "EngineOverloadedError",
    "EngineStartError",
    "InvalidRequestError",
    "KeyFileError",
    "Logprob",
    "Metric",
    "MetricSample",
    "ModelCard",
    "NanocoreError",
    "ProtocolError",
    "RecentSteps",
    "RenderProcessError",
    "RepetitionDetectionParams",
    "RequestMetrics",
    "RequestOutput",
    "RequestPhases",
    "Resume",
    "SamplingParams",
    "ScoreOutput",
    "Stats",
    "StepColumns",
    "StructuredOutputsParams",
    "ToolCall",
    "collect",
]
