from __future__ import annotations

from typing import Any

import msgspec
import pytest
from sample_messages import capture_span, capture_step
from samples import SPEC

from wire.errors import FrameError
from wire.frames import check_capture, frame_for
from wire.messages import CaptureStep

ROWS, HIDDEN, NUM_AUX = 4, 4, 2
FRAMES = [bytes(ROWS * HIDDEN * NUM_AUX * 4), bytes(ROWS * HIDDEN * 4)]


def capture(**changes: Any) -> CaptureStep:
    spec = msgspec.structs.replace(SPEC, aux_layer_ids=(1, 2))
    span = capture_span(token_ids=list(range(ROWS)), num_proposed=3, num_accepted=1, emitted_ids=[1, 2])
    tensors = [frame_for((ROWS, HIDDEN * NUM_AUX), "float32"), frame_for((ROWS, HIDDEN), "float32")]
    return capture_step(span, **({"spec": spec, "tensors": tensors} | changes))


def test_fitting_frames_pass_as_views() -> None:
    aux, hidden = check_capture(capture(), FRAMES)
    assert (aux.nbytes, hidden.nbytes) == (128, 64)


@pytest.mark.parametrize(
    "frames", [FRAMES[:1], [*FRAMES, b""], [FRAMES[0][:-1], FRAMES[1]], [FRAMES[0], FRAMES[1] + b"x"], FRAMES[::-1]]
)
def test_frames_of_other_sizes_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(FrameError):
        check_capture(capture(), frames)


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [frame_for((ROWS, HIDDEN), "float32")] * 2,
        [frame_for((ROWS, HIDDEN * NUM_AUX), "bfloat16"), frame_for((ROWS, HIDDEN), "bfloat16")],
    ],
)
def test_a_header_that_differs_from_the_spec_is_refused(tensors: list[Any]) -> None:
    with pytest.raises(FrameError, match="header announces"):
        check_capture(capture(tensors=tensors), FRAMES)


@pytest.mark.parametrize(("num_proposed", "num_accepted"), [(3, 4), (4, 1), (3, -1), (9, 0)])
def test_impossible_counts_are_refused(num_proposed: int, num_accepted: int) -> None:
    step = capture()
    span = msgspec.structs.replace(step.spans[0], num_proposed=num_proposed, num_accepted=num_accepted)
    with pytest.raises(FrameError, match="impossible"):
        check_capture(capture(spans=[span]), FRAMES)


def test_a_dtype_that_may_not_travel_is_refused() -> None:
    with pytest.raises(FrameError, match="int64"):
        frame_for((1,), "int64")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": [0, 1, 2, 32]}, "vocabulary"),
        ({"token_ids": [0, 1, 2, -1]}, "vocabulary"),
        ({"emitted_ids": [1, 32]}, "vocabulary"),
        ({"emitted_ids": [1, 2, 3]}, "emitted"),
        ({"emitted_ids": []}, "emitted"),
        ({"first_position": -1}, "out of range"),
        ({"first_position": 1 << 40}, "out of range"),
        ({"temperature": float("nan")}, "temperature"),
    ],
)
def test_spans_the_learner_could_not_index_with_are_refused(changes: dict[str, Any], message: str) -> None:
    span = msgspec.structs.replace(capture().spans[0], **changes)
    with pytest.raises(FrameError, match=message):
        check_capture(capture(spans=[span]), FRAMES)


def test_a_capture_time_that_is_no_number_is_refused() -> None:
    with pytest.raises(FrameError, match="no time"):
        check_capture(capture(captured_at_s=float("nan")), FRAMES)
