"""Resources that no two engines can share: the endpoints, and the step trace's file.

An engine claims them before anything that costs time and memory, so that one in use is reported at
once; a standby claims them when it takes over.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.io.limits import ClientLimit
from nanocore.engine_core.log.trace import StepTrace
from nanocore.protocol.endpoint import TcpAddress
from nanocore.protocol.sockets.engine_socket import EngineSocket, bind_engine_socket
from nanocore.system.endpoint_lock import EndpointLock
from nanocore.worker.devices import select_device

if TYPE_CHECKING:
    from nanocore.engine_core.io.kv_event_publisher import KVEventPublisher

logger = logging.getLogger(__name__)


class ClaimedResources(NamedTuple):
    """socket: bound. publisher: of KV events, bound and not started. trace: step trace."""

    socket: EngineSocket
    publisher: KVEventPublisher | None
    trace: StepTrace | None


def claim_resources(
    config: EngineConfig, stack: ExitStack, lock: EndpointLock | None = None
) -> ClaimedResources:
    """Claim the endpoints and files that the configuration names. lock: the endpoint's, if held.

    Raises:
        StartError: somebody else has it, or it cannot be had.
    """
    socket = _engine_socket(config, stack, lock)
    publisher = trace = None
    if config.kv_events_endpoint is not None:
        from nanocore.engine_core.io.kv_event_publisher import KVEventPublisher  # rarely used

        publisher = KVEventPublisher(
            config.kv_events_endpoint,
            config.kv_events_replay_endpoint,
            config.kv_events_topic,
            medium="GPU" if select_device(config.device).type == "cuda" else "CPU",
        )
        stack.callback(publisher.close)
    if config.step_trace:
        trace = StepTrace(config.step_trace)
        stack.callback(trace.close)
    return ClaimedResources(socket, publisher, trace)


def _engine_socket(
    config: EngineConfig, stack: ExitStack, lock: EndpointLock | None
) -> EngineSocket:
    """Bind the engine's socket and guard its endpoint. Clients that connect now wait."""
    keys = None
    address = config.address
    if isinstance(address, TcpAddress):
        assert config.curve_dir is not None, "the configuration was checked"
        from nanocore.protocol.sockets.curve import EngineKeys  # imports zmq

        keys = EngineKeys.load(Path(config.curve_dir))
        if address.is_every_interface:
            logger.warning(
                "%s is reachable from every network of this machine; only clients with a key in %s "
                "are served",
                config.endpoint,
                keys.clients,
            )
    else:
        stack.callback((lock or EndpointLock(config.endpoint)).release)
    socket = stack.enter_context(closing(bind_engine_socket(config.endpoint, keys)))
    ClientLimit.of_this_process(config.max_num_clients)  # an error is told before the load
    return socket
