"""The live view of a running system: a table on a terminal, plain lines elsewhere. Reads the admin API and nothing else.

It shows what it gets: a system that does not answer is shown as such, and watching goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from launch.detached import what_it_waits_for
from launch.drafts import admin_client
from launch.probe import AdminClient
from launch.rundir import LaunchError, RunDir
from wire.control import AdminStatus, SwapReport

REFRESH_S = 1.0
_PLAIN_EVERY_S = 10.0
_RATE_WINDOW_S = 10.0
_SHOWN_SWAPS = 5
_BAR_WIDTH = 24
_WIDE = 110
"""Columns from which on three tables fit side by side."""


@dataclass
class TokenRate:
    """Tokens per second over the last seconds, from a cumulative count."""

    window_s: float = _RATE_WINDOW_S
    _points: list[tuple[float, int]] = field(default_factory=list)

    def update(self, now_s: float, count: int) -> float:
        """Add a reading and return the rate; a count that falls (a restart) starts anew."""
        if self._points and count < self._points[-1][1]:
            self._points.clear()
        self._points.append((now_s, count))
        while len(self._points) > 2 and now_s - self._points[0][0] > self.window_s:
            self._points.pop(0)
        (first_s, first), (last_s, last) = self._points[0], self._points[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


def read_status(client: AdminClient) -> AdminStatus:
    """What the gateway says; raises LaunchError, also where it says something this release cannot read."""
    try:
        return msgspec.convert(client.get("/admin/status"), AdminStatus)
    except msgspec.ValidationError as error:
        raise LaunchError(f"the gateway's status is not readable by this release: {error}") from None


def swaps_committed(status: AdminStatus) -> int:
    return sum(swap.outcome == "committed" for swap in status.swaps)


def summary(status: AdminStatus, tokens_per_s: float) -> str:
    """The state in one plain line."""
    acceptance, report = status.acceptance, status.learner.report
    al = f"AL {acceptance.acceptance_length:.2f}" if acceptance else "AL -"
    positions = " ".join(f"{share:.2f}" for share in acceptance.per_position) if acceptance else "-"
    learner = "no learner"
    if report:
        loss = f" loss {report.loss:.3f}" if report.loss is not None else ""
        learner = f"learner {report.state} {report.num_steps} steps{loss} {report.tokens_per_s:.0f} tok/s"
    traffic = status.traffic
    return (
        f"served {traffic.num_served} failed {traffic.num_failed} in flight {traffic.num_in_flight} | {tokens_per_s:.0f} tok/s | "
        f"draft {status.active_version} {al} ({positions}) | {learner} | swaps {swaps_committed(status)} | "
        f"dropped rows {sum(status.capture.num_dropped_rows.values())}"
    )


def render(status: AdminStatus, tokens_per_s: float, note: str = "", *, width: int = _WIDE) -> RenderableType:
    """The state as tables, side by side where the terminal is wide enough."""
    is_wide = width >= _WIDE
    tables = [_serving(status, tokens_per_s), _acceptance(status, _BAR_WIDTH if is_wide else _BAR_WIDTH // 2)]
    top = Table.grid(padding=(0, 3))
    parts: list[RenderableType] = [top]
    if is_wide:
        tables.append(_learning(status))
    else:
        parts.append(_learning(status))
    top.add_row(*tables)
    if status.swaps:
        parts.append(_swaps(status.swaps))
    if note:
        parts.append(Text(note, style="dim"))
    state = "ready" if status.ready else f"not ready: {status.reason}"
    return Panel(Group(*parts), title=f"paceline  {state}  up {status.uptime_s:.0f} s", title_align="left")


def _pairs(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _serving(status: AdminStatus, tokens_per_s: float) -> Table:
    traffic, capture = status.traffic, status.capture
    rows = [
        ("requests served", str(traffic.num_served)),
        ("in flight", str(traffic.num_in_flight)),
        ("failed", str(traffic.num_failed)),
        ("refused", str(traffic.num_refused)),
        ("tokens/s", f"{tokens_per_s:.1f}"),
        ("captured rows", str(capture.num_captured_rows)),
        *((f"dropped, {reason}", str(count)) for reason, count in capture.num_dropped_rows.items()),
    ]
    return _pairs("serving", rows)


def _acceptance(status: AdminStatus, bar_width: int) -> Table:
    rows = [("draft", str(status.active_version)), ("floor", str(status.floor_version))]
    depths = sorted({engine.depth for engine in status.engines})
    rows.append(("K in force", "/".join(map(str, depths)) or "-"))
    acceptance = status.acceptance
    if acceptance is None:
        rows.append(("AL", "not measured yet"))
    else:
        rows.append(("AL", f"{acceptance.acceptance_length:.2f}"))
        rows += [(f"position {index}", gauge(share, bar_width)) for index, share in enumerate(acceptance.per_position, start=1)]
    rows.append(("canary", status.canary.state))
    rows.append(("floor watch", status.floor.state))
    return _pairs("acceptance", rows)


def gauge(share: float, width: int = _BAR_WIDTH) -> str:
    """A share as a bar and a number."""
    share = min(max(share, 0.0), 1.0)
    filled = round(share * width)
    return "█" * filled + "░" * (width - filled) + f" {share:4.0%}"


def _learning(status: AdminStatus) -> Table:
    learner = status.learner
    report = learner.report
    if report is None:
        return _pairs("learner", [("state", "not heard of yet" if not learner.alive else "starting")])
    rows = [
        ("state", report.state if learner.alive else f"silent for {learner.age_s or 0:.0f} s"),
        ("steps", str(report.num_steps)),
        ("loss", "-" if report.loss is None else f"{report.loss:.3f}"),
        ("tokens/s", f"{report.tokens_per_s:.0f}"),
        ("tokens seen", str(report.num_tokens_seen)),
        ("buffer", f"{report.buffer_requests} requests, {report.buffer_tokens} tokens"),
        ("simulated AL", "-" if report.simulated_al is None else f"{report.simulated_al:.2f}"),
        ("gate", "-" if report.gate is None else "accepted" if report.gate.accepted else "rejected"),
        ("published", str(report.num_published)),
        ("outcome", report.outcome or "-"),
    ]
    if report.vocabulary_shortfall:
        rows.append(("vocabulary", report.vocabulary_shortfall))
    return _pairs("learner", rows)


def _swaps(swaps: list[SwapReport]) -> Table:
    """What changed the draft; a refused wish changed nothing and is only counted."""
    num_refused = sum(swap.outcome == "refused" for swap in swaps)
    swaps = [swap for swap in swaps if swap.outcome != "refused"]
    title = f"swaps ({num_refused} more refused)" if num_refused else "swaps"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("draft", "from", "by", "outcome", "stall ms", "reason"):
        table.add_column(column)
    for swap in swaps[-_SHOWN_SWAPS:]:
        stall = max((commit.apply_ms for commit in swap.commits.values()), default=None)
        shown = "-" if stall is None else f"{stall:.0f}"
        table.add_row(str(swap.version), str(swap.previous), swap.trigger, swap.outcome, shown, swap.reason[:60])
    return table


@contextmanager
def screen() -> Iterator[Callable[[AdminStatus | None, str], None]]:
    """What to call about once a second with the state (None: no answer) and a note."""
    console = Console()
    rate = TokenRate()
    printed_at_s = float("-inf")

    def plain(status: AdminStatus | None, note: str) -> None:
        nonlocal printed_at_s
        now_s = time.monotonic()
        tokens_per_s = rate.update(now_s, status.traffic.num_verified_tokens) if status else 0.0
        if now_s - printed_at_s >= _PLAIN_EVERY_S:
            printed_at_s = now_s
            print(summary(status, tokens_per_s) if status else note, flush=True)

    if not console.is_terminal:
        yield plain
        return
    with Live(console=console, refresh_per_second=4, transient=False) as live:

        def table(status: AdminStatus | None, note: str) -> None:
            if status is None:
                live.update(Panel(note, title="paceline", title_align="left"))
            else:
                tokens_per_s = rate.update(time.monotonic(), status.traffic.num_verified_tokens)
                live.update(render(status, tokens_per_s, note, width=console.width))

        yield table


def watch(state_dir: Path) -> int:
    """Show the system of `state_dir` until interrupted."""
    client = admin_client(state_dir)
    with screen() as show:
        while True:
            try:
                show(read_status(client), "Ctrl-C leaves the view; the system goes on")
            except LaunchError as error:
                show(None, why_silent(RunDir(state_dir), error))
            time.sleep(REFRESH_S)


def why_silent(run_dir: RunDir, error: LaunchError) -> str:
    """What to tell while the admin API does not answer."""
    try:
        system = run_dir.read_system()
    except LaunchError:  # not written yet, just removed, or damaged
        return str(error)
    if run_dir.is_locked() and not system.get("is_ready"):
        return "the system is starting: " + what_it_waits_for(system, [], run_dir)
    return str(error)
