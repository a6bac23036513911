"""The canary's decision on numbers alone."""

from __future__ import annotations

from server.tally import Tally
from server.verdict import judge


def tally(num_steps: int, *accepted: int) -> Tally:
    return Tally(num_steps, (num_steps,) * len(accepted), accepted)


def verdict(candidate: dict[str, Tally], baseline: dict[str, Tally]):  # type: ignore[no-untyped-def]
    return judge(candidate, baseline, min_verify_steps=200, max_relative_drop=0.10)


def test_equal_or_better_passes() -> None:
    baseline = {"code": tally(2000, 1000, 500, 250)}
    assert verdict({"code": tally(200, 100, 50, 25)}, baseline).outcome == "pass"
    better = verdict({"code": tally(200, 160, 120, 80)}, baseline)
    assert (better.outcome, better.candidate_al, better.baseline_al) == ("pass", 2.8, 1.875)


def test_clear_drop_rolls_back() -> None:
    result = verdict({"code": tally(400, 0, 0, 0)}, {"code": tally(2000, 1400, 800, 400)})
    assert (result.outcome, result.candidate_al, result.baseline_al) == ("roll_back", 1.0, 2.3)
    assert "1.000 against 2.300" in result.reason


def test_too_few_steps_wait() -> None:
    assert verdict({"code": tally(199, 0)}, {"code": tally(2000, 1000)}).outcome == "wait"
    assert verdict({}, {"code": tally(2000, 1000)}).outcome == "wait"


def test_domains_without_a_baseline_do_not_count() -> None:
    baseline = {"code": tally(2000, 1000), "chat": tally(19, 10)}
    result = verdict({"code": tally(150, 80), "chat": tally(500, 0), "new": tally(500, 0)}, baseline)
    assert (result.outcome, result.num_verify_steps) == ("wait", 150)


def test_small_drop_within_the_setting_passes() -> None:
    assert verdict({"code": tally(5000, 2000)}, {"code": tally(5000, 2500)}).outcome == "pass"


def test_drop_beyond_the_setting_but_within_noise_waits() -> None:
    baseline = {"code": tally(25, 18, 12, 8)}
    result = verdict({"code": tally(200, 100, 60, 30)}, baseline)
    assert result.candidate_al is not None
    assert result.baseline_al is not None
    assert result.baseline_al - result.candidate_al > 0.1 * result.baseline_al
    assert result.outcome == "wait"
    assert verdict({"code": tally(200, 100, 60, 30)}, {"code": tally(2500, 1800, 1200, 800)}).outcome == "roll_back"


def test_shift_of_traffic_to_a_hard_domain_is_no_regression() -> None:
    baseline = {"easy": tally(1900, 1900, 1900), "hard": tally(100, 10, 0)}
    shifted = {"easy": tally(20, 20, 20), "hard": tally(380, 38, 0)}
    assert verdict(shifted, baseline).outcome == "pass"


def test_other_depth_is_no_regression() -> None:
    baseline = {"code": Tally(1000, (1000, 1000, 1000), (700, 500, 300))}
    shallow = {"code": Tally(1000, (1000,), (700,))}
    assert verdict(shallow, baseline).outcome == "pass"
    off_by_load = {"code": Tally(1000, (1000, 500, 500), (700, 250, 150))}
    assert verdict(off_by_load, baseline).outcome == "pass"
