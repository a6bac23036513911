"""Measurements that a role makes of itself: a module of its own, in a process of its own, so that nothing of it is imported here."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from loadtest.processes import SystemUnderTestError


async def answer_of(module: str, *arguments: str) -> dict[str, Any]:
    """The JSON object that `python -m module` prints; raises SystemUnderTestError where it ends with an error."""
    command = (sys.executable, "-m", module, *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    output, errors = await process.communicate()
    if process.returncode:
        raise SystemUnderTestError(f"{module} ended with code {process.returncode}: {errors.decode().strip()[-500:]}")
    answer: dict[str, Any] = json.loads(output)
    return answer
