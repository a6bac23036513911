"""report.html: one file that needs nothing else, readable in light and dark, on a desk and on a phone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape

from loadtest.detectors.regression import Comparison
from loadtest.measures.headline import MEASURES
from loadtest.measures.summary import Summary
from loadtest.report.analysis import Analysis
from loadtest.report.theme import ON_BLACK, ON_WHITE
from loadtest.report.words import change, interval, number, sentences
from loadtest.statistics import Estimate

_STYLE = (
    """
:root { color-scheme: light dark; --page: #ffffff; --panel: #f6f8fa; --good: #00714f; --bad: #b3261e; """
    + ON_WHITE.css()
    + """ }
@media (prefers-color-scheme: dark) {
  :root { --page: #0d1117; --panel: #161b22; --good: #2fc79b; --bad: #ff8f87; """
    + ON_BLACK.css()
    + """ }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.2rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.what { color: var(--muted); margin: .2rem 0 1rem; }
.verdict { font-weight: 600; } .good { color: var(--good); } .bad { color: var(--bad); }
.words { background: var(--panel); border-radius: .5rem; padding: .8rem 1rem .8rem 2rem; margin: 0; }
figure { margin: 1.2rem 0 0; } .pair figure { margin: 0; }
.wide { overflow-x: auto; } .wide svg { min-width: 40rem; }
svg { display: block; width: 100%; height: auto; }
figcaption { color: var(--muted); font-size: .85rem; margin-top: .3rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); gap: 1.5rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .9rem .25rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }
th { color: var(--muted); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
small { color: var(--muted); }
"""
)


def page(analysis: Analysis, figures: Mapping[str, str], comparisons: Sequence[Comparison]) -> str:
    """The whole document. `figures`: SVG by name; those that have nothing to show are absent."""
    name = escape(analysis.scenario.name)
    parts = [
        f"<h1>{name}</h1><p class=what>{escape(analysis.scenario.what)}<br><small>{escape(_origin(analysis))}</small></p>",
        _words(sentences(analysis)),
        wide(figures.get("over_time"), _TIME_CAPTION),
        wide(figures.get("positions_over_time"), ""),
        "<h2>Measures</h2>",
        scroll(_measures(analysis)),
        "<h2>Distributions and groups</h2>",
        _pair(figures, (("latencies",), ("domains", "positions"))),
        *_groups(analysis),
        *_swaps(analysis),
        wide(figures.get("engines"), ""),
        *_comparison(comparisons),
        f"<p><small>{escape(_fine_print(analysis))}</small></p>",
    ]
    return document(name, parts)


def document(title: str, parts: Sequence[str]) -> str:
    """A whole page of these parts; `title` is HTML."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


_TIME_CAPTION = (
    "Solid vertical lines: the traffic changes. Dots: AL has reached 95 % of the plateau that it ends on. Dotted: a draft was swapped in, with its version. Dashed: something else was "
    "done to the system. Grey: warm-up and cool-down, which no number counts."
)


def _words(lines: Sequence[str]) -> str:
    tone = "bad" if lines[0].startswith("NOT") else "good"
    items = [f'<li class="verdict {tone}">{escape(lines[0])}</li>', *(f"<li>{escape(line)}</li>" for line in lines[1:])]
    return f"<ul class=words>{''.join(items)}</ul>"


def _origin(analysis: Analysis) -> str:
    record = analysis.run.record
    if record is None:
        return "nothing is known of where it ran"
    started = datetime.fromtimestamp(record.started_at_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    machine = ", ".join(f"{name} {value}" for name, value in record.machine.items())
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    return " · ".join(
        part
        for part in (started, record.model, record.url, f"commit {record.commit}" if record.commit else "", machine, versions)
        if part
    )


def wide(svg: str | None, caption: str) -> str:
    """On a narrow screen the figure scrolls sideways, and the page does not."""
    return f"<figure><div class=wide>{svg}</div><figcaption>{escape(caption)}</figcaption></figure>" if svg else ""


def _pair(figures: Mapping[str, str], columns: Iterable[Sequence[str]]) -> str:
    """Side by side where there is room."""
    stacks = ("".join(f"<figure>{figures[name]}</figure>" for name in names if name in figures) for names in columns)
    return "<div class=pair>" + "".join(f"<div>{stack}</div>" for stack in stacks) + "</div>"


def scroll(wide_part: str) -> str:
    return f"<div class=wide>{wide_part}</div>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Of plain texts."""
    cells = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f"<table><thead><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr></thead><tbody>{cells}</tbody></table>"
    )


def _measures(analysis: Analysis) -> str:
    rows = []
    for measure in MEASURES:
        estimate = analysis.headline.get(measure.name)
        if estimate is not None:
            scale, unit = measure.shown
            rows.append((measure.title, *_parts(estimate, scale), unit))
    return table(("", "value", "95 % interval", "unit"), rows)


def _parts(estimate: Estimate, scale: float) -> tuple[str, str]:
    has_interval = estimate.low == estimate.low
    between = f"{number(scale * estimate.low)} to {number(scale * estimate.high)}" if has_interval else "–"
    return number(scale * estimate.value), between


def _groups(analysis: Analysis) -> list[str]:
    """A table for each way of telling requests apart that tells any apart."""
    titles = {
        "lane": "By lane", "phase": "By phase", "domain": "By domain", "draft_version": "By draft version",
        "target_version": "By target version", "kv_path": "By KV path",
    }  # fmt: skip
    found = []
    for group, title in titles.items():
        summaries = analysis.groups[group]
        if len(summaries) > 1:
            head: tuple[str, ...] = (
                "", "requests", "failed", "TTFT p50 / p99 ms", "TPOT p50 / p99 ms", "ITL p99 ms", "E2E p50 / p99 ms",
                "tokens/chunk", "AL",
            )  # fmt: skip
            rows: list[tuple[str, ...]] = [_row(name, summary) for name, summary in summaries.items()]
            if all(row[-1] == number(None) for row in rows):
                head, rows = head[:-1], [row[:-1] for row in rows]
            found.append(f"<h2>{title}</h2>{scroll(table(head, rows))}")
    return found


def _row(name: str, summary: Summary) -> tuple[str, ...]:
    def both(percentiles: Mapping[str, Estimate]) -> str:
        return f"{number(percentiles['p50'].value)} / {number(percentiles['p99'].value)}"

    failed = summary.num_by_outcome["failed"] + summary.num_by_outcome["truncated"]
    return (
        name,
        f"{summary.num_requests:,}",
        f"{failed:,}",
        both(summary.ttft_ms.percentiles),
        both(summary.tpot_ms.percentiles),
        number(summary.itl_ms.percentiles["p99"].value),
        both(summary.e2e_ms.percentiles),
        number(summary.tokens_per_chunk.value),
        number(summary.acceptance_length.value),
    )


def _swaps(analysis: Analysis) -> list[str]:
    blip = analysis.blip
    if blip is None:
        return []
    rows = [
        (f"{swap.at_s:.1f}", str(swap.version), swap.trigger, number(swap.largest_gap_ms), number(swap.ttft_p99_ms),
         str(swap.num_requests), str(swap.num_failed))
        for swap in blip.swaps
    ]  # fmt: skip
    head = ("at s", "draft", "by", "longest wait ms", "TTFT p99 ms", "requests", "failed")
    note = ""
    if blip.largest_gap_ms:
        note = (
            f"Within {blip.half_width_s:g} s of a swap. The longest wait between two chunks beside swaps: "
            f"{number(blip.largest_gap_ms[0])} ms; in as many windows halfway between them: {number(blip.largest_gap_ms[1])} ms."
        )
    return [f"<h2>Swaps</h2>{scroll(table(head, rows))}<p><small>{escape(note)}</small></p>"]


def _comparison(comparisons: Sequence[Comparison]) -> list[str]:
    if not comparisons:
        return []
    rows = [(row.measure.title, number(row.before), number(row.after), change(row), row.verdict) for row in comparisons]
    head = ("", "baseline", "this run", "change", "verdict")
    return [f"<h2>Against the baseline</h2>{scroll(table(head, rows))}"]


def _fine_print(analysis: Analysis) -> str:
    blocks = analysis.blocks
    cost = analysis.cost
    return " ".join(
        part
        for part in (
            f"Measured from {analysis.span.start_s:g} to {analysis.span.end_s:.1f} s. Latencies count from the intended send time.",
            f"Intervals: bootstrap over {blocks.number} blocks of {blocks.length_s:.1f} s.",
            f"AL is counted from {analysis.acceptance_source}." if analysis.acceptance.num_steps else "",
            _both_sources(analysis),
            _spent("Processor time", cost.cpu_s, cost.cpu_s_per_accepted_token),
            _spent("GPU time", cost.gpu_s, cost.gpu_s_per_accepted_token),
        )
        if part
    )


def _both_sources(analysis: Analysis) -> str:
    if analysis.acceptance_length_difference is None:
        return ""
    values = " and ".join(
        f"{found.acceptance_length.value:.3f} by {source}" for source, found in analysis.acceptance_by_source.items()
    )
    return f"AL is {values}, a difference of {analysis.acceptance_length_difference:+.3f}."


def _spent(what: str, seconds_by: Mapping[str, float], per_effective_token: Estimate) -> str:
    if not any(seconds_by.values()):
        return ""
    spent = ", ".join(f"{name} {number(seconds)} s" for name, seconds in sorted(seconds_by.items()))
    return f"{what}: {spent}; {interval(per_effective_token, 1e3)} ms for an effective token, an accepted proposal."
