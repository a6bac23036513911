"""Every shipped TOML is valid, and the built-in defaults are configs/cpu.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from launch.config import SystemConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.toml")), ids=lambda path: path.name)
def test_shipped_configuration_is_valid(path: Path) -> None:
    SystemConfig.load([path])


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.toml")), ids=lambda path: path.name)
def test_shipped_configuration_is_listed(path: Path) -> None:
    assert f"`{path.relative_to(ROOT / 'configs')}`" in (ROOT / "configs" / "README.md").read_text()


def test_defaults_equal_the_cpu_configuration() -> None:
    assert SystemConfig.load([ROOT / "configs" / "cpu.toml"]) == SystemConfig()


def test_the_lock_satisfies_the_pins_of_the_project() -> None:
    lines = (ROOT / "requirements" / "cpu.lock").read_text().splitlines()
    locked = dict(line.lower().replace("_", "-").split("==") for line in lines if line and line[0] != "#")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *(item for extra in ("cpu", "bench", "rl", "dev") for item in extras[extra])]:
        wanted = Requirement(text)
        assert wanted.name in locked, f"{wanted.name} is not in requirements/cpu.lock"
        assert locked[wanted.name] in wanted.specifier, f"{wanted} is not what requirements/cpu.lock has: {locked[wanted.name]}"


def test_the_lock_names_exact_versions_and_no_host() -> None:
    for line in (ROOT / "requirements" / "cpu.lock").read_text().splitlines():
        assert line.startswith("#") or line.count("==") == 1
        assert "://" not in line
        assert not line.startswith(("torchvision", "torchaudio", "torchcodec", "-"))
