"""The command line answers at once: it must not pull in torch or vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "vllm", "transformers", "numpy", "fastapi")


def run_and_list_heavy(code: str) -> str:
    script = f"import sys\n{code}\nprint('HEAVY', [name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_help_imports_nothing_heavy() -> None:
    code = "from launch.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass"
    assert run_and_list_heavy(code) == "HEAVY []"


def test_plan_imports_nothing_heavy(tmp_path: Path) -> None:
    code = f"from launch.cli import main\nmain(['plan', '--set', 'state.dir={tmp_path}'])"
    assert run_and_list_heavy(code) == "HEAVY []"


@pytest.mark.parametrize(
    "module",
    [
        "wire.store",
        "wire.control",
        "wire.frames",
        "launch.up",
        "launch.supervise",
        "launch.doctor",
        "rl.trajectory",
        "rl.algorithms.config",
        "rl.config",
        "launch.rl",
        "rl.staleness.ledger",
    ],
)
def test_shared_modules_import_nothing_heavy(module: str) -> None:
    assert run_and_list_heavy(f"import {module}") == "HEAVY []"
