from __future__ import annotations

import pytest

from learner.schedule import rate_share


def test_the_rate_is_whole_without_data():
    assert rate_share(0, 1000) == 1.0


def test_the_rate_falls_with_the_root_of_the_data():
    assert rate_share(3000, 1000) == pytest.approx(0.5)
    assert rate_share(99_000, 1000) == pytest.approx(0.1)


def test_the_rate_never_ends():
    assert rate_share(10**9, 1000) > 0
