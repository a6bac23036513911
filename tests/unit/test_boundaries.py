"""The table of who may import whom (ARCHITECTURE.md, "Layout and borders"), and what may be nowhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = {"wire", "launch", "server", "drafter", "learner", "rl", "loadtest"}
CONFIGS = {"server.config", "learner.config", "drafter.config", "rl.config"}
MAX_LINES = 600

ALLOWED = {
    "wire": {"wire"},
    "drafter": {"wire", "drafter"},
    "learner": {"wire", "drafter", "learner"},
    "server": {"wire", "server"},
    "server.engine": {"wire", "server.engine", "server.config"},
    "rl": {"wire", "rl"},
    "loadtest": {"wire", "loadtest"},
    "launch": {"wire", "launch", *CONFIGS},
}
FORBIDDEN = {
    "wire": {"torch", "vllm", "transformers"},
    "drafter": {"vllm"},
    "learner": {"vllm"},
    "server": {"torch", "vllm", "transformers"},
    "server.engine": set(),
    "rl": {"vllm"},
    "loadtest": {"torch", "vllm", "transformers"},
    "launch": {"torch", "vllm", "transformers"},
}


TORCH_IN_RL = {"algorithms", "trainer"}
"""Parts of `rl` the trainer is made of; the others run beside engines, and the command line reads their settings."""


def sources() -> list[Path]:
    return sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return "server.engine" if parts[:2] == ("server", "engine") else parts[0]


def imports(tree: ast.Module, *, top_level_only: bool) -> Iterator[str]:
    """Modules imported outside `if TYPE_CHECKING`; at module level only, or anywhere."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "relative imports hide who imports whom"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        is_deferred = top_level_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if is_deferred or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            continue
        pending.extend(ast.iter_child_nodes(node))


def within(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_its_package_may(path: Path) -> None:
    package = package_of(path)
    tree = tree_of(path)
    # launch starts the roles: inside a function it may import a role's main.
    for module in imports(tree, top_level_only=package == "launch"):
        if module.split(".")[0] in OURS:
            assert within(module, ALLOWED[package]), f"{package} may not import {module}"
        assert not within(module, FORBIDDEN[package]), f"{package} may not import {module}"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_unpickles(path: Path) -> None:
    tree = tree_of(path)
    for module in imports(tree, top_level_only=False):
        assert not within(module, {"pickle", "cloudpickle", "dill", "marshal", "shelve"}), f"{path.name} imports {module}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            assert (node.func.value.id, node.func.attr) != ("torch", "load"), f"{path.name}:{node.lineno} calls torch.load"


def test_vllm_is_imported_in_one_place_only() -> None:
    importers = {
        package_of(path)
        for path in sources()
        for module in imports(tree_of(path), top_level_only=False)
        if within(module, {"vllm"})
    }
    assert importers <= {"server.engine"}


def test_in_rl_only_the_trainers_parts_import_torch() -> None:
    importers = {
        path.relative_to(ROOT / "rl").parts[0]
        for path in sources()
        if path.is_relative_to(ROOT / "rl")
        and (path.stem == "config" or path.relative_to(ROOT / "rl").parts[0] not in TORCH_IN_RL)
        for module in imports(tree_of(path), top_level_only=False)
        if within(module, {"torch", "transformers"})
    }
    assert not importers


def test_files_stay_readable_in_one_sitting() -> None:
    every = sources() + sorted((ROOT / "tests").rglob("*.py"))
    too_long = {
        str(path.relative_to(ROOT)): count for path in every if (count := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not too_long


def test_no_file_is_called_utils() -> None:
    assert not [path for path in sources() if path.stem in {"utils", "helpers", "common", "misc"}]


def test_test_files_have_names_of_their_own() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_no_program_in_a_string_imports_vllm_where_code_may_not() -> None:
    pattern = re.compile(r"^\s*(?:from|import)\s+vllm\b", re.MULTILINE)
    packages = ("wire", "launch", "server", "drafter", "learner", "rl", "loadtest")
    paths = [path for package in packages for path in (Path(__file__).parents[2] / package).rglob("*.py")]
    found = [path for path in paths if pattern.search(path.read_text())]
    assert found
    assert all(path.parent.name == "engine" and path.parent.parent.name == "server" for path in found), found


WRITTEN = [
    path
    for pattern in ("*.py", "*.md", "*.toml", "*.js", "*.html", "*.yml", "*.json")
    for path in sorted(ROOT.rglob(pattern))
    if path.is_relative_to(ROOT) and not any(part.startswith(".") or part == "runs" for part in path.relative_to(ROOT).parts)
]


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_names_a_place_on_somebodys_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8", errors="replace")
    found = re.findall(r"(?<![\w.~:/-])/(?:work|home|root|Users|workspace)/[\w.-]+", text)
    assert not found, f"{path.name} names {found[0]}; say where a reader finds it"
