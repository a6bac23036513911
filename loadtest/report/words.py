"""What happened, in a few sentences."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.detectors.domain_shift import RECOVERED_SHARE, Recovery
from loadtest.detectors.regression import Comparison
from loadtest.detectors.swap_blip import SwapBlip
from loadtest.measures.series import WorstWindow
from loadtest.report.analysis import Analysis
from loadtest.statistics import Estimate


def sentences(analysis: Analysis) -> list[str]:
    """The top of a report: may the numbers be believed, what came of the requests, where it was worst, what each shift did."""
    lines = [validity(analysis.why_invalid), *_damage(analysis), _requests(analysis)]
    if analysis.everything.num_by_outcome["ok"]:
        lines += [_latency(analysis), *_speculation(analysis)]
    if analysis.worst:
        lines.append(worst(analysis.worst))
    lines += [recovery(found) for found in analysis.recoveries]
    if analysis.blip:
        lines.append(blip(analysis.blip))
    return lines


def validity(why_invalid: Sequence[str]) -> str:
    return f"NOT VALID: {'; '.join(why_invalid)}." if why_invalid else "The run is valid."


def number(value: float | None) -> str:
    """Three significant digits, and no exponent for what people read."""
    if value is None or value != value:
        return "–"
    if value and abs(value) < 0.001:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def interval(estimate: Estimate, scale: float = 1.0) -> str:
    """A value with the interval around it."""
    text = number(scale * estimate.value)
    has_interval = estimate.low == estimate.low
    return f"{text} ({number(scale * estimate.low)} to {number(scale * estimate.high)})" if has_interval else text


def worst(window: WorstWindow) -> str:
    details = [f"{window.num_requests} requests"]
    if window.good_share is not None:
        details.append(f"{100 * window.good_share:.0f} % within the objectives")
    if window.ttft_p99_ms is not None:
        details.append(f"TTFT p99 {number(window.ttft_p99_ms)} ms")
    details.append(f"{window.num_failed} failed")
    return f"Worst window: {window.start_s:g} to {window.end_s:g} s, {', '.join(details)}."


def recovery(found: Recovery) -> str:
    shift = found.shift
    what = f"Shift at {shift.at_s:g} s, {shift.before} → {shift.after}"
    if found.lowest is None or found.plateau is None:
        return f"{what}: too few verify steps to judge AL."
    if found.before is None or found.dip_share is None:
        fall = f"AL was {found.lowest:.2f} at its lowest"
    elif found.dip_share > 0:
        fall = f"AL fell by {100 * found.dip_share:.0f} % (from {found.before:.2f} to {found.lowest:.2f})"
    else:
        fall = f"AL did not fall (from {found.before:.2f} to {found.lowest:.2f} at its lowest)"
    share = f"{100 * RECOVERED_SHARE:.0f} % of the new plateau ({found.plateau:.2f})"
    if found.recovered_after_s is None:
        return f"{what}: {fall}; it did not get back to {share} within the stretch."
    if found.recovered_after_s == 0:
        return f"{what}: {fall}; it did not rise from there to speak of ({found.plateau:.2f} in the end)."
    return f"{what}: {fall}; it rose to {share} after {found.recovered_after_s:g} s."


def blip(found: SwapBlip) -> str:
    count = len(found.swaps)
    verdict = {
        "worse": "clients noticed", "no blip": "no sign that clients noticed", "undecided": "too little traffic to judge by"
    }[found.verdict]  # fmt: skip
    parts = [
        f"{name} {estimate.value:+,.0f} ms ({estimate.low:+,.0f} to {estimate.high:+,.0f})"
        for name, estimate in (("longest wait between chunks p99", found.longest_gap_p99_ms), ("TTFT p99", found.ttft_p99_ms))
        if estimate
    ]
    if found.failed_share:
        failed = found.failed_share
        parts.append(f"failed {100 * failed.value:+.1f} points ({100 * failed.low:+.1f} to {100 * failed.high:+.1f})")
    details = f"; within {found.half_width_s:.1f} s of a swap, against times without one: {', '.join(parts)}" if parts else ""
    num_failed = sum(swap.num_failed for swap in found.swaps)
    return f"{count} swap{'s' if count != 1 else ''}: {verdict}{details}; requests that failed beside one: {num_failed}."


def regression(comparisons: Sequence[Comparison]) -> list[str]:
    """One line for each verdict."""
    lines = []
    for word in ("worse", "better", "undecided"):
        rows = [row for row in comparisons if row.verdict == word]
        if rows and word != "undecided":
            lines.append(f"{word}: " + ", ".join(f"{row.measure.title} {change(row)}" for row in rows))
        elif rows:
            lines.append("undecided: " + ", ".join(row.measure.title for row in rows))
    return lines


def change(row: Comparison) -> str:
    """How much a measure changed, with its interval."""
    if row.measure.by == "difference":
        return f"{100 * row.change.value:+.2f} points ({100 * row.change.low:+.2f} to {100 * row.change.high:+.2f})"
    if row.change.value != row.change.value:
        return "–"
    return f"×{row.change.value:.3f} ({row.change.low:.3f} to {row.change.high:.3f})"


def _damage(analysis: Analysis) -> list[str]:
    counted = {name: count for name, count in analysis.run.num_unreadable.items() if count}
    return [f"Left out because they could not be read: {count} of the lines of {name}." for name, count in counted.items()]


def _requests(analysis: Analysis) -> str:
    outcomes = analysis.everything.num_by_outcome
    text = (
        f"{analysis.everything.num_requests:,} requests in {analysis.span.length_s:.0f} s: {outcomes['ok']:,} answered whole, "
        f"{outcomes['failed']:,} failed, {outcomes['truncated']:,} cut off, {outcomes['cancelled']:,} left by their client"
    )
    lag_ms = analysis.dispatch_lag_p99_ms
    busy_share = analysis.run.record.busy_share if analysis.run.record else None
    text += f"; dispatch lag p99 {number(lag_ms)} ms" if lag_ms is not None else ""
    return text + (f"; the load tester was busy {100 * busy_share:.0f} % of the time." if busy_share is not None else ".")


def _latency(analysis: Analysis) -> str:
    everything, flow = analysis.everything, analysis.throughput
    text = (
        f"TTFT {_pair(everything.ttft_ms.percentiles)} ms, TPOT {_pair(everything.tpot_ms.percentiles)} ms, "
        f"E2E {_pair(everything.e2e_ms.percentiles)} ms (p50 / p99); {number(flow.tokens_per_s.value)} tokens/s"
    )
    good = f", {100 * everything.good_share.value:.1f} % within the objectives" if analysis.has_objectives else ""
    return f"{text}{good}."


def _pair(percentiles: dict[str, Estimate]) -> str:
    return f"{number(percentiles['p50'].value)} / {number(percentiles['p99'].value)}"


def _speculation(analysis: Analysis) -> list[str]:
    if not analysis.acceptance.num_steps:
        return []
    domains = ", ".join(
        f"{domain} {found.acceptance_length.value:.2f}" for domain, found in analysis.acceptance_by_domain.items()
    )
    several = f" ({domains})" if len(analysis.acceptance_by_domain) > 1 else ""
    cost = analysis.cost
    prices = (
        ("processor", cost.cpu_s_per_token, cost.cpu_s_per_accepted_token),
        ("GPU", cost.gpu_s_per_token, cost.gpu_s_per_accepted_token),
    )
    price = "".join(
        f"; {number(1e3 * token.value)} ms of {what} time a token, {number(1e3 * effective.value)} ms an effective one"
        for what, token, effective in prices
        if token.value == token.value
    )
    return [f"AL {analysis.acceptance.acceptance_length.value:.2f}{several}{price}."]
