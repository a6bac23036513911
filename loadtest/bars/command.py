"""`paceline bench bars` and `drill`: measure, compare, print, and say by the exit code whether every bar is met."""

from __future__ import annotations

import asyncio
import importlib
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import aiohttp

from loadtest.bars.registry import Bar, Bench, Measured, UnknownBar, load, select
from loadtest.machine import machine
from loadtest.processes import SystemUnderTestError
from loadtest.run.conduct import Provenance
from wire.errors import PacelineError

Measure = Callable[[Bench], Awaitable[Mapping[str, Measured]]]
"""Returns values by the part of a bar's name after the dot."""

DRILL = ("P2.drill_failed", "P2.drill_single_failed_streams")
"""What `paceline bench drill` measures."""

_SIGNS = {"at_least": ">=", "at_most": "<=", "equals": "=="}


def bars(*, only: Sequence[str], as_json: bool, list_only: bool, bench: Bench) -> int:
    """Run the command; 0 all met, 1 one falls short, 2 a name is unknown."""
    try:
        chosen = select(load(), only)
    except UnknownBar as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    if list_only:
        for bar in chosen:
            print(f"{bar.name:<30} {_SIGNS[bar.comparison]} {bar.bar:g} {bar.unit}: {bar.what}")
        return 0
    rows: list[tuple[Bar, Measured]] = []
    for function in dict.fromkeys(bar.function for bar in chosen):
        wanted = [bar for bar in chosen if bar.function == function]
        print(f"measuring {', '.join(bar.name for bar in wanted)} ...", file=sys.stderr, flush=True)
        values = measure(function, bench)
        for bar in wanted:
            row = (bar, values.get(bar.name.split(".", 1)[1], Measured(None, {"reason": f"{function} did not measure it"})))
            rows.append(row)
            if not as_json:
                print(verdict(*row), flush=True)
    if as_json:
        print(json.dumps(report(rows, bench.provenance), indent=2))
    return int(not all(bar.is_met(measured.value) for bar, measured in rows))


def measure(function: str, bench: Bench) -> Mapping[str, Measured]:
    """Run one measuring function. A system that fails under it is a result, not an accident."""
    module, _, name = function.partition(":")
    run: Measure = getattr(importlib.import_module(f"loadtest.bars.{module}"), name)

    async def measured() -> Mapping[str, Measured]:
        return await run(bench)

    try:
        with _ended_like_the_keyboard_ends():
            return asyncio.run(measured())
    except (SystemUnderTestError, PacelineError, aiohttp.ClientError) as error:
        failure = Measured(None, {"reason": str(error) or type(error).__name__})
        return {bar.name.split(".", 1)[1]: failure for bar in load() if bar.function == function}


@contextmanager
def _ended_like_the_keyboard_ends() -> Iterator[None]:
    """Whatever ends this process stops what it started too; the shell of a background job has it ignore even SIGINT."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def verdict(bar: Bar, measured: Measured) -> str:
    """One bar as a line, and its details below it."""
    value = "not measured" if measured.value is None else f"{measured.value:.4g}"
    word = "met" if bar.is_met(measured.value) else "FALLS SHORT"
    lines = [f"{word:<12} {bar.name:<30} {value} {_SIGNS[bar.comparison]} {bar.bar:g} {bar.unit}: {bar.what}"]
    indent = " " * 15
    for key, detail in measured.detail.items():
        if isinstance(detail, dict) and detail:
            lines += [f"{indent}{key}:", *(f"{indent}  {name}: {text}" for name, text in detail.items())]
        else:
            lines.append(f"{indent}{key}: {detail}")
    return "\n".join(lines)


def report(rows: Sequence[tuple[Bar, Measured]], provenance: Provenance) -> dict[str, object]:
    """All results for machines."""
    return {
        "measured_at_s": time.time(),
        "commit": provenance.commit,
        "versions": dict(provenance.versions),
        "machine": machine(),
        "argv": sys.argv,
        "bars": [
            {
                "name": bar.name,
                "measured": measured.value,
                "bar": bar.bar,
                "comparison": bar.comparison,
                "unit": bar.unit,
                "is_met": bar.is_met(measured.value),
                "what": bar.what,
                "detail": measured.detail,
            }
            for bar, measured in rows
        ],
    }
