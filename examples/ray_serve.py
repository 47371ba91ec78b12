"""Replicas on Ray Serve behind one address: each has an engine, and all routes of `nanocore serve`.

    pip install '.[engine,server]' 'ray[serve]'
    serve run --app-dir examples ray_serve:build model=path/to/folder num_replicas=2 max_num_seqs=64

What is not a setting of `build` is a flag of the engine. With max_replicas above num_replicas there
are as many as the load needs, and num_gpus reserves devices for each. NANOCORE_API_KEY in the
replicas' environment is asked of clients; without it, listen on loopback as Ray does by default.

A stream whose client leaves is aborted. An engine that dies is started again by its replica, a
replica that fails its health checks by Ray. A replica that goes answers what it has first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from ray import cloudpickle, serve

from nanocore.client import AsyncEngineClient
from nanocore.http.app import App
from nanocore.http.exchange import Receive, Scope, Send
from nanocore.http.server_settings import AppSettings

MAX_ONGOING_REQUESTS = 256
"""Of a replica, as many as an engine runs at once by default; others wait at Ray's proxy."""
TARGET_ONGOING_REQUESTS = 64
DRAIN_TIMEOUT_S = 120.0

# Replicas get what is here from who starts them: the file need not be where they are.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class EngineApp:
    """The HTTP application and its engine, which starts and ends with it: ASGI with lifespan."""

    def __init__(self, model: str | None, engine_args: Mapping[str, Any]) -> None:
        key = os.environ.get("NANOCORE_API_KEY")
        self._app = App(AppSettings(api_keys=(key,) if key else (), allowed_hosts=()))
        self.client = AsyncEngineClient.launch(model, **engine_args)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or live from the replica's start to its end."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        await receive()
        async with self.client:
            self._app.state.client = self.client
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application that `serve run` and a Serve config file name.

    Args:
        args: model, num_replicas, max_replicas, num_gpus and num_cpus of a replica, and engine
            flags as `AsyncEngineClient.launch` has them.
    """
    engine_args = dict(args)
    model = engine_args.pop("model", None)
    num_replicas = int(engine_args.pop("num_replicas", 1))
    max_replicas = int(engine_args.pop("max_replicas", num_replicas))
    resources = {name: float(engine_args.pop(name, 0)) for name in ("num_cpus", "num_gpus")}
    scaling: dict[str, Any] = {"num_replicas": num_replicas}
    if max_replicas > num_replicas:
        limits = {"min_replicas": num_replicas, "max_replicas": max_replicas}
        load = {"target_ongoing_requests": TARGET_ONGOING_REQUESTS}
        scaling = {"autoscaling_config": limits | load}

    @serve.deployment(
        name="nanocore",
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S,
        health_check_period_s=5,
        ray_actor_options=resources,
        **scaling,
    )
    @serve.ingress(lambda: EngineApp(model, engine_args))
    class Replica:
        async def check_health(self) -> None:
            """Raises EngineDeadError: the engine does not answer, nor does the next one."""
            await self.app.client.health()  # type: ignore[attr-defined]

    return Replica.bind()
