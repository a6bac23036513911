"""Raw tensor frames: what a header promises and what arrives are compared here, before anyone makes a tensor of it.

This module knows byte counts, not tensors: writers pass buffers, readers get checked memoryviews.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, prod

from wire.errors import FrameError
from wire.messages import CaptureSpan, CaptureStep, TensorFrame

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
MAX_POSITION = 1 << 31
"""No token of a request lies here or beyond."""


def frame_for(shape: tuple[int, ...], dtype: str) -> TensorFrame:
    """Header of a dense row-major tensor; raises FrameError for a dtype that may not travel."""
    if dtype not in DTYPE_BYTES:
        raise FrameError(f"dtype {dtype!r} may not travel; use one of {sorted(DTYPE_BYTES)}")
    return TensorFrame(dtype=dtype, shape=shape, num_bytes=prod(shape) * DTYPE_BYTES[dtype])


def check_capture(step: CaptureStep, frames: Sequence[bytes | memoryview]) -> tuple[memoryview, memoryview]:
    """The (aux, hidden) buffers of a capture message, checked against its header, spec and spans; raises FrameError."""
    num_rows = sum(span.num_rows for span in step.spans)
    spec = step.spec
    expected = [
        frame_for((num_rows, len(spec.aux_layer_ids) * spec.hidden_size), spec.dtype),
        frame_for((num_rows, spec.hidden_size), spec.dtype),
    ]
    if step.tensors != expected:
        raise FrameError(f"{step.engine_id} step {step.step}: header announces {step.tensors}, spans and spec need {expected}")
    if len(frames) != len(expected):
        raise FrameError(f"{step.engine_id} step {step.step}: {len(frames)} frames, expected {len(expected)}")
    views = [memoryview(frame) for frame in frames]
    for view, header in zip(views, expected, strict=True):
        if view.nbytes != header.num_bytes:
            raise FrameError(f"{step.engine_id} step {step.step}: frame of {view.nbytes} bytes, header says {header.num_bytes}")
    if not isfinite(step.captured_at_s):
        raise FrameError(f"{step.engine_id} step {step.step}: captured at {step.captured_at_s} is no time")
    for span in step.spans:
        _check_span(span, spec.vocab_size)
    return views[0], views[1]


def _check_span(span: CaptureSpan, vocab_size: int) -> None:
    """What the learner indexes with must be in range here, where one message is lost and not a learner."""
    if not 0 <= span.num_accepted <= span.num_proposed < max(span.num_rows, 1):
        raise FrameError(
            f"{span.request_id}: {span.num_accepted} accepted of {span.num_proposed} proposed in {span.num_rows} rows is impossible"
        )
    if not span.num_accepted <= len(span.emitted_ids) <= span.num_accepted + 1:
        raise FrameError(
            f"{span.request_id}: {len(span.emitted_ids)} tokens emitted after {span.num_accepted} accepted is impossible"
        )
    if not 0 <= span.first_position < MAX_POSITION - span.num_rows:
        raise FrameError(f"{span.request_id}: {span.num_rows} rows from position {span.first_position} are out of range")
    for token in (*span.token_ids, *span.emitted_ids):
        if not 0 <= token < vocab_size:
            raise FrameError(f"{span.request_id}: token id {token} is not in a vocabulary of {vocab_size}")
    if not isfinite(span.temperature):
        raise FrameError(f"{span.request_id}: temperature {span.temperature} is not finite")
