"""What a person sees while a run goes on: a progress bar and one line on a terminal, a line now and then elsewhere.

On standard error: standard output is for results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from loadtest.records import SystemSample
from loadtest.run.clock import Clock
from loadtest.run.tally import Tally
from loadtest.scenario import Scenario

_TERMINAL_EVERY_S = 0.5
_PLAIN_EVERY_S = 10.0
_WINDOW_SAMPLES = 10


class LiveLine:
    """The state of a run in one line."""

    def __init__(self, scenario: Scenario, tally: Tally, clock: Clock) -> None:
        self._scenario = scenario
        self._tally = tally
        self._clock = clock
        self._samples: deque[SystemSample] = deque(maxlen=_WINDOW_SAMPLES)
        self._num_swaps = 0
        self._tokens: deque[tuple[float, int]] = deque(maxlen=_WINDOW_SAMPLES)

    def see(self, sample: SystemSample) -> None:
        """A new sample of the system."""
        self._samples.append(sample)
        self._num_swaps += sum(swap.outcome == "committed" for swap in sample.swaps)

    async def run(self) -> None:
        """Show it until cancelled."""
        console = Console(stderr=True)
        with self.shown_on(console) as show:
            while True:
                show()
                await self._clock.until(self._clock.now_s() + (_TERMINAL_EVERY_S if console.is_terminal else _PLAIN_EVERY_S))

    @contextmanager
    def shown_on(self, console: Console) -> Iterator[Callable[[], None]]:
        """Yields what shows the present state."""
        with self._terminal(console) if console.is_terminal else self._plain(console) as show:
            yield show

    @contextmanager
    def _plain(self, console: Console) -> Iterator[Callable[[], None]]:
        yield lambda: print(f"{self._clock.now_s():6.0f} s  {self.text()}", file=console.file, flush=True)

    @contextmanager
    def _terminal(self, console: Console) -> Iterator[Callable[[], None]]:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        progress = Progress(*columns, console=console, auto_refresh=False)
        task = progress.add_task(self._scenario.name, total=self._scenario.duration_s)
        # No thread of its own: it would take the interpreter from requests that are due.
        with Live(console=console, auto_refresh=False) as live:

            def show() -> None:
                progress.update(task, completed=min(self._clock.now_s(), self._scenario.duration_s))
                live.update(Group(progress, Text(self.text())), refresh=True)

            yield show

    def text(self) -> str:
        tally = self._tally
        num_bad = {outcome: count for outcome, count in sorted(tally.outcomes.items()) if outcome != "ok"}
        parts = [f"sent {tally.num_sent}", f"in flight {tally.num_in_flight}", f"ok {tally.outcomes['ok']}"]
        parts += [f"{outcome} {count}" for outcome, count in num_bad.items()]
        parts.append(f"{self._tokens_per_s():.0f} tok/s")
        ttft_s, lag_ms = tally.recent_ttft_s, tally.lags.quantile_ms(0.99)
        parts += [] if ttft_s is None else [f"TTFT {1000 * ttft_s:.0f} ms"]
        parts += [] if lag_ms is None else [f"lag p99 {lag_ms:.1f} ms"]
        return " | ".join([*parts, *self._of_system()])

    def _tokens_per_s(self) -> float:
        """Of the answers that ended lately."""
        self._tokens.append((self._clock.now_s(), self._tally.num_tokens))
        (first_s, first), (last_s, last) = self._tokens[0], self._tokens[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0

    def _of_system(self) -> list[str]:
        if not self._samples or self._samples[-1].active_version is None:
            return []
        newest = self._samples[-1]
        al = acceptance_length(self._samples[0], newest)
        parts = [f"draft {newest.active_version}", "AL -" if al is None else f"AL {al:.2f}", f"swaps {self._num_swaps}"]
        return [*parts, *(f"{name} is not ready" for name, engine in newest.engines.items() if not engine.ready)]


def acceptance_length(before: SystemSample, after: SystemSample) -> float | None:
    """Between two samples, over all domains and versions; None where nothing was verified."""
    num_steps = _num_steps(after) - _num_steps(before)
    return 1.0 + (_num_accepted(after) - _num_accepted(before)) / num_steps if num_steps > 0 else None


def _num_steps(sample: SystemSample) -> float:
    return sum(count for versions in sample.steps.values() for count in versions.values())


def _num_accepted(sample: SystemSample) -> float:
    return sum(sum(counts) for versions in sample.accepted.values() for counts in versions.values())
