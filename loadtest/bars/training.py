"""How fast the learner trains: its own measurement, in a process of its own."""

from __future__ import annotations

from pathlib import Path

from loadtest.bars.child import answer_of
from loadtest.bars.registry import Bench, Measured
from loadtest.system import planned

DRAFT_VOCAB_SIZE = 8192
"""The default."""


async def tokens_per_s(bench: Bench) -> dict[str, Measured]:
    """Completion tokens visited in each second of one core's time, at the default depth and batch."""
    target_dir = Path(planned(bench.up_arguments)["target_dir"])
    return {"learner_tokens_per_s": await measured(target_dir, DRAFT_VOCAB_SIZE)}


async def measured(target_dir: Path, draft_vocab_size: int) -> Measured:
    """Raises SystemUnderTestError where the measurement ends with an error."""
    detail = await answer_of("learner.measure", str(target_dir), str(draft_vocab_size))
    return Measured(detail.pop("tokens_per_cpu_s"), detail)
