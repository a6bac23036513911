"""Adapter for vLLM's V2 model runner (CUDA's default), vllm/v1/worker/gpu/model_runner.py."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from server.engine.step_view import StepView

NAME = "v2"


def is_runner(runner: Any) -> bool:
    return isinstance(runner, GPUModelRunner)


def step_view(runner: Any) -> StepView | None:
    """The step between `execute_model` and `sample_tokens`; None where this rank has no hidden rows."""
    state = runner.execute_model_state
    if state is None or state.hidden_states is None:
        return None
    batch = state.input_batch
    num_reqs = batch.num_reqs
    drafts = batch.num_draft_tokens_per_req
    total = int(batch.query_start_loc_np[num_reqs])
    return StepView(
        request_ids=list(batch.req_ids[:num_reqs]),
        # Not `num_computed_tokens_np`: under async scheduling it still counts the last step's rejected proposals.
        first_positions_N=batch.positions[batch.query_start_loc[:num_reqs]],
        num_rows=(batch.query_start_loc_np[1 : num_reqs + 1] - batch.query_start_loc_np[:num_reqs]).tolist(),
        num_proposed=drafts[:num_reqs].tolist() if drafts is not None else [0] * num_reqs,
        token_ids_R=batch.input_ids[:total],
        aux_A_RD=[aux[:total] for aux in state.aux_hidden_states or []],
        hidden_RD=state.hidden_states[:total],
    )
