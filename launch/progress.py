"""Progress on a terminal as bars and timers, elsewhere as plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_PLAIN_EVERY_S = 15.0


@contextmanager
def bar(title: str) -> Iterator[Callable[[str, float], None]]:
    """A bar from 0 to 1; call what it yields with (what happens now, share done)."""
    console = Console()
    if not console.is_terminal:
        yield lambda what, share: print(f"{title}: {what}", flush=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[what]}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=1.0, what="")
        yield lambda what, share: progress.update(task, completed=share, what=what)


class Waiting:
    """A timer beside a sentence that says what is being waited for. Call `say` often, also with the same sentence."""

    def __init__(self, sentence: str) -> None:
        self._console = Console()
        self._sentence = sentence
        self._started_at_s = time.monotonic()
        self._is_printed = False
        self._printed_at_s = 0.0
        self._progress = Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=self._console)
        self._task = self._progress.add_task(sentence, total=None)

    def __enter__(self) -> Waiting:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def say(self, sentence: str) -> None:
        if sentence != self._sentence:
            self._sentence = sentence
            self._progress.update(self._task, description=sentence)
            self._is_printed = False
        if not self._console.is_terminal:
            self._print_now_and_then()

    def _print_now_and_then(self) -> None:
        """A sentence once, then only that it still holds."""
        now_s = time.monotonic()
        if self._is_printed and now_s - self._printed_at_s < _PLAIN_EVERY_S:
            return
        waited = f"{now_s - self._started_at_s:.0f} s"
        print(f"... {waited}" if self._is_printed else f"{self._sentence} ({waited})", flush=True)
        self._is_printed, self._printed_at_s = True, now_s
