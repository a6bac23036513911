"""Adapter for vLLM's V1 model runner (the CPU's), vllm/v1/worker/gpu_model_runner.py."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from server.engine.step_view import StepView

NAME = "v1"


def is_runner(runner: Any) -> bool:
    return isinstance(runner, GPUModelRunner)


def step_view(runner: Any) -> StepView | None:
    """The step between `execute_model` and `sample_tokens`; None where nothing awaits sampling."""
    state = runner.execute_model_state
    if state is None:
        return None
    batch = runner.input_batch
    request_ids = list(batch.req_ids[: batch.num_reqs])
    scheduled = state.scheduler_output.num_scheduled_tokens
    num_rows = [scheduled[request_id] for request_id in request_ids]
    total = sum(num_rows)
    metadata = state.spec_decode_metadata
    num_proposed = list(metadata.num_draft_tokens) if metadata is not None else [0] * len(request_ids)
    return StepView(
        request_ids=request_ids,
        first_positions_N=torch.from_numpy(batch.num_computed_tokens_cpu[: batch.num_reqs]),
        num_rows=num_rows,
        num_proposed=num_proposed,
        token_ids_R=runner.input_ids.gpu[:total],
        aux_A_RD=[aux[:total] for aux in state.aux_hidden_states or []],
        hidden_RD=state.hidden_states[:total],
    )
