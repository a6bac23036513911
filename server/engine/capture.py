"""Capture: shadows one model runner's `execute_model` and `sample_tokens`, counts acceptance, times steps, copies sampled rows.

The runner's instance is shadowed, not its class: it holds for every executor and both runners. Between `execute_model`
and `sample_tokens` the step's hidden rows, proposals and request ids are all there; after `sample_tokens` the verdict is.

Shape letters: N requests, R selected rows, A aux layers, D target hidden size.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from server.config import EnginePartsConfig
from server.engine import runner_v1, runner_v2
from server.engine.acceptance import AcceptanceCounter
from server.engine.channel import CaptureChannel, CapturedStep, describe
from server.engine.host_rows import HostRows
from server.engine.mends import shielded_generators
from server.engine.requests import RequestBook, RequestInfo, is_selected
from server.engine.step_clock import StepClock
from server.engine.step_view import StepView
from wire.messages import CaptureSpan, CaptureStep, EngineStats
from wire.spec import SCHEMA_VERSION, CaptureSpec


class PendingSpan(NamedTuple):
    """One request of the step in flight, as known before the verdict."""

    row: int
    info: RequestInfo
    num_rows: int
    num_proposed: int
    proposer: int
    is_captured: bool


class PendingStep(NamedTuple):
    """The step in flight, as known before the verdict."""

    spans: list[PendingSpan]
    rows: HostRows | None
    """First positions of all requests [N], then token ids [R], aux [R, A * D] and hidden [R, D] of the captured spans."""
    finished_ids: list[str]
    target_version: int


class Capture:
    """The capture part of one worker. `versions` tells (draft, target) where weights change: the weight engine."""

    def __init__(
        self,
        runner: Any,
        config: EnginePartsConfig,
        spec: CaptureSpec,
        max_depth: int,
        versions: Callable[[], tuple[int, int]],
        *,
        publishes: bool,
    ) -> None:
        self._runner = runner
        self._config = config
        self._spec = spec
        self._versions = versions
        self._adapter = next(adapter for adapter in (runner_v1, runner_v2) if adapter.is_runner(runner))
        self._requests = RequestBook()
        self._acceptance = AcceptanceCounter(max_depth)
        self._step_clock = StepClock()
        self._step = 0
        self.epoch = uuid.uuid4().hex[:12]
        self.rate = config.capture.rate if config.capture.enabled else 0.0
        # One tensor-parallel rank publishes: hidden rows are the same on all of them.
        self._channel = CaptureChannel(config, self._stats) if publishes else None
        self._execute_model = runner.execute_model
        self._sample_tokens = runner.sample_tokens
        runner.execute_model = self._shadow_execute_model
        runner.sample_tokens = self._shadow_sample_tokens

    @property
    def runner_name(self) -> str:
        return str(self._adapter.NAME)

    def set_rate(self, rate: float) -> None:
        """Share of requests to capture, 0 to 1; it stays 0 where capture is off."""
        self.rate = rate if self._config.capture.enabled else 0.0

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _shadow_execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._step_clock.begin(scheduler_output)
        self._requests.note(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens == 0:
            # No sampling follows: without this, the last requests before an idle time would never be reported as finished.
            self._offer_finished()
        return self._execute_model(scheduler_output, *args, **kwargs)

    def _shadow_sample_tokens(self, grammar_output: Any) -> Any:
        view = self._adapter.step_view(self._runner)
        pending = self._before(view) if view is not None else None
        with shielded_generators(self._runner) if self._adapter is runner_v1 else nullcontext():
            output = self._sample_tokens(grammar_output)
        if view is None or pending is None:
            return output
        draft_version, _ = self._versions()
        for request_id in view.request_ids:
            self._requests.proposer[request_id] = draft_version
        if isinstance(output, AsyncModelRunnerOutput):
            return _CapturedOutput(output, lambda sampled: self._after(pending, sampled))
        self._after(pending, output.sampled_token_ids)
        return output

    def _before(self, view: StepView) -> PendingStep:
        draft_version, target_version = self._versions()
        spans: list[PendingSpan] = []
        selected: list[slice] = []
        start = 0
        for index, request_id in enumerate(view.request_ids):
            num_rows = view.num_rows[index]
            info = self._requests.get(request_id)
            if info is not None:
                is_captured = self._channel is not None and info.allows_capture and is_selected(info.base_id, self.rate)
                proposer = self._requests.proposer.get(request_id, draft_version)
                spans.append(PendingSpan(index, info, num_rows, view.num_proposed[index], proposer, is_captured))
                if is_captured:
                    selected.append(slice(start, start + num_rows))
            start += num_rows
        rows = _copy_rows(view, selected) if selected else None
        return PendingStep(spans, rows, self._requests.take_finished(), target_version)

    def _after(self, pending: PendingStep, sampled: list[list[int]]) -> None:
        """Count the verdict and hand the captured spans over. Under async scheduling this is the output thread."""
        for span in pending.spans:
            if span.num_proposed:
                num_accepted = max(len(sampled[span.row]) - 1, 0)
                self._acceptance.add(span.proposer, span.info.tenant, span.info.domain, span.num_proposed, num_accepted)
        if pending.rows is not None or pending.finished_ids:
            self._offer(pending, sampled)

    def _offer_finished(self) -> None:
        finished_ids = self._requests.take_finished()
        if finished_ids:
            self._offer(PendingStep([], None, finished_ids, self._versions()[1]), [])

    def _offer(self, pending: PendingStep, sampled: list[list[int]]) -> None:
        if self._channel is not None and self.rate > 0.0:
            self._step += 1
            self._channel.offer(self._captured_step(pending, sampled))

    def _captured_step(self, pending: PendingStep, sampled: list[list[int]]) -> CapturedStep:
        first_positions: list[int] = []
        token_ids: list[int] = []
        tensors = self._no_rows()
        if pending.rows is not None:
            first_positions_N, token_ids_R, *hidden_rows = pending.rows.get()
            first_positions, token_ids, tensors = first_positions_N.tolist(), token_ids_R.tolist(), tuple(hidden_rows)
        spans, start = [], 0
        for span in pending.spans:
            if span.is_captured:
                row_ids = token_ids[start : start + span.num_rows]
                spans.append(_capture_span(span, first_positions[span.row], row_ids, list(sampled[span.row])))
                start += span.num_rows
        message = CaptureStep(
            schema_version=SCHEMA_VERSION,
            spec=self._spec,
            engine_id=self._config.engine_id,
            engine_epoch=self.epoch,
            step=self._step,
            target_version=pending.target_version,
            captured_at_s=time.time(),
            spans=spans,
            finished_ids=pending.finished_ids,
            tensors=describe(tensors),
        )
        return CapturedStep(message, tensors)

    def _no_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = getattr(torch, self._spec.dtype)
        width = self._spec.hidden_size
        return torch.empty(0, len(self._spec.aux_layer_ids) * width, dtype=dtype), torch.empty(0, width, dtype=dtype)

    def _stats(self, num_captured_rows: int, num_dropped_rows: dict[str, int]) -> EngineStats:
        draft_version, target_version = self._versions()
        return EngineStats(
            schema_version=SCHEMA_VERSION,
            engine_id=self._config.engine_id,
            engine_epoch=self.epoch,
            sent_at_s=time.time(),
            draft_version=draft_version,
            target_version=target_version,
            capture_rate=self.rate,
            acceptance=self._acceptance.snapshot(),
            num_captured_rows=num_captured_rows,
            num_dropped_rows=num_dropped_rows,
            step_times=self._step_clock.snapshot(),
        )


class _CapturedOutput(AsyncModelRunnerOutput):
    """An async output that reports the verdict once it has reached the host."""

    def __init__(self, inner: AsyncModelRunnerOutput, report: Callable[[list[list[int]]], None]) -> None:
        self._inner = inner
        self._report = report

    def get_output(self) -> ModelRunnerOutput:
        output = self._inner.get_output()
        self._report(output.sampled_token_ids)
        return output


def _copy_rows(view: StepView, selected: list[slice]) -> HostRows:
    """Clones of all first positions [N] and of the selected rows: token ids [R], aux [R, A * D], hidden [R, D]."""
    positions = view.first_positions_N.clone()
    total = view.hidden_RD.shape[0]
    if sum(rows.stop - rows.start for rows in selected) == total:
        return HostRows(positions, view.token_ids_R.clone(), torch.cat(view.aux_A_RD, dim=-1), view.hidden_RD.clone())
    aux = torch.cat([torch.cat([aux_RD[rows] for aux_RD in view.aux_A_RD], dim=-1) for rows in selected])
    token_ids = torch.cat([view.token_ids_R[rows] for rows in selected])
    return HostRows(positions, token_ids, aux, torch.cat([view.hidden_RD[rows] for rows in selected]))


def _capture_span(span: PendingSpan, first_position: int, token_ids: list[int], emitted_ids: list[int]) -> CaptureSpan:
    return CaptureSpan(
        request_id=span.info.request_id,
        tenant=span.info.tenant,
        domain=span.info.domain,
        prompt_key=span.info.prompt_key,
        temperature=span.info.temperature,
        first_position=first_position,
        token_ids=token_ids,
        num_proposed=span.num_proposed,
        num_accepted=max(len(emitted_ids) - 1, 0) if span.num_proposed else 0,
        emitted_ids=emitted_ids,
        draft_version=span.proposer,
    )
