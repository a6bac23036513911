"""The gain on held-out problems and how sure it is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rl.run.heldout import HeldoutResult, gain, gains, told


def result(rewards: Sequence[float | None], *, num_steps: int = 0, environment: str = "sums") -> HeldoutResult:
    return HeldoutResult(at_s=1.0, num_steps=num_steps, version=num_steps, environment=environment, rewards=tuple(rewards))


def test_a_gain_on_every_problem_is_certain() -> None:
    assert gain(result([0.0] * 9), result([1.0] * 9)) == (1.0, 1.0, 1.0)


def test_a_gain_on_some_problems_has_an_interval_that_narrows_with_their_number() -> None:
    widths = []
    for repeats in (5, 80):
        before, after = [0.0, 0.0, 1.0, 0.0] * repeats, [1.0, 0.0, 0.0, 1.0] * repeats
        found = gain(result(before), result(after))
        assert found is not None
        mean, low, high = found
        assert mean == pytest.approx(0.25)
        assert low < mean < high
        widths.append(high - low)
        assert found == gain(result(before), result(after))
    # The standard deviation of one difference is 0.83: 2 * 1.96 * 0.83 / sqrt(n).
    assert widths == pytest.approx([0.73, 0.18], rel=0.15)


def test_problems_that_failed_once_are_left_out() -> None:
    assert gain(result([0.0, None, 0.0]), result([1.0, 1.0, None])) == (1.0, 1.0, 1.0)
    assert gain(result([None]), result([1.0])) is None
    assert result([None]).mean is None
    assert result([None, 0.5]).mean == 0.5


def test_lines_name_each_environment() -> None:
    first = [result([0.0, 1.0]), result([None], environment="talk")]
    assert told(first) == "held out, after 0 steps: sums 0.500, talk failed (2 problems each)"
    assert "sums 0.500 without 1 that failed (3 problems each)" in told([result([0.0, None, 1.0])])
    (line,) = gains([*first, result([1.0, 1.0], num_steps=4)])
    assert line.startswith("held out, sums: 0.500 after 0 steps, 1.000 after 4; gain +0.500 (")
