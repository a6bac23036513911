"""The tiny target of the learner's unit tests, here too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "unit" / "drafter"))

from tiny_target import spec, target, target_dir

__all__ = ["spec", "target", "target_dir"]


@pytest.fixture
def draft_vocab_size() -> int:
    return 48
