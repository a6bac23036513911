"""Environments are named in TOML and built from validated configuration."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rl.environments.gym import GymConfig
from rl.environments.math import Math, MathConfig
from rl.environments.procedural import AdditionConfig
from rl.environments.registry import KINDS, build, read_environments
from wire.errors import ConfigError

ROOT = Path(__file__).parents[3]


def read(text: str) -> tuple[Any, ...]:
    return read_environments(tomllib.loads(text).get("environment", []), source="run.toml")


def test_tables_become_typed_configurations() -> None:
    sums, corridor = read(
        """
        [[environment]]
        name = "sums"
        kind = "addition"
        style = "few_shot"

        [[environment]]
        name = "corridor"
        kind = "gym"
        factory = "somewhere:make"
        reward_range = [-1.0, 1.0]
        actions = {left = 0, right = 1}
        """
    )
    assert sums == AdditionConfig(name="sums", style="few_shot")
    assert isinstance(corridor, GymConfig)
    assert corridor.actions == {"left": 0, "right": 1}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[environment]]\nname='x'\nkind='adition'", "'adition'; there are addition, brevity, code"),
        ("[[environment]]\nname='x'", "the kind None; there are"),
        ("[[environment]]\nname='x'\nkind='addition'\nstile='chat'", "stile: unknown key"),
        ("[[environment]]\nname='x'\nkind='addition'\nstyle='chatty'", "style: .*'chatty'"),
        ("[[environment]]\nkind='addition'", "name: "),
        (
            "[[environment]]\nname='x'\nkind='addition'\n[[environment]]\nname='x'\nkind='maximum'",
            "two environments are called 'x'",
        ),
        ("[[environment]]\nname='x'\nkind='gym'\nfactory='a.b'\nreward_range=[0,1]", "module:callable"),
        ("[[environment]]\nname='x'\nkind='gym'\nfactory='a:b'\nreward_range=[1,0]", "from low to high"),
        ("[[environment]]\nname='x'\nkind='gym'\nfactory='a:b'\nreward_range=[0,1]\nactions={Go=0,'go.'=1}", "differ in more"),
        ("[[environment]]\nname='x'\nkind='code'\nlimits={wall_s=0}", "limits.wall_s"),
    ],
)
def test_a_bad_table_says_what_is_wrong_and_what_there_is(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read(text)


def test_every_kind_is_called_what_its_configuration_says() -> None:
    assert {kind: entry.config.model_fields["kind"].default for kind, entry in KINDS.items()} == {kind: kind for kind in KINDS}


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"kind": "gym", "factory": "no_such_module:make", "reward_range": [0, 1]}, "cannot import"),
        ({"kind": "gym", "factory": "json:no_such_name", "reward_range": [0, 1]}, "cannot import"),
        ({"kind": "gym", "factory": "sys:platform", "reward_range": [0, 1]}, "makes no environment"),
        ({"kind": "code"}, "execution is off"),
        ({"kind": "code", "execution": "isolated", "path": "no/such/file"}, "no/such/file"),
        ({"kind": "reasoning_gym", "task": "no_such_task"}, "chain_sum"),
        ({"kind": "reasoning_gym", "task": "chain_sum", "parameters": {"min_terms": -5}}, "min_terms"),
        ({"kind": "reasoning_gym", "task": "chain_sum", "parameters": {"no_such": 1}}, "no_such"),
    ],
)
def test_what_is_not_there_is_a_configuration_error(table: dict[str, Any], says: str) -> None:
    (config,) = read_environments([{"name": "x", **table}], source="test")
    with pytest.raises(ConfigError, match=says):
        build(config)


def test_math_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [])  # no distribution can be found
    monkeypatch.delitem(sys.modules, "math_verify", raising=False)
    with pytest.raises(ConfigError, match=r"paceline\[rl\]"):
        Math(MathConfig(name="math", path=tmp_path / "problems.jsonl"))


def test_reading_configurations_imports_nothing_heavy() -> None:
    code = (
        "import sys, rl.environments.registry as registry\n"
        "registry.read_environments([{'name': 'x', 'kind': 'addition'}], source='')\n"
        "print([name for name in ('torch', 'vllm', 'numpy', 'sympy', 'reasoning_gym', 'math_verify') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stderr
