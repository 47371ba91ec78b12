"""vLLM's executor without a model: the peer half of http_server.py.

    python -m vllm.entrypoints.openai.api_server --distributed-executor-backend http_vllm.NoModel …

Runs in an interpreter that has vLLM 0.32, and imports nothing of nanocore. Answers each step with
one token of `no_model.token_ids` for each request whose prompt is done, at the pace of its file.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch
from no_model import Pace, token_ids
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput

_SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
_NUM_LAYERS, _NUM_BLOCKS = 5, 65_536


class NoModel(Executor):
    """Computes nothing."""

    supported_tasks = ("generate",)

    def _init_executor(self) -> None:
        self._pace, self._token_ids = Pace(), token_ids()
        self._num_prompt_tokens: dict[str, int] = {}

    def execute_model(self, plan: SchedulerOutput, non_block: bool = False) -> Any:
        """The step's tokens, or a future that has them."""
        self._pace.wait()
        for request_id in plan.finished_req_ids:
            self._num_prompt_tokens.pop(request_id, None)
        computed = dict(
            zip(
                plan.scheduled_cached_reqs.req_ids,
                plan.scheduled_cached_reqs.num_computed_tokens,
                strict=True,
            )
        )
        for new in plan.scheduled_new_reqs:
            self._num_prompt_tokens[new.req_id] = len(new.prompt_token_ids)
            computed[new.req_id] = new.num_computed_tokens
        sampled: list[list[int]] = []
        for request_id, start in computed.items():
            end = start + plan.num_scheduled_tokens[request_id]
            is_done = end >= self._num_prompt_tokens[request_id]
            sampled.append([self._token_ids[end % len(self._token_ids)]] if is_done else [])
        names = list(computed)
        rows = {name: row for row, name in enumerate(names)}
        output = ModelRunnerOutput(req_ids=names, req_id_to_index=rows, sampled_token_ids=sampled)
        if not non_block:
            return output
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(output)
        return future

    def get_kv_cache_specs(self) -> list[dict[str, FullAttentionSpec]]:
        return [{f"model.layers.{i}.self_attn.attn": _SPEC for i in range(_NUM_LAYERS)}]

    def determine_available_memory(self) -> list[int]:
        return [_SPEC.page_size_bytes * _NUM_LAYERS * _NUM_BLOCKS]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["LBNHC"]]

    def set_kv_cache_layout(self, layout_name: str) -> None: ...

    def initialize_from_config(self, kv_cache_configs: object) -> None: ...

    def compile_or_warm_up_model(self) -> None: ...

    def collective_rpc(self, *arguments: object, **options: object) -> list[None]:
        return [None]

    def check_health(self) -> None: ...

    def shutdown(self) -> None: ...

    def supports_draft_weight_updates(self) -> bool:
        return False
