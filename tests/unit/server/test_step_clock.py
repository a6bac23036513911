"""StepClock: which steps are timed, and as what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from server.engine.step_clock import MAX_OUTLIER, StepClock, decode_kind
from wire.messages import StepTime


class Clock:
    """Time stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def step(num_requests: int, depth: int, **changes: Any) -> SimpleNamespace:
    """What the scheduler says of a step that verifies and makes `depth` proposals of each request, but for `changes`."""
    names = [f"r{index}" for index in range(num_requests)]
    output = {
        "num_scheduled_tokens": dict.fromkeys(names, 1 + depth),
        "total_num_scheduled_tokens": num_requests * (1 + depth),
        "scheduled_spec_decode_tokens": {name: [7] * depth for name in names} if depth else {},
        "scheduled_new_reqs": [],
        "num_spec_tokens_to_schedule": depth,
    }
    return SimpleNamespace(**output | changes)


PROMPT = step(2, 3, scheduled_new_reqs=["r1"])
NOTHING = step(0, 3)


def timed(*steps: tuple[SimpleNamespace, float]) -> list[StepTime]:
    """Steps that begin one after the other, each that long before the next."""
    clock = Clock()
    watch = StepClock(clock)
    for output, duration_s in steps:
        watch.begin(output)
        clock.now_s += duration_s
    return watch.snapshot()


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        (step(1, 3), (1, 3)),
        (step(5, 2), (6, 2)),
        (step(4, 0), (4, 0)),
        (PROMPT, None),
        (NOTHING, None),
        # A chunk of a long prompt beside a decoding request.
        (step(2, 3, total_num_scheduled_tokens=4 + 32, scheduled_spec_decode_tokens={"r0": [7, 7, 7]}), None),
        # The first step after the prompt, where K was 0 then and is 3 now; and the other way round.
        (step(1, 3, total_num_scheduled_tokens=1, scheduled_spec_decode_tokens={}), None),
        (step(1, 0, total_num_scheduled_tokens=4, scheduled_spec_decode_tokens={"r0": [7, 7, 7]}), None),
        # Fewer proposals are left before the longest text that is allowed.
        (step(2, 3, total_num_scheduled_tokens=6), None),
    ],
)
def test_only_steps_of_one_depth_without_prompts_have_a_kind(output: SimpleNamespace, kind: tuple[int, int] | None) -> None:
    assert decode_kind(output) == kind


def test_a_step_is_timed_between_two_of_its_kind() -> None:
    assert timed((step(2, 3), 0.1), (step(2, 3), 0.2), (step(2, 3), 0.4)) == [
        StepTime(bucket=2, depth=3, num_steps=1, total_s=pytest.approx(0.2))  # type: ignore[arg-type]
    ]


def test_a_change_of_kind_and_an_idle_time_are_not_timed() -> None:
    one, other = step(1, 3), step(1, 0)
    times = timed(
        *[(one, 0.1)] * 2, *[(other, 0.2)] * 4, (NOTHING, 50.0), (PROMPT, 0.9), *[(one, 0.1)] * 4, (PROMPT, 1.0), (one, 1.0)
    )
    assert {(each.depth, each.num_steps, round(each.total_s, 9)) for each in times} == {(0, 2, 0.4), (3, 2, 0.2)}


def test_a_pause_within_a_step_counts_as_a_few_steps() -> None:
    (only,) = timed(*[(step(1, 3), 0.1)] * 11, (step(1, 3), 60.0), (step(1, 3), 0.1))
    assert only.num_steps == 11
    assert only.total_s == pytest.approx(1.0 + MAX_OUTLIER * 0.1)
