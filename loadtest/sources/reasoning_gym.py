"""reasoning-gym: problems with one right answer, made from a seed. Its arithmetic tasks, word problems among them.

The package's other tasks import computer algebra, plotting and a SAT solver that has to be compiled; none of them is needed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from loadtest.traffic import Prompt, Source, TrafficError, by_opening, split

TASKS = (
    "basic_arithmetic",
    "bitwise_arithmetic",
    "calendar_arithmetic",
    "chain_sum",
    "count_bits",
    "decimal_arithmetic",
    "decimal_chain_sum",
    "dice",
    "fraction_simplification",
    "gcd",
    "gsm_symbolic",
    "lcm",
    "leg_counting",
    "number_format",
    "power_function",
    "prime_factorization",
    "products",
    "time_intervals",
)
PROBLEMS_PER_TASK = 200
_SEED = 0
"""Fixed: a prompt is the same, and on the same side of the split, in every run."""
_PACKAGE = "reasoning_gym"


def load() -> Source:
    """The first problems of every task; raises TrafficError where the package, or what it needs, is absent."""
    with _arithmetic_alone():
        try:
            importlib.import_module(f"{_PACKAGE}.arithmetic")
            create_dataset = importlib.import_module(f"{_PACKAGE}.factory").create_dataset
            return split(_prompts(create_dataset), about=by_opening)
        except ModuleNotFoundError as error:
            raise _absent(error.name or _PACKAGE) from error


def _prompts(create_dataset: Callable[..., Any]) -> Iterator[Prompt]:
    for task in TASKS:
        problems = create_dataset(task, seed=_SEED, size=PROBLEMS_PER_TASK)
        for index in range(PROBLEMS_PER_TASK):
            yield Prompt(f"{_PACKAGE}/{task}/{index}", ({"role": "user", "content": str(problems[index]["question"])},))


@contextmanager
def _arithmetic_alone() -> Iterator[None]:
    """Inside, parts of the package can be imported one by one; its own `__init__`, which imports every task, does not run."""
    found = importlib.util.find_spec(_PACKAGE)
    if found is None:
        raise _absent(_PACKAGE)
    is_imported = _PACKAGE in sys.modules
    sys.modules.setdefault(_PACKAGE, importlib.util.module_from_spec(found))
    try:
        yield
    finally:
        if not is_imported:
            del sys.modules[_PACKAGE]


def _absent(module: str) -> TrafficError:
    return TrafficError(
        f"the module {module} is not installed; run: "
        "pip install --no-deps reasoning-gym==0.1.25 pytz==2026.6 python-dateutil PyYAML"
    )
