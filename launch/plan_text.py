"""A plan as people and programs read it, its secrets masked."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from launch.plan import SECRET_VARIABLES, ProcessSpec, SystemPlan


def masked(spec: ProcessSpec) -> ProcessSpec:
    """The spec with its secrets hidden, fit to print."""
    env = {key: "***" if key in SECRET_VARIABLES else value for key, value in spec.env.items()}
    return ProcessSpec(**{**vars(spec), "env": env})


def plan_as_json(plan: SystemPlan) -> str:
    """Machine-readable plan, secrets masked."""
    data: dict[str, Any] = {
        "state_dir": plan.state_dir,
        "target_dir": plan.target_dir,
        "gateway_url": plan.gateway_url,
        "admin_url": plan.admin_url,
        "engines": [engine.model_dump() for engine in plan.engines],
        "processes": [asdict(masked(spec)) for spec in plan.processes],
    }
    return json.dumps(data, indent=2, default=str)


def plan_as_text(plan: SystemPlan) -> str:
    """Readable plan, secrets masked."""
    lines = [f"target   {plan.target_dir}", f"state    {plan.state_dir}", f"public   {plan.gateway_url}/v1",
             f"admin    {plan.admin_url}/admin"]  # fmt: skip
    kinds = {engine.id: f", {engine.kind}" for engine in plan.engines}
    for number, spec in enumerate(map(masked, plan.processes), start=1):
        ready = f"{spec.readiness.url} answers 200" if spec.readiness.url else "the process stays alive"
        if spec.readiness.parts_url:
            ready += f", then {spec.readiness.parts_url}"
        need = "required at start, " if spec.restart.is_required else "optional, "
        lines += [
            "",
            f"{number}. {spec.name} ({spec.role}{kinds.get(spec.name, '')})",
            f"   cores    {', '.join(map(str, spec.cores)) or 'unpinned'}" + (f", nice {spec.nice}" if spec.nice else ""),
            f"   ready    {ready}; within {spec.readiness.deadline_s:g} s",
            f"   restart  {need}restarted with backoff up to {spec.restart.max_backoff_s:g} s",
            f"   memory   {spec.memory_note}",
            f"   log      {spec.log_file}",
            "   env      " + "\n            ".join(f"{key}={value}" for key, value in sorted(spec.env.items())),
            f"   argv     {' '.join(spec.argv[:4])}",
            *(f"            {word}" for word in _by_option(spec.argv[4:])),
        ]
    return "\n".join(lines)


def _by_option(words: tuple[str, ...]) -> list[str]:
    """argv words, an option and its values on one line."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return lines
