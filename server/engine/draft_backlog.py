"""DraftBacklog: at K = 0 the draft's forward is put off, and made up for in one forward of many steps' rows.

Stock vLLM runs it in every step, also where nothing is proposed, because it writes the draft's KV. Here a step that only
decodes at K = 0 leaves the inputs of that forward behind, and they are computed before anything can miss the KV:

- before a step of any other kind: one that proposes, prefills, or lacks a request of the one before, which has ended or was
  preempted. This is done at the step's begin, when no block has another owner's rows in it yet, so a late write lands in the
  block of its request or is overwritten before it is read;
- in a step that fills a block, where a KV connector may take it away;
- after `MAX_STEPS` steps.

The inputs are the target's alone, so what a swapped draft makes up for it computes with its own weights.

Shape letters: N requests, S steps held, R = N * S rows, one request's after the other's, X width of an aux row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from server.engine.step_clock import decode_kind

MAX_STEPS = 16
"""By then the draft's weights are read once for many rows, and making up for them still takes less than a step."""


class HeldStep(NamedTuple):
    """Inputs of the draft's forward for one row of each request."""

    next_token_ids_N: torch.Tensor
    positions_N: torch.Tensor
    slots_N: torch.Tensor
    """Where in the cache each row's KV goes."""
    aux_NX: torch.Tensor


class DraftBacklog:
    """Shadows `execute_model` and `propose_draft_token_ids` of one V1 runner on a CPU."""

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner = runner
        self._steps: list[HeldStep] = []
        """All of the same requests in the same order."""
        self._request_ids: list[str] = []
        self._metadata: CommonAttentionMetadata | None = None
        """Of the last step held; its block table stays as it is until the next step begins."""
        self._block_size = runner.cache_config.block_size if runner.vllm_config.kv_transfer_config is not None else None
        self._execute_model = runner.execute_model
        self._propose = runner.propose_draft_token_ids
        runner.execute_model = self._shadow_execute_model
        runner.propose_draft_token_ids = self._shadow_propose

    @staticmethod
    def suits(runner: Any) -> bool:
        """Whether this runner's draft takes one row for each of the target's, in a forward that no other process waits for.

        On a GPU it stays as vLLM has it: there every step would wait for the device to tell what may be put off.
        """
        if not isinstance(runner, GPUModelRunner) or runner.speculative_config is None:
            return False
        return (
            runner.device.type == "cpu"
            and runner.speculative_config.method == "eagle3"
            and runner.use_aux_hidden_state_outputs
            and not runner.use_async_scheduling
            and not runner.speculative_config.disable_padded_drafter_batch
            and not runner.drafter.needs_extra_input_slots
            and not runner.uses_mrope
            and not runner.drafter.uses_mrope
            and runner.parallel_config.data_parallel_size == 1
        )

    @torch.inference_mode()
    def write(self) -> None:
        """Run the draft's forward for all rows held, which writes their KV."""
        if self._metadata is None:
            return
        steps, self._steps, metadata, self._metadata = self._steps, [], self._metadata, None
        next_token_ids_NS, positions_NS, slots_NS, aux_NSX = (torch.stack(rows, dim=1) for rows in zip(*steps, strict=True))
        num_rows = next_token_ids_NS.numel()
        starts = torch.arange(0, num_rows + 1, len(steps), dtype=metadata.query_start_loc.dtype)
        self._runner.drafter.propose(
            num_speculative_tokens=0,
            # The drafter moves token ids up by one row and puts the next token into each request's last.
            target_token_ids=next_token_ids_NS.flatten().roll(1),
            target_positions=positions_NS.flatten(),
            target_hidden_states=aux_NSX.flatten(0, 1),
            next_token_ids=next_token_ids_NS[:, -1],
            token_indices_to_sample=None,
            common_attn_metadata=replace(
                metadata,
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=(positions_NS[:, -1] + 1).to(metadata.seq_lens.dtype),
                num_actual_tokens=num_rows,
                max_query_len=len(steps),
                slot_mapping=slots_NS.flatten(),
                positions=positions_NS.flatten(),
            ),
            sampling_metadata=self._runner.input_batch.sampling_metadata,
        )

    def _shadow_execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._goes_on_in(scheduler_output):
            self.write()
        return self._execute_model(scheduler_output, *args, **kwargs)

    def _shadow_propose(
        self,
        scheduler_output: Any,
        sampled_token_ids: torch.Tensor,
        sampling_metadata: Any,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor],
        spec_decode_metadata: Any,
        common_attn_metadata: CommonAttentionMetadata,
        slot_mappings: Any,
    ) -> Any:
        num_requests = self._runner.input_batch.num_reqs
        if not _decodes_plainly(scheduler_output) or self._runner.discard_request_mask.np[:num_requests].any():
            return self._propose(
                scheduler_output,
                sampled_token_ids,
                sampling_metadata,
                hidden_states,
                sample_hidden_states,
                aux_hidden_states,
                spec_decode_metadata,
                common_attn_metadata,
                slot_mappings,
            )
        self._hold(sampled_token_ids[:, 0], aux_hidden_states, common_attn_metadata)
        return sampled_token_ids.new_empty(num_requests, 0)

    def _hold(self, next_token_ids_N: torch.Tensor, aux: list[torch.Tensor], metadata: CommonAttentionMetadata) -> None:
        num_requests = len(next_token_ids_N)
        step = HeldStep(
            next_token_ids_N.to(torch.int32),
            self._runner.positions[:num_requests].clone(),
            metadata.slot_mapping[:num_requests].clone(),
            torch.cat([rows[:num_requests] for rows in aux], dim=-1),
        )
        # Near the longest context vLLM leaves the draft out for all requests. One forward takes consecutive rows only.
        if self._steps and int(step.positions_N[0]) != int(self._steps[-1].positions_N[0]) + 1:
            self.write()
        self._steps.append(step)
        self._request_ids = list(self._runner.input_batch.req_ids)
        self._metadata = metadata
        if self._is_full() or self._fills_block(step.positions_N):
            self.write()

    def _is_full(self) -> bool:
        num_rows = (len(self._steps) + 1) * len(self._request_ids)
        return len(self._steps) == MAX_STEPS or num_rows > self._runner.drafter.max_num_tokens

    def _fills_block(self, positions_N: torch.Tensor) -> bool:
        return self._block_size is not None and bool(((positions_N + 1) % self._block_size == 0).any())

    def _goes_on_in(self, scheduler_output: Any) -> bool:
        """Whether a step decodes one more row of the same requests, in the same blocks."""
        return (
            _decodes_plainly(scheduler_output)
            and scheduler_output.num_scheduled_tokens.keys() == set(self._request_ids)
            and not scheduler_output.scheduled_cached_reqs.resumed_req_ids
        )


def _decodes_plainly(scheduler_output: Any) -> bool:
    """A step of one row for each request, none of them new, that verifies nothing and proposes nothing."""
    kind = decode_kind(scheduler_output)
    return kind is not None and kind[1] == 0
